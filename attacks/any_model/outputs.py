"""The outputs of an audited model: its head, its classes in their order, and the scale of its labels. Nothing is guessed.

A head is pre-trained, or of the adapter; never newly initialised. With a wrong order of the classes, or a wrong scale of a
regression's labels, a leak would go unnoticed; so both are as the model or its adapter states them, or as the user does. Errors
of reading a model name options of the command instead of settings (`in_options`).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from secure_fed.errors import ConfigError, DataError, ModelError, UsageError
from secure_fed.export.export import LABEL_SCALE, LabelScale, label_scale_in, read_label_scale
from secure_fed.export.model_card import LABELS
from secure_fed.learning.data.rows import Vocabulary
from secure_fed.learning.models.loading import explained, last_layer, quiet
from secure_fed.learning.models.locate import locate
from secure_fed.learning.tasks.task import Task

UNSCALED = LabelScale(0.0, 1.0)
_ASSUMED = (
    "The labels were taken as they are, since neither the model nor an option states their scale: if the model learned scaled "
    "labels, give --label-centre and --label-scale, or a leak goes unnoticed."
)
_OF_MODEL = r"model\.(?:name|device)"
_OF_TEXTS = r"data\.(?:chat_template|text_b|text|label_centre|label_scale|label|stride|unanswerable)|model\.max_length"
_VALUE = r"( = (?:true\b)?)?"


def config_of(name: str) -> Any:
    """A model's configuration, as transformers reads it."""
    import transformers

    with quiet(), explained(name):
        return transformers.AutoConfig.from_pretrained(locate(name))


def require_head(name: str, task: Task, label_names: Sequence[str]) -> None:
    """ModelError for a model whose head would be newly initialised, or has another number of classes than the texts."""
    if task.keeps_head:
        return
    config = config_of(name)
    kind = task.auto.removeprefix("AutoModel")
    made = list(config.architectures or [])
    if not any(one.endswith(kind) for one in made):
        raise ModelError(
            f"{name} is a {', '.join(made) or 'model'} without a head {kind}: name the --adapter that brings one"
        )
    if label_names and config.num_labels == 1 and task.auto == "AutoModelForSequenceClassification":
        raise ModelError(f"{name} has one output, and an audit of {task.title} needs one for each class")
    if label_names and config.num_labels != len(label_names):
        raise ModelError(
            f"{name} has {config.num_labels} classes, and the texts have {len(label_names)}: name all of the model's, in its "
            "order, with --labels"
        )


def require_head_of_either(adapter: Path, base: str, task: Task, model: Any, label_names: Sequence[str]) -> None:
    """ModelError if neither the base nor the adapter brings the task's head: it would be newly initialised."""
    from peft.utils import load_peft_weights

    if task.keeps_head:
        return
    with suppress(ModelError):
        require_head(base, task, label_names)
        return
    try:
        with quiet():
            stored = load_peft_weights(str(adapter), device="cpu")
    except (OSError, ValueError, RuntimeError, KeyError):
        return  # `adapted` says why
    missing = [name for name in last_layer(model) if not any(key.endswith(f".{name}") for key in stored)]
    if missing:
        raise ModelError(
            f"--adapter {adapter} has no {missing[0]}, and {base} has no head for {task.title}: give the --task "
            "that the adapter was trained for, or an adapter that was saved with its head (modules_to_save)"
        )


def require_adapter(adapter: Path) -> None:
    """ModelError, before anything is loaded, for a folder that is no adapter of PEFT's."""
    from peft import PeftConfig

    with _fitting(adapter):
        PeftConfig.from_pretrained(str(adapter))


def adapted(model: Any, adapter: Path) -> Any:
    """The model with the adapter on it. ModelError if the adapter is another model's."""
    from peft import PeftModel

    with _fitting(adapter):
        warnings.filterwarnings("error", ".*missing adapter keys")  # else PEFT initialises new ones
        return PeftModel.from_pretrained(model, adapter)


@contextmanager
def _fitting(adapter: Path) -> Iterator[None]:
    try:
        with quiet(), warnings.catch_warnings():
            yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, UserWarning) as error:
        first = " ".join(str(error).split())
        raise ModelError(
            f"--adapter {adapter} does not fit the model ({first:.160}): name its base as MODEL"
        ) from error


