"""The options of single tasks: how questions are read, and the scale of a regression's labels."""

from __future__ import annotations

import argparse
import math
from typing import Any

from secure_fed.errors import ConfigError, UsageError

_TASK = {
    "stride": "question_answering",
    "unanswerable": "question_answering",
    "label_centre": "regression",
    "label_scale": "regression",
    "chat_template": "chat",
}
SETTINGS = tuple(f"data.{name}" for name in _TASK)


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options to a group of the parser. An option that was not given is None."""
    group.add_argument("--stride", type=int, metavar="TOKENS", help="as data.stride (question_answering)")
    group.add_argument(
        "--unanswerable", action="store_true", default=None, help="as data.unanswerable (question_answering)"
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="as data.chat_template (chat; default: that of the adapter's tokenizer, or the model's)",
    )
    scale = "that the model learned as {} (regression; default: as its export states, else {:g})"
    group.add_argument("--label-centre", type=float, metavar="X", help=f"label {scale.format(0, 0)}")
    group.add_argument("--label-scale", type=float, metavar="X", help=f"difference {scale.format(1, 1)}")


def chosen_settings(chosen: argparse.Namespace, task: str) -> dict[str, Any]:
    """The settings of [data] that these options give. An option of another task, or a value beyond its limit, is refused."""
    found = {name: getattr(chosen, name) for name in _TASK if getattr(chosen, name) is not None}
    for name, value in found.items():
        option = f"--{name.replace('_', '-')}"
        if task != _TASK[name]:
            raise UsageError(f"{option} is for --task {_TASK[name]}, and the task is {task}: leave it out")
        if name == "stride" and value < 0:
            raise ConfigError(f"--stride is {value}; it must be at least 0")
        if isinstance(value, float) and (not math.isfinite(value) or (name == "label_scale" and value <= 0)):
            least = "a number above 0" if name == "label_scale" else "a finite number"
            raise ConfigError(f"{option} is {value}; it must be {least}")
    return found


def require_columns(task: str, text_b: str | None, label: str | None) -> None:
    """Refuse columns that a conversation does not have: they would be ignored."""
    for option, name in (("--text-b", text_b), ("--label", label)):
        if task == "chat" and name:
            raise UsageError(
                f"{option} is {name!r:.40}, and a conversation is in one column, which --text names: leave it out"
            )


def gives_scale(settings: dict[str, Any]) -> bool:
    """Whether these settings state the scale of the labels; a part that they leave out has its default."""
    return not settings.keys().isdisjoint(("label_centre", "label_scale"))
