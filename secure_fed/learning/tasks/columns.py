"""The columns that each task reads by default.

Needs no torch, so that a wrong column is reported at once.
"""

from __future__ import annotations

from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.data.rows import Columns

_USUAL = Columns("text", "", "label")
_OWN = {
    "tokens": Columns("tokens", "", "tags"),
    "question_answering": Columns("question", "context", "answers"),
    "causal_lm": Columns("text"),
    "chat": Columns(""),  # one of several forms, which `data/chats.py` recognises by their columns
    "multiple_choice": Columns("text", "choices", "label"),
}


def columns_of(data: DataConfig) -> Columns:
    """The columns of the task `data.task`, where the settings of [data] name no others. Refuses a label that is an input."""
    found = _OWN.get(data.task, _USUAL).chosen(data)
    if found.label and found.label in (found.text, found.text_b):
        setting = "data.text" if found.label == found.text else "data.text_b"
        raise ConfigError(
            f"{setting} and data.label are both {found.label!r}, so that the model would read the answer: set one of them to "
            "another column"
        ).about(setting, found.label, "another column than data.label")
    return found
