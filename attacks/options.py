"""The options that each kind of `secure-fed audit` reads. An option without effect is an error and is never ignored."""

from __future__ import annotations

import argparse
import math
from typing import Any

from secure_fed.errors import ConfigError, UsageError

_MODEL = "model adapter device"
_TEXTS = "members non_members task text text_b label labels max_length"
_OF_TASKS = "stride unanswerable label_centre label_scale chat_template"
_PREPARED = f"{_MODEL} prepared max_length fail_above"
READ = {
    "--lying": "lying trials attack fail_above",
    "--attribute": f"attribute {_MODEL} {_TEXTS} fail_above",
    "--share": "share fail_above",
    "--extract": f"extract {_MODEL} reference task text text_b prefix suffix answers max_length chat_template show_texts "
    "fail_above",
    "--exposure": f"exposure {_PREPARED} secrets_tried chat_template",
    "--prepared": f"{_PREPARED} {_OF_TASKS} reference labels delta",
    "a plain --model": f"{_MODEL} {_TEXTS} {_OF_TASKS} reference shadows config recall neighbours neighbour_model date "
    "scores out show_texts attack fail_above",
    "RUN_DIR": "attack beside show_texts references",
}
# --exposure reads --max-length because a model with fewer positions than the default cannot be loaded without it.
_EVERYWHERE = ("run_dir", "json")


def kind(chosen: argparse.Namespace) -> str:
    """The requested kind of audit: the first of `READ` whose own option is given."""
    own = ("lying", "attribute", "share", "extract", "exposure", "prepared", "model")
    return next(
        (kind for kind, name in zip(READ, own, strict=False) if getattr(chosen, name) not in (None, False)), "RUN_DIR"
    )


def require_read(chosen: argparse.Namespace, usual: argparse.Namespace) -> None:
    """UsageError for an option that this kind of audit does not read. usual: the default options."""
    asked = kind(chosen)
    for name, value in vars(chosen).items():
        readers = [kind for kind, names in READ.items() if name in names.split()]
        if not readers or name in _EVERYWHERE or asked in readers or value == getattr(usual, name, value):
            continue
        raise UsageError(
            f"--{name.replace('_', '-')} goes with {' or '.join(readers)}, and not with {asked}: leave it out"
        )


# from attacks.options
# `--fail-above NAME=NUMBER`: the limit above which an audit exits with a special status, for pipelines.


ABOVE_LIMIT, CANNOT_TELL = 4, 5  # exit statuses


def limit_of(written: str | None, name: str, give: str, most: float = 1.0) -> float:
    """The number after `name=`, from 0 to `most`; `most` without the option. give: the advice in the error message."""
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


# from attacks.options
# The options of single tasks: how questions are read, and the scale of a regression's labels.


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


# from attacks.options
# The kinds of prepared audits. The command line imports this module, so it has no heavy imports.


KINDS = ("none", "labels", "secrets")  # kinds of candidates
TASKS = ("classification", "multi_label", "regression", "tokens", "question_answering", "causal_lm", "chat")
