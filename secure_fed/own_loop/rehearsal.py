"""A trial of the user's own loop before each epoch: examples alone, together, and among as many as a step may draw.

The user's code computes the loss, so only a trial shows whether it is a mean or a sum, and whether an example's gradient
depends on that example alone. The loop gets the batches of `Parts`, other examples in each epoch, and its optimizer changes
nothing. For an example alone, plain autograd gives its gradient. In a batch, its per-example gradient must be the same (the
loss is a sum), or the same divided by the number of examples (a mean). A loss averaged over all tokens of a batch, layers that
couple examples, and wrong rules for per-example gradients satisfy neither. Losses of the hardest examples of a batch, and
layers of a fixed capacity, do so in small batches alone.

Rows are compared one by one and after clipping, since then all of them weigh the same in a step's sum: within the tolerance of
`account.Allowance`, in clip norms. Tried examples are compared with themselves alone, in every batch. All examples of the large
batch are compared with themselves in one half of it, which notices what spares the tried ones. A row longer than C must also
keep its length, to a thousandth: that moves no sum yet, but will when it is shorter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from privacy.mechanisms import clip_factor
from secure_fed.errors import DataError, ModelError
from secure_fed.learning.training.pass_shapes import length
from secure_fed.own_loop.account import Allowance

Reduction = Literal["mean", "sum"]
_LOOKED_AT, _MOST = 512, 8  # examples: those among which a rehearsal chooses, and those that it tries
_MOST_CLASSES, _MOST_PLACES = 64, 16  # of a part of an example, and parts of an example
_DEVIATIONS = 6  # of the size of a draw, whose variance is below its mean
_LENGTH = 1e-3  # of a row's norm
_NUMBERS = 4096  # of a sketch
_CERTAIN = 0.9  # a sketch's distance is within a tenth of the true one: nine of its standard deviations


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
            known, last = set(tried), self._size - 1
            others = (index for index in self._drawn(self._size, rng) if index not in known)
            places = {number * last // (len(tried) - 1): index for number, index in enumerate(tried)}
            many = [places[row] if row in places else next(others) for row in range(self._size)]
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
        shift = epoch % max(1, len(looked) // _MOST)
        wanted = [by_length[shift], by_length[(len(looked) // 2 + shift) % len(looked)], by_length[-1 - shift]]
        first = (_MOST - len(wanted)) * epoch % max(1, len(classes))
        wanted += [of[epoch % len(of)] for of in (*classes[first:], *classes[:first])]
        wanted += self._drawn(_MOST, np.random.default_rng(epoch)) + looked
        return sorted(list(dict.fromkeys(wanted))[:_MOST])

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
        first = self.examples[0]
        usual = (len(first) - 1,) if isinstance(first, tuple | list) else ("labels", "label")  # the places of labels
        found.sort(key=lambda one: (one[0] not in usual, len(one[1])))
        rarest = zip_longest(*(sorted(of.values(), key=len) for _, of in found))
        return (
            list(lengths),
            sorted(lengths, key=lambda index: (lengths[index], index)),
            [one for some in rarest for one in some if one],
        )


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
    if isinstance(item, Mapping):
        labels = item.get("labels", item.get("label"))
    else:
        labels = item[-1] if isinstance(item, tuple | list) and item else None
    if isinstance(labels, list) and all(isinstance(one, int) for one in labels):
        return sum(one >= 0 for one in labels)
    if isinstance(labels, Tensor) and labels.ndim == 1:
        return int((labels >= 0).sum())
    if isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu":
        return int((labels >= 0).sum())
    return length(item)


class Rehearsal:
    """The gradients of a rehearsal's batches, compared after the last. reduction: of the loss; None until then."""

    def __init__(self, allowance: Allowance) -> None:
        self.reduction: Reduction | None = None
        self._allowance = allowance
        self._noted: list[tuple[Part, Rows]] = []

    def add(self, part: Part, found: Mapping[str, Tensor], summed: Mapping[str, Tensor]) -> None:
        """The gradients of a batch: {name: (B, *shape)} of its examples, {name: shape} their sum. ModelError after the last."""
        one = {name: each.unsqueeze(0) for name, each in summed.items()}
        self._noted.append((part, Rows.of(one if part.kind == "alone" else found)))
        if part.last and len(self._noted) == part.number + 1:
            self.reduction = self._judged()
            self._noted.clear()

    def _judged(self) -> Reduction:
        tried = [part.indices[0] for part, _ in self._noted if part.kind == "alone"]
        alone = Rows.joined([rows for part, rows in self._noted if part.kind == "alone"])
        found: Reduction = _reduction(alone, *(rows for part, rows in self._noted if part.kind == "together"))
        seen = {index: alone[[row]] for row, index in enumerate(tried)}
        for part, rows in self._noted:
            if part.kind == "alone":
                continue
            scaled = rows.times(len(part.indices) if found == "mean" else 1)
            known = [row for row, index in enumerate(part.indices) if index in seen]
            if known and not self._same(scaled[known], Rows.joined([seen[part.indices[row]] for row in known])):
                raise ModelError(self._coupled(part))
            for row, index in enumerate(part.indices):
                seen.setdefault(index, scaled[[row]])  # a half's example, to be compared in the whole
        return found

    def _same(self, found: Rows, own: Rows) -> bool:
        """Whether every row is the same, up to the tolerance, once it is clipped, and is as long before."""
        most = self._allowance.clip_norm
        apart = torch.linalg.vector_norm(found.clipped(most) - own.clipped(most), dim=1)
        longer = (found.norms - own.norms).abs() > _LENGTH * own.norms.clamp(min=most)  # False for NaN
        return bool((apart <= _CERTAIN * self._allowance.tolerance * most).all()) and not bool(longer.any())

    def _coupled(self, part: Part) -> str:
        limit = f"by more than {self._allowance.tolerance:.1e} of clip_norm"
        advice = (
            "so no example can be protected; average the loss of each example by itself, and then over all examples"
        )
        if part.kind == "together":
            return (
                f"the gradient of an example depends on the others in its batch, {limit} (the loss is averaged over all tokens "
                "of the batch, or by weights of classes, or compares examples, or the model draws random numbers beyond "
                f"dropout, or the device rounds coarsely, as with TF32), {advice}"
            )
        return (
            f"the gradient of an example depends on the others in a batch of {len(part.indices)} examples, {limit} (the loss "
            "chooses the hardest examples of a batch, or compares or mixes some, or a layer has a capacity or computes "
            f"statistics of large batches), {advice}"
        )


