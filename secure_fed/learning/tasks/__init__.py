"""The tasks by name. To add one, write its file with a `build(data)`, and add its line here.

Importing this package imports no task and no torch; a task's file is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from secure_fed.config import DataConfig
    from secure_fed.learning.tasks.task import Task

TASKS: dict[str, str] = {
    "classification": "secure_fed.learning.tasks.classification",
    "multi_label": "secure_fed.learning.tasks.multi_label",
    "regression": "secure_fed.learning.tasks.regression",
    "tokens": "secure_fed.learning.tasks.tokens",
    "question_answering": "secure_fed.learning.tasks.question_answering",
    "causal_lm": "secure_fed.learning.tasks.causal_lm",
    "chat": "secure_fed.learning.tasks.chat",
    "multiple_choice": "secure_fed.learning.tasks.multiple_choice",
}


def build(data: DataConfig) -> Task:
    """The task that `data.task` names, with the other settings of [data]."""
    return cast("Task", import_module(TASKS[data.task]).build(data))
