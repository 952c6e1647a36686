"""The classes of an audited model, in the order of its outputs."""

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
    """The classes in the order of the model's outputs: as given, else as the model's configuration names them, else sorted.

    learned: the classes of the texts; empty for a task without classes, which refuses `--labels`. labels: the given order, or
    empty.
    """
    if not learned.values:
        if labels:
            given = ",".join(labels)
            raise UsageError(f"--labels is {given!r:.40}, but the task {task} has no classes: leave it out")
        return learned
    order = labels or (_named(model) if adapter is None else _noted(adapter))
    written = {str(value): value for value in learned.values}
    if not labels and not set(written) <= set(order):
        written = _spelled(written, order)
    if not set(written) <= set(order):
        if labels:
            missing = sorted(set(written) - set(order))[0]
            raise ModelError(
                f"--labels leaves out {missing!r}, which the texts have: name every class in the model's order"
            )
        if _named_by_its_maker(order) and not all(isinstance(value, int) for value in learned.values):
            raise UsageError(
                f"the texts have the class {sorted(set(written) - set(order))[0]!r:.40}, and the model's outputs are called "
                f"{', '.join(order)!r:.80}: name the classes of the texts in the model's order with --labels"
            )
        return learned
    return Vocabulary(tuple(written.get(name, name) for name in order), tuple(order))


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