def in_order(learned: Vocabulary, labels: Sequence[str], *, task: str, model: str, adapter: Path | None) -> Vocabulary:
    """The classes in the order of the model's outputs: as its configuration or its adapter names them, else as `labels`.

    learned: the classes of the texts; empty for a task without classes, which refuses `--labels`. labels: the given order, or
    empty. Integers are the numbers of the outputs where those have no names. UsageError if the order is not known, or if
    `labels` are the model's own names in another order: losses for other classes would hide a leak.
    """
    if not learned.values:
        if labels:
            given = ",".join(labels)
            raise UsageError(f"--labels is {given!r:.40}, but the task {task} has no classes: leave it out")
        return learned
    noted: tuple[str, ...] = ()  # the names that this project's runs store beside an adapter
    if adapter is not None:
        with suppress(OSError, ValueError, TypeError):
            noted = tuple(map(str, json.loads((adapter / LABELS).read_text(encoding="utf-8"))))
    own = noted or _named(model)
    if adapter is not None and not noted and not _named_by_its_maker(own):
        own = ()
    if labels and _permuted(labels, own):
        place = f"its {LABELS}" if noted else "id2label in its config.json"
        raise UsageError(
            f"--labels is {', '.join(labels)!r:.80}, and the model names its outputs in the order {', '.join(own)!r:.80}: "
            f"leave out --labels, or correct {place}"
        )
    order = labels or own
    written = {str(value): value for value in learned.values}
    if not labels and not set(written) <= set(order):
        # The model's spelling, if it differs from that of the texts in capitals alone.
        alike = {name.casefold(): name for name in order}
        if len(alike) == len(order) and {name.casefold() for name in written} <= alike.keys():
            written = {alike[name.casefold()]: value for name, value in written.items()}
    missing = sorted(set(written) - set(order))
    if not missing:
        return Vocabulary(tuple(written.get(name, name) for name in order), tuple(order))
    if labels:
        raise ModelError(
            f"--labels leaves out {missing[0]!r}, which the texts have: name every class in the model's order"
        )
    if all(isinstance(value, int) for value in learned.values):
        return learned
    whose = f"MODEL {model}" if adapter is None else f"--adapter {adapter}"
    if _named_by_its_maker(own):
        said = f"the model's outputs are called {', '.join(own)!r:.80}: name the classes of the texts"
    else:
        said = f"{whose} has no names for its outputs: name all of its classes"
    raise UsageError(f"the texts have the class {missing[0]!r:.40}, and {said} in the model's order with --labels")


def require_same_order(reference: str, names: Sequence[str]) -> None:
    """Refuse a reference that names the classes in another order: its losses would be for other classes."""
    own = _named(reference)
    if _permuted(own, names):
        raise UsageError(
            f"--reference {reference} names its outputs {', '.join(own)!r:.80}, and the model's are {', '.join(names)!r:.80}: "
            "leave it out, or save it again with its outputs in this order"
        )


def _permuted(names: Sequence[str], others: Sequence[str]) -> bool:
    """Whether both are the same names in another order; capitals count only where names differ by nothing else."""
    for spelled in (str, str.casefold):
        one, other = [spelled(name) for name in names], [spelled(name) for name in others]
        if sorted(one) == sorted(other):
            return one != other
    return False


def _named_by_its_maker(order: Sequence[str]) -> bool:
    """True for names of outputs other than those that transformers gives: LABEL_0, LABEL_1 ..."""
    return any(not re.fullmatch(r"LABEL_\d+", name) for name in order)


def _named(name: str) -> tuple[str, ...]:
    names: dict[int, str] = config_of(name).id2label or {}
    return tuple(names[number] for number in sorted(names))


def learned(
    given: LabelScale | None, *, by: str, model: str, adapter: Path | None, whole: bool = True
) -> tuple[LabelScale, str]:
    """The scale that the model or its adapter states, else the given one, else none is assumed; and a sentence that says so.

    by: what gives the scale, options or a configuration. whole: it gives both numbers; otherwise one with its default counts
    as not given. ConfigError if it contradicts the model.
    """
    place = f"the config.json of {model}" if adapter is None else str(adapter / LABEL_SCALE)
    own = _scale_of(model) if adapter is None else read_label_scale(adapter)
    if given is not None and own is not None and not whole:
        given = LabelScale(
            *(mine if part == usual else part for part, usual, mine in zip(given, UNSCALED, own, strict=True))
        )
    if given is not None and own is not None and given != own:
        raise ConfigError(
            f"{by} give a label centre of {given.centre} and a scale of {given.scale}, and {place} states {own.centre} and "
            f"{own.scale}: give these two, or correct that file"
        )
    found = own or given
    if found is None:
        return UNSCALED, _ASSUMED
    return found, f"The model's outputs were compared with (label - {found.centre}) / {found.scale}."


def require_same(name: str, own: LabelScale) -> None:
    """Refuse a reference that states another scale: its losses would be of other numbers. own: of the audited model."""
    other = _scale_of(name)
    if other is not None and other != own:
        raise UsageError(
            f"--reference {name} learned with a label centre of {other.centre} and a scale of {other.scale}, and the model is "
            f"read with {own.centre} and {own.scale}: leave it out"
        )


def _scale_of(name: str) -> LabelScale | None:
    return label_scale_in(config_of(name).to_dict(), f"the configuration of {name}")


@contextmanager
def in_options(model: str = "MODEL", *, texts: bool = True) -> Iterator[None]:
    """Errors of the block, with options in the place of settings.

    model: the option that names the model of this block. texts: whether options define how texts are read; otherwise it is a
    configuration, and its settings keep their names.
    """
    try:
        yield
    except (ConfigError, DataError, ModelError) as error:
        names = f"{_OF_MODEL}|{_OF_TEXTS}" if texts else _OF_MODEL

        def option(found: re.Match[str]) -> str:
            """The option of a setting. A value behind it stays, except for `true`: such options take no value."""
            setting, value = found[1], found[2]
            name = model if setting == "model.name" else f"--{setting.partition('.')[2].replace('_', '-')}"
            return f"{name} " if value == " = " else name

        said = re.sub(rf"\b({names})\b{_VALUE}", option, str(error))
        raise type(error)(said) from error
