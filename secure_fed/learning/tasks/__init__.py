"""The tasks by name. To add one, write its file with a `build(data)`, and name it in the choices of `data.task`.

Importing this package imports no task and no torch; a task's file is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from secure_fed.config import DataConfig

if TYPE_CHECKING:
    from secure_fed.learning.tasks.task import Task

TASKS: tuple[str, ...] = DataConfig.__dataclass_fields__["task"].metadata["choices"]


def build(data: DataConfig) -> Task:
    """The task that `data.task` names, with the other settings of [data]."""
    return cast("Task", import_module(f"{__name__}.{data.task}").build(data))
