"""The columns that each task reads by default.

Needs no torch, so that a wrong column is reported at once.
"""

from __future__ import annotations

from secure_fed.config import DataConfig
from secure_fed.learning.data.rows import Columns

_USUAL = Columns("text", "", "label")
_OWN = {
    "tokens": Columns("tokens", "", "tags"),
    "question_answering": Columns("question", "context", "answers"),
    "causal_lm": Columns("text"),
    "multiple_choice": Columns("text", "choices", "label"),
}


def columns(data: DataConfig) -> Columns:
    """The columns of the task `data.task`, where the settings of [data] name no others."""
    return _OWN.get(data.task, _USUAL).chosen(data)
