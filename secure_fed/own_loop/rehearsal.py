"""A trial of the user's own loop before its first step: some examples together, each of them alone, and all among many.

The user's code computes the loss, so only a trial shows whether it is a mean or a sum, and whether an example's gradient
depends on that example alone. The loop gets a few examples in one batch, then one by one, and then in a batch as large as the
largest likely draw, and its optimizer changes nothing. For an example alone, plain autograd gives its gradient. In a batch, its
per-example gradient must be the same (the loss is a sum), or the same divided by the number of examples (a mean). A loss
averaged over all tokens of a batch, layers that couple examples, and wrong rules for per-example gradients satisfy neither.
Losses of the hardest examples of a batch, and layers of a fixed capacity, do so in small batches alone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from secure_fed.errors import DataError, ModelError
from secure_fed.learning.training.trials.gradient_trial import agree, length

Reduction = Literal["mean", "sum"]
_LOOKED_AT, _MOST = 512, 8
_MOST_CLASSES, _MOST_PLACES = 64, 16
_TOLERANCE = 1e-3
_DEVIATIONS = 6  # of the size of a draw, whose variance is below its mean


@dataclass(frozen=True)
class Part:
    """One batch of a rehearsal: the indices of its examples, and the rows of those that are tried. last: of the rehearsal."""

    kind: Literal["together", "alone", "among"]
    indices: list[int]
    rows: list[int]
    last: bool = False


def parts(examples: Sequence[Any], expected: float) -> list[Part]:
    """The batches of a rehearsal. expected: the expected size of a step's batch."""
    tried = chosen(examples)
    many = _among(tried, len(examples), expected)
    found = [Part("together", tried, list(range(len(tried))))]
    found += [Part("alone", [index], [0], last=not many and index == tried[-1]) for index in tried]
    if many:
        found.append(Part("among", many, [many.index(index) for index in tried], last=True))
    return found


