"""Options that several subcommands of `secure-fed audit` read: the model, the task, and the limit that decides the exit status.

The module of every subcommand imports this file for `--help`, so it has no heavy imports.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secure_fed.config import DataConfig, RunConfig
from secure_fed.errors import ConfigError, UsageError
from secure_fed.learning.data import files

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


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the audited model, and how it is loaded."""
    parser.add_argument("model", metavar="MODEL", help="a folder or a Hub id")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="the folder of a PEFT adapter on it")
    parser.add_argument("--device", default="cpu", help="as model.device (default: cpu)")


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    """Add the option of chats. An option that was not given is None, here and below."""
    parser.add_argument("--chat-template", metavar="FILE", help="as data.chat_template (default: the tokenizer's)")


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of single tasks."""
    add_chat_template(parser)
    parser.add_argument("--stride", type=int, metavar="TOKENS", help="as data.stride (question_answering)")
    parser.add_argument("--unanswerable", action="store_true", default=None, help="as data.unanswerable (likewise)")
    stated = "(regression; or as exported)"
    parser.add_argument("--label-centre", type=float, metavar="X", help=f"label learned as 0 {stated}")
    parser.add_argument("--label-scale", type=float, metavar="X", help=f"span learned as 1 {stated}")


def add_limit(parser: argparse.ArgumentParser, name: str, more: str = "") -> None:
    """Add --fail-above and --json. name: of the figure that is compared with the limit."""
    parser.add_argument("--fail-above", metavar=f"{name}=X", help=f"exit with status {ABOVE_LIMIT} above X{more}")
    parser.add_argument("--json", action="store_true", help="print the audit as one JSON object")


def refuse(chosen: argparse.Namespace, names: str, why: str) -> None:
    """Refuse options that this audit does not read. An option that was not given is None, False or an empty list."""
    for name in names.split():
        value = getattr(chosen, name)
        if not (value is None or value is False or value == []):
            raise UsageError(f"--{name.replace('_', '-')} {why}: leave it out")


def chosen_settings(chosen: argparse.Namespace, task: str) -> dict[str, Any]:
    """The settings of [data] that these options give. An option of another task, or a value beyond its limit, is refused."""
    found = {name: value for name in _TASK_OF if (value := getattr(chosen, name, None)) is not None}
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


@dataclass(frozen=True)
class Asked:
    """The user's request. labels: the classes in the order of the model's outputs, if given.

    others: None if membership is unknown; then all texts are in one file, that of the argument `all_in`. classes: all classes
    of the texts' data set, as the data writes them, where they are known; a few texts may not contain all of them. date: the
    column with the date of a text. shadows: the number to train, by `config`. recall: texts outside the training, to prefix
    each text with. neighbours: the number for each text, by the masked language model `neighbour_model` if one is named.
    attacks: files of user-defined signals. scale_given: whether the scale of a regression's labels in `data` is the user's.
    """

    model: str
    members: Path
    others: Path | None
    data: DataConfig
    adapter: Path | None = None
    references: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    max_length: int = 128
    device: str = "cpu"
    classes: tuple[int | str, ...] = ()
    date: str = ""
    shadows: int = 0
    config: RunConfig | None = None
    recall: Path | None = None
    neighbours: int = 0
    neighbour_model: str = ""
    attacks: tuple[Path, ...] = ()
    all_in: str = "DIR"
    scale_given: bool = False

    @classmethod
    def of(cls, chosen: argparse.Namespace, members: Path, others: Path | None, data: DataConfig) -> Asked:
        """The request of a command's options: model, --adapter, --device, --reference, --labels and --max-length."""
        references, labels = tuple(chosen.reference), tuple(chosen.labels.split(",")) if chosen.labels else ()
        of_model = chosen.adapter, references, labels, longest(chosen, data.task), chosen.device
        return cls(chosen.model, members, others, data, *of_model)

    @property
    def files(self) -> list[tuple[Path, str]]:
        """The files of the texts, each with its option."""
        if self.others is None:
            return [(self.members, self.all_in)]
        return [(self.members, "--members"), (self.others, "--non-members")]

    def require_files(self) -> None:
        """Refuse a folder, and what is no file of texts, by its name and first row."""
        for path, name in self.files:
            if path.is_dir():
                raise UsageError(f"{name} is the folder {path}, which may have several splits: name one file of it")
            files.head(path, (), name)

    @property
    def heading(self) -> dict[str, Any]:
        """The first entries of every record about the model."""
        return {"schema": 1, "model": self.model, "adapter": None if self.adapter is None else str(self.adapter)}


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


def exit_status(figure: float, limit: float, above: str) -> int:
    """The exit status of an audit with this figure, for pipelines. above: told on the terminal if it is above the limit."""
    if figure <= limit:
        return 0
    say(above)
    return ABOVE_LIMIT


def cannot_tell(why: str) -> int:
    """The exit status of an audit that cannot be compared with the limit."""
    say(f"--fail-above cannot be judged: {why}")
    return CANNOT_TELL
