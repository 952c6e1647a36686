"""Options that several kinds of `secure-fed audit` read: of the tasks, and the limit above which an audit exits otherwise.

Every kind's command imports this file, so it has no heavy imports.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

from secure_fed.errors import ConfigError, UsageError

Say = Callable[[str], None]  # tells the user what an audit is doing
ABOVE_LIMIT, CANNOT_TELL = 4, 5  # exit statuses
TASKS = ("classification", "multi_label", "regression", "tokens", "question_answering", "causal_lm", "chat")
KINDS = ("none", "labels", "secrets")  # kinds of candidates of a prepared audit
LENGTH, OF_CHATS = 128, 1024  # tokens
_TASK_OF = {
    "stride": "question_answering",
    "unanswerable": "question_answering",
    "label_centre": "regression",
    "label_scale": "regression",
    "chat_template": "chat",
}
SETTINGS = tuple(f"data.{name}" for name in _TASK_OF)


def add_task_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options of single tasks to a group of the parser. An option that was not given is None."""
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
    found = {name: getattr(chosen, name) for name in _TASK_OF if getattr(chosen, name) is not None}
    for name, value in found.items():
        option = f"--{name.replace('_', '-')}"
        if task != _TASK_OF[name]:
            raise UsageError(f"{option} is for --task {_TASK_OF[name]}, and the task is {task}: leave it out")
        if name == "stride" and value < 0:
            raise ConfigError(f"--stride is {value}; it must be at least 0")
        if isinstance(value, float) and (not math.isfinite(value) or (name == "label_scale" and value <= 0)):
            least = "a number above 0" if name == "label_scale" else "a finite number"
            raise ConfigError(f"{option} is {value}; it must be {least}")
    return found


def gives_scale(settings: dict[str, Any]) -> bool:
    """Whether these settings state the scale of the labels; a part that they leave out has its default."""
    return not settings.keys().isdisjoint(("label_centre", "label_scale"))


def require_columns(task: str, text_b: str | None, label: str | None) -> None:
    """Refuse columns that a conversation does not have: they would be ignored."""
    for option, name in (("--text-b", text_b), ("--label", label)):
        if task == "chat" and name:
            raise UsageError(
                f"{option} is {name!r:.40}, and a conversation is in one column, which --text names: leave it out"
            )


def longest(chosen: argparse.Namespace, task: str) -> int:
    """The maximum number of tokens read from a text."""
    length = (OF_CHATS if task == "chat" else LENGTH) if chosen.max_length is None else int(chosen.max_length)
    if length < 1:
        raise ConfigError(f"--max-length is {length}; it must be at least 1, with room for the tokenizer's own tokens")
    return length


def labels_of(chosen: argparse.Namespace) -> tuple[str, ...]:
    """The classes that `--labels` names, in the order of the model's outputs."""
    return tuple(chosen.labels.split(",")) if chosen.labels else ()


def say(what: str) -> None:
    """Tell the user on the terminal what the audit is doing."""
    print(f"secure-fed: {what}", file=sys.stderr)


def limit_of(written: str | None, name: str, give: str, most: float = 1.0) -> float:
    """The number after `name=` in --fail-above, from 0 to `most`; `most` without the option. give: the advice in the error."""
    if written is None:
        return most
    found, _, value = written.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if found != name or not 0 <= number <= most:
        raise ConfigError(f"--fail-above is {written!r:.40}: {give}")
    return number


def above_limit(why: str) -> int:
    """The exit status of an audit whose figure is above the limit, for pipelines; the reason goes to the terminal."""
    say(why)
    return ABOVE_LIMIT


def cannot_tell(why: str) -> int:
    """The exit status of an audit that cannot be compared with the limit."""
    say(f"--fail-above cannot be judged: {why}")
    return CANNOT_TELL
