"""Checks of a run before anything heavy is loaded: torch and transformers take seconds, these checks do not.

Building the run checks the same again, and much else, such as labels and sizes.
"""

from __future__ import annotations

from secure_fed import methods
from secure_fed.config import RunConfig
from secure_fed.learning.data import named_files
from secure_fed.learning.models.locate import found
from secure_fed.learning.tasks.columns import columns
from secure_fed.runs.budget import require_made


def check(config: RunConfig) -> None:
    """Refuse an unknown method, and missing files, columns, model folders or ledgers."""
    methods.require_known(config.method.name)
    found(config.model)
    read, others = columns(config.data), config.evaluation.non_members
    named_files.require_columns(config.data, read, config.privacy.group_column, others)
    if config.privacy.ledger:
        require_made(config.privacy.ledger)
