"""The batches of a rehearsal: which examples are tried alone, together, and among as many as a step may draw.

Every epoch begins with a rehearsal, and each has other examples.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
from torch import Tensor

from secure_fed.errors import DataError
from secure_fed.learning.training.pass_shapes import length

_LOOKED_AT, _MOST = 512, 8
_MOST_CLASSES, _MOST_PLACES = 64, 16
_DEVIATIONS = 6  # of the size of a draw, whose variance is below its mean


@dataclass(frozen=True)
class Part:
    """One batch of a rehearsal: the indices of its examples, its number in the rehearsal, and whether it is the last.

    kind: one tried example "alone", the tried examples "together", or "many" examples.
    """

    kind: Literal["alone", "together", "many"]
    indices: list[int]
    number: int
    last: bool = False


@dataclass(frozen=True)
class Parts:
    """The batches of each epoch's rehearsal. expected: the expected size of a step's batch."""

    examples: Sequence[Any]
    expected: float

    def __len__(self) -> int:
        """The batches of a rehearsal, of any epoch."""
        tried = min(_MOST, len(self.examples))
        return tried + 1 + (3 if self._size > tried else 0)

    def of_epoch(self, epoch: int) -> list[Part]:
        """Each tried example alone; all of them together; the two halves of a large batch, and that batch.

        The large batch has as many examples as the largest likely draw, the tried ones spread over its rows. It is left out,
        and its halves are, if the tried ones are as many. Which are the others is drawn, since data may have a period.
        """
        tried, rng = self.tried(epoch), np.random.default_rng(epoch)
        batches: list[tuple[Literal["alone", "together", "many"], list[int]]] = [("alone", [one]) for one in tried]
        batches.append(("together", tried))
        if self._size > len(tried):
            many = self._among(tried, rng)
            first = rng.permutation(len(many)) < len(many) // 2
            halves = [[index for index, own in zip(many, first, strict=True) if own == half] for half in (True, False)]
            batches += [("many", half) for half in (*halves, many)]
        return [Part(*batch, number, number + 1 == len(batches)) for number, batch in enumerate(batches)]

    def tried(self, epoch: int = 0) -> list[int]:
        """The indices of eight examples, as different as possible; of all if there are fewer.

        One of the shortest, of middle length and of the longest, since equal lengths hide a mean over tokens; and one of each
        class, the rarest first, since a single class hides weights of classes. Every part of an example that has few values
        counts as a class, wherever it stands (`_classes`). Each epoch goes on to the next lengths and classes. The rest are
        drawn.
        """
        looked, by_length, classes = self._looked
        turn = epoch % max(1, len(looked) // _MOST)
        wanted = [by_length[turn], by_length[(len(looked) // 2 + turn) % len(looked)], by_length[-1 - turn]]
        first = (_MOST - len(wanted)) * epoch % max(1, len(classes))
        wanted += [of[epoch % len(of)] for of in (*classes[first:], *classes[:first])]
        wanted += self._drawn(_MOST, np.random.default_rng(epoch)) + looked
        return sorted(list(dict.fromkeys(wanted))[:_MOST])

    def _among(self, tried: Sequence[int], rng: np.random.Generator) -> list[int]:
        """The tried examples, spread from first row to last, among others."""
        known, rows = set(tried), range(self._size)
        others = (index for index in self._drawn(self._size, rng) if index not in known)
        places = {number * (len(rows) - 1) // (len(tried) - 1): index for number, index in enumerate(tried)}
        return [places[row] if row in places else next(others) for row in rows]

    def _drawn(self, most: int, rng: np.random.Generator) -> list[int]:
        """That many indices without repetition, or all, in any order."""
        count = len(self.examples)
        found: list[int] = rng.choice(count, min(most, count), replace=False).tolist()
        return found

    @property
    def _size(self) -> int:
        return min(len(self.examples), math.ceil(self.expected + _DEVIATIONS * math.sqrt(self.expected)))

    @cached_property
    def _looked(self) -> tuple[list[int], list[int], list[list[int]]]:
        """Up to 512 examples: their indices, the same by length, and those of each class, the rarest class first."""
        if len(self.examples) < 2:
            raise DataError(
                f"the loader has {len(self.examples)} examples; whether each has a gradient of its own shows from 2 on"
            )
        lengths: dict[int, int] = {}
        places: dict[Hashable, dict[Hashable, list[int]]] = {}  # by place and class: the examples
        for index in sorted(self._drawn(_LOOKED_AT, np.random.default_rng(0))):
            item = self.examples[index]
            lengths[index] = _counted(item)
            for place, one in _classes(item).items():
                places.setdefault(place, {}).setdefault(one, []).append(index)
        found = [(place, of) for place, of in places.items() if 2 <= len(of) <= _MOST_CLASSES]
        found.sort(key=lambda one: (one[0] not in _label_places(self.examples[0]), len(one[1])))
        rarest = zip_longest(*(sorted(of.values(), key=len) for _, of in found))
        return (
            list(lengths),
            sorted(lengths, key=lambda index: (lengths[index], index)),
            [one for some in rarest for one in some if one],
        )


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