def _reduction(alone: Rows, together: Rows) -> Reduction:
    """ "sum" or "mean", whichever brings most of the rows nearer to the examples' own gradients."""
    if not bool(alone.norms.isfinite().any()):
        raise ModelError(
            "no example that was tried has a finite gradient: its loss is not finite, or some of its inputs are not; correct "
            "the loss or the data"
        )
    if not bool((alone.norms + together.norms).any()):
        raise ModelError(
            "no example that was tried has a gradient: call loss.backward() before optimizer.step(), and train parameters "
            "that the loss depends on"
        )

    def apart(factor: float) -> float:
        away = torch.linalg.vector_norm(together.sketches * factor - alone.sketches, dim=1)
        shares = away / (together.norms * factor + alone.norms)  # NaN where a row has no finite gradient, or none
        return float(shares.nanmedian())

    return "sum" if apart(1) <= apart(len(alone.norms)) else "mean"


@dataclass(frozen=True)
class Rows:
    """Gradients of examples. norms: (B,). sketches: (B, K) float64, at the distances of the gradients.

    The gradients themselves if they have up to 4,096 numbers. Otherwise count sketches: every number is added, with a random
    sign, to a random one of 4,096 sums. The squared length of a difference is then right on average, with a standard deviation
    of at most 2.2 %.
    """

    norms: Tensor
    sketches: Tensor

    @classmethod
    def of(cls, found: Mapping[str, Tensor]) -> Rows:
        """found: {name: (B, *shape)}."""
        flat = {name: each.detach().reshape(len(each), -1).to(float64_place(each)) for name, each in found.items()}
        squares = [torch.stack([row.double().square().sum() for row in each]) for each in flat.values()]
        norms = torch.stack([each.cpu() for each in squares]).sum(0).sqrt()
        if sum(each.shape[1] for each in flat.values()) <= _NUMBERS:
            return cls(norms, torch.cat([each.cpu().double() for each in flat.values()], 1))
        return cls(norms, torch.stack([_sketched(name, each) for name, each in flat.items()]).sum(0))

    @classmethod
    def joined(cls, some: Sequence[Rows]) -> Rows:
        return cls(torch.cat([one.norms for one in some]), torch.cat([one.sketches for one in some]))

    def __getitem__(self, places: Sequence[int]) -> Rows:
        return Rows(self.norms[list(places)], self.sketches[list(places)])

    def times(self, factor: float) -> Rows:
        return Rows(self.norms * factor, self.sketches * factor)

    def clipped(self, clip_norm: float) -> Tensor:
        """(B, K) of the clipped gradients: zero where a gradient is not finite, as in a step."""
        factors = torch.tensor([clip_factor(norm, clip_norm) for norm in self.norms.tolist()], dtype=torch.float64)
        return torch.where(factors[:, None] > 0, self.sketches * factors[:, None], 0.0)


def _sketched(name: str, each: Tensor) -> Tensor:
    """(B, K) count sketches of (B, P); signs and sums follow from the name."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))
    numbers = each.shape[1]
    place = torch.randint(_NUMBERS, (numbers,), generator=generator).to(each.device)
    sign = torch.randint(2, (numbers,), generator=generator).mul_(2).sub_(1).to(each.device)
    return torch.stack([torch.bincount(place, row.double() * sign, _NUMBERS).cpu() for row in each])


def float64_place(tensor: Tensor) -> torch.device:
    """The tensor's device, or the CPU if the device has no float64 (MPS)."""
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device
