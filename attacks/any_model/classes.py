"""The classes of an audited model, in the order of its outputs, which is never guessed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from secure_fed.errors import ModelError, UsageError
from secure_fed.export.model_card import LABELS
from secure_fed.learning.data.labels import Vocabulary
from secure_fed.learning.models.loading import explained, quiet
from secure_fed.learning.models.locate import locate


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
    noted = () if adapter is None else _noted(adapter)
    own = noted or _named(model)
    if adapter is not None and not noted and not _named_by_its_maker(own):
        own = ()
    if labels:
        _require_own_order(labels, own, f"its {LABELS}" if noted else "id2label in its config.json")
    order = labels or own
    written = {str(value): value for value in learned.values}
    if not labels and not set(written) <= set(order):
        written = _spelled(written, order)
    missing = sorted(set(written) - set(order))
    if not missing:
        return Vocabulary(tuple(written.get(name, name) for name in order), tuple(order))
    if labels:
        raise ModelError(
            f"--labels leaves out {missing[0]!r}, which the texts have: name every class in the model's order"
        )
    if all(isinstance(value, int) for value in learned.values):
        return learned
    raise _unknown(missing[0], own, f"--model {model}" if adapter is None else f"--adapter {adapter}")


def require_same_order(reference: str, names: Sequence[str]) -> None:
    """Refuse a reference that names the classes in another order: its losses would be for other classes."""
    own = _named(reference)
    if _permuted(own, names):
        raise UsageError(
            f"--reference {reference} names its outputs {', '.join(own)!r:.80}, and the model's are {', '.join(names)!r:.80}: "
            "leave it out, or save it again with its outputs in this order"
        )


def _require_own_order(labels: Sequence[str], own: Sequence[str], place: str) -> None:
    if _permuted(labels, own):
        raise UsageError(
            f"--labels is {', '.join(labels)!r:.80}, and the model names its outputs in the order {', '.join(own)!r:.80}: "
            f"leave out --labels, or correct {place}"
        )


def _permuted(names: Sequence[str], others: Sequence[str]) -> bool:
    """Whether both are the same names in another order; capitals count only where names differ by nothing else."""
    for spelled in (str, str.casefold):
        one, other = [spelled(name) for name in names], [spelled(name) for name in others]
        if sorted(one) == sorted(other):
            return one != other
    return False


def _unknown(missing: str, own: Sequence[str], whose: str) -> UsageError:
    """The error for classes whose order among the outputs is not known."""
    if _named_by_its_maker(own):
        said = f"the model's outputs are called {', '.join(own)!r:.80}: name the classes of the texts"
    else:
        said = f"{whose} has no names for its outputs: name all of its classes"
    return UsageError(f"the texts have the class {missing!r:.40}, and {said} in the model's order with --labels")


def _spelled(written: dict[str, int | str], order: Sequence[str]) -> dict[str, int | str]:
    """The classes of the texts by the model's spelling, if that differs from theirs in capitals alone."""
    alike = {name.casefold(): name for name in order}
    if len(alike) < len(order) or not {name.casefold() for name in written} <= alike.keys():
        return written
    return {alike[name.casefold()]: value for name, value in written.items()}


def _named_by_its_maker(order: Sequence[str]) -> bool:
    """True for names of outputs other than those that transformers gives: LABEL_0, LABEL_1 ..."""
    return any(not re.fullmatch(r"LABEL_\d+", name) for name in order)


def _named(name: str) -> tuple[str, ...]:
    import transformers

    with quiet(), explained(name):
        names: dict[int, str] = transformers.AutoConfig.from_pretrained(locate(name)).id2label or {}
    return tuple(names[number] for number in sorted(names))


def _noted(adapter: Path) -> tuple[str, ...]:
    """The class names that this project's runs store beside an adapter; empty for other adapters."""
    try:
        return tuple(map(str, json.loads((adapter / LABELS).read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):
        return ()