def _among(tried: Sequence[int], examples: int, expected: float) -> list[int]:
    """As many examples as the largest likely draw has, the tried ones spread from first row to last; [] without others."""
    size = min(examples, math.ceil(expected + _DEVIATIONS * math.sqrt(expected)))
    if size <= len(tried):
        return []
    known = set(tried)
    others = (index for index in (row * examples // size for row in range(size)) if index not in known)
    rows = {number * (size - 1) // (len(tried) - 1): index for number, index in enumerate(tried)}
    return [rows[row] if row in rows else next(others) for row in range(size)]


def chosen(examples: Sequence[Any]) -> list[int]:
    """The indices of eight examples, as different as possible; of all if there are fewer.

    The shortest, a middle one and the longest, since equal lengths hide a mean over tokens; and one of each class, the rarest
    first, since a single class hides weights of classes. Every part of an example that has few values counts as a class,
    wherever it stands (`_classes`). The rest are spread evenly.
    """
    if len(examples) < 2:
        raise DataError(
            f"the loader has {len(examples)} examples; whether each has a gradient of its own shows from 2 on"
        )
    lengths: dict[int, int] = {}
    places: dict[Hashable, dict[Hashable, list[int]]] = {}  # by place and class: the examples
    for index in range(0, len(examples), -(-len(examples) // _LOOKED_AT)):
        item = examples[index]
        lengths[index] = _counted(item)
        for place, one in _classes(item).items():
            places.setdefault(place, {}).setdefault(one, []).append(index)
    by_length = sorted(lengths, key=lambda index: (lengths[index], index))
    wanted = [by_length[0], by_length[len(by_length) // 2], by_length[-1]]
    found = [(place, of) for place, of in places.items() if 2 <= len(of) <= _MOST_CLASSES]
    found.sort(key=lambda one: (one[0] not in _label_places(examples[0]), len(one[1])))
    rarest = [sorted(of.values(), key=len) for _, of in found]
    wanted += [one[0] for some in zip_longest(*rarest) for one in some if one]
    looked = list(lengths)
    wanted += looked[:: max(1, len(looked) // _MOST)] + looked
    return sorted(list(dict.fromkeys(wanted))[:_MOST])


def _label_places(item: Any) -> tuple[Hashable, ...]:
    """The usual places of labels, whose classes come first."""
    return (len(item) - 1,) if isinstance(item, tuple | list) else ("labels", "label")


def _targets(item: Any) -> Any:
    """An example's labels: its entry `labels` or `label`, or its last element."""
    if isinstance(item, Mapping):
        return item.get("labels", item.get("label"))
    return item[-1] if isinstance(item, tuple | list) and item else None


def _classes(item: Any) -> dict[Hashable, Hashable]:
    """By place in an example, the parts that may be classes."""
    if isinstance(item, Mapping):
        parts: Iterable[tuple[Hashable, Any]] = item.items()
    elif isinstance(item, tuple | list):
        parts = enumerate(item) if len(item) <= _MOST_PLACES else ()
    else:
        parts = [(0, item)]
    return {place: one for place, value in parts if (one := _class(value)) is not None}


def _class(value: Any) -> Hashable | None:
    """A whole number, a text, or a vector of zeros and ones (one-hot, several labels), if that is the value."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        vector = np.asarray(value).reshape(-1)
        if vector.size != 1:
            binary = value.ndim == 1 and vector.size <= _MOST_CLASSES and np.isin(vector, (0, 1)).all()
            return tuple(map(int, vector)) if binary else None
        value = vector[0].item()
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int | str) else None


def _counted(item: Any) -> int:
    """The number of an example's tokens that have a label; its length if its tokens have no labels."""
    labels = _targets(item)
    if isinstance(labels, list) and all(isinstance(one, int) for one in labels):
        return sum(one >= 0 for one in labels)
    if isinstance(labels, Tensor) and labels.ndim == 1:
        return int((labels >= 0).sum())
    if isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu":
        return int((labels >= 0).sum())
    return length(item)


def reduction(together: Mapping[str, Tensor], alone: Sequence[Mapping[str, Tensor]]) -> Reduction:
    """ "sum" or "mean", inferred from gradients. together: {name: (B, *shape)}; alone: {name: shape} for each example."""
    own = {name: torch.stack([one[name] for one in alone]) for name in together}
    if not all(bool(each.isfinite().all()) for each in (*own.values(), *together.values())):
        raise ModelError(
            "the gradient of an example that was tried is not finite: its loss is, or some of its inputs are; correct the "
            "loss or the data"
        )
    if not any(float(each.abs().sum()) for each in (*own.values(), *together.values())):
        raise ModelError(
            "no example that was tried has a gradient: call loss.backward() before optimizer.step(), and train parameters "
            "that the loss depends on"
        )
    if agree(dict(together), own, _TOLERANCE):
        return "sum"
    if agree({name: each * len(alone) for name, each in together.items()}, own, _TOLERANCE):
        return "mean"
    raise ModelError(
        "the gradient of an example depends on the others in its batch (the loss is averaged over all tokens of the batch, or "
        "by weights of classes, or compares examples, or the model draws random numbers beyond dropout), so no example can be "
        "protected; average the loss of each example by itself, and then over examples"
    )


class Rehearsal:
    """The gradients of a rehearsal's batches, compared after the last. reduction: of the loss; None until then."""

    def __init__(self) -> None:
        self.reduction: Reduction | None = None
        self._together: dict[str, Tensor] = {}
        self._alone: list[dict[str, Tensor]] = []

    def add(self, part: Part, found: Mapping[str, Tensor], summed: Mapping[str, Tensor]) -> None:
        """The gradients of a batch: {name: (B, *shape)} of its examples, {name: shape} their sum. ModelError after the last."""
        if part.kind == "together":
            self._together = {name: each.clone() for name, each in found.items()}
        elif part.kind == "alone":
            self._alone.append({name: one.clone() for name, one in summed.items()})
        if not part.last or not self._together or len(self._alone) != len(next(iter(self._together.values()))):
            return
        reduced = reduction(self._together, self._alone)
        if part.kind == "among":
            self._require_same(part, found, reduced)
        self.reduction, self._together, self._alone = reduced, {}, []

    def _require_same(self, part: Part, found: Mapping[str, Tensor], reduced: Reduction) -> None:
        """Require the gradients of the tried examples among many others to be those alone."""
        factor = len(part.indices) if reduced == "mean" else 1
        own = {name: torch.stack([one[name] for one in self._alone]) for name in found}
        if not agree({name: each[part.rows] * factor for name, each in found.items()}, own, _TOLERANCE):
            raise ModelError(
                f"the gradient of an example depends on the others in a batch of {len(part.indices)} examples, though not in "
                f"one of {len(part.rows)} (the loss chooses the hardest examples of a batch, or a layer has a capacity or "
                "computes statistics of large batches), so no example can be protected; average the loss of each example by "
                "itself, and then over all examples"
            )
