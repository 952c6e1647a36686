"""Checks of a run before anything heavy is loaded: torch and transformers take seconds, these checks do not.

Building the run checks the same again, and much else, such as labels and sizes.
"""

from __future__ import annotations

from secure_fed import methods
from secure_fed.config import RunConfig
from secure_fed.learning.data import sources
from secure_fed.learning.data.rows import columns_of
from secure_fed.learning.models.locate import found
from secure_fed.runs.ledger_heads import require_made


def check(config: RunConfig) -> None:
    """Refuse an unknown method, and missing files, columns, model folders or ledgers."""
    methods.require_known(config.method.name)
    found(config.model)
    read, others = columns_of(config.data), config.evaluation.non_members
    sources.require_columns(config.data, read, config.privacy.group_column, others)
    if config.privacy.ledger:
        require_made(config.privacy.ledger)
