"""A trial of the user's own loop before each epoch: examples alone, together, and among as many as a step may draw.

The user's code computes the loss, so only a trial shows whether it is a mean or a sum, and whether an example's gradient
depends on that example alone. The loop gets the batches of `parts`, and its optimizer changes nothing. For an example alone,
plain autograd gives its gradient. In a batch, its per-example gradient must be the same (the loss is a sum), or the same
divided by the number of examples (a mean). A loss averaged over all tokens of a batch, layers that couple examples, and wrong
rules for per-example gradients satisfy neither. Losses of the hardest examples of a batch, and layers of a fixed capacity, do
so in small batches alone.

Rows are compared one by one and after clipping, since then all of them weigh the same in a step's sum: within the tolerance of
`allowance`, in clip norms. Tried examples are compared with themselves alone, in every batch. All examples of the large batch
are compared with themselves in one half of it, which notices what spares the tried ones. A row longer than C must also keep
its length, to a thousandth: that moves no sum yet, but will when it is shorter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from privacy.mechanisms import clip_factor
from secure_fed.errors import ModelError
from secure_fed.own_loop.allowance import Allowance
from secure_fed.own_loop.gradients import float64_place
from secure_fed.own_loop.parts import Part

Reduction = Literal["mean", "sum"]
_LENGTH = 1e-3  # of a row's norm
_NUMBERS = 4096  # of a sketch
_CERTAIN = 0.9  # a sketch's distance is within a tenth of the true one: nine of its standard deviations


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
