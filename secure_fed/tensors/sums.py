"""The sum of a round's contributions.

`Summation` is the interface. `PlainSum` adds in the clear, and `TrimmedSum` keeps single contributions for a trimmed mean or a
median. A secure sum (`rounds.masked`) has the same interface.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from secure_fed.tensors.low_rank import recompressed
from secure_fed.tensors.tensors import Layout, LayoutError, LowRank, Member, Tensors, dense, is_finite

MEDIAN = 0.5
"""The share that makes the trimmed mean a median."""
_ROUNDING = 1e-9  # 0.07 * 100 is 7.000000000000001 in floats, and means 7
_SMALL = 1 << 16  # entries; adding a larger tensor takes far longer than the overhead of the call
_MOST_STACKED = 128


class NotFiniteError(ValueError):
    """A contribution has an infinite or NaN entry."""


class Summation(Protocol):
    """A weighted sum over the contributions of one pass, all of one layout."""

    @property
    def count(self) -> int:
        """The number of contributions that were added."""

    @property
    def weight(self) -> float:
        """The sum of their weights."""

    def add(self, contribution: Tensors, weight: float = 1.0) -> None:
        """Add a contribution, or refuse it with `NotFiniteError`."""

    def total(self) -> Tensors:
        """The weighted sum; zeros of the layout if nothing was added."""


def require_fits(layout: Layout, contribution: Tensors) -> None:
    """LayoutError unless the contribution has the names and shapes of the sum."""
    if layout.fits(contribution):
        return
    odd = sorted(set(layout.entries) ^ set(Layout.of(contribution).entries))[0]
    name, shape = odd
    if odd in layout.entries:
        raise LayoutError(f"a contribution lacks {name} of shape {shape}, which the layout of the sum has")
    raise LayoutError(f"a contribution has {name} of shape {shape}, which the layout of the sum lacks")


class PlainSum:
    """`Summation` by addition.

    Contributions are not changed, and a refused contribution leaves the sum as it was. Low-rank members are kept as stacked
    factors as long as `stacks` allows, and then as one dense matrix, to which a contribution is added without an allocation.
    Their total gets new factors, which reveal nothing but the sum. Small tensors are added as one vector.

    precise: add in float64 and form every product, for sums whose sensitivity must not grow by the rounding of thousands of
    additions. Each addition is off by 2^-53 of a partial sum, which is no longer than n C. So one of n contributions of norm C
    moves the rounded sum by n^2 2^-53 C more than the exact one: by 7e-7 C at n = 80,000, within the margin that
    `privacy.mechanisms` leaves below C.
    """

    def __init__(self, layout: Layout, *, precise: bool = False) -> None:
        self._layout = layout
        self._precise = precise
        self._vector: _VectorSum | None = None
        self._members: dict[str, _DenseSum | _StackedSum] = {}
        self.count = 0
        self.weight = 0.0

    def add(self, contribution: Tensors, weight: float = 1.0) -> None:
        require_fits(self._layout, contribution)
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"a weight must be finite and at least 0, got {weight}")
        vector = self._vector = self._vector or _VectorSum(contribution, self._precise)
        gathered = vector.gathered(contribution)
        rest = contribution.without(vector.names) if len(vector.names) < len(contribution) else Tensors()
        if not (is_finite(gathered) and rest.is_finite()):
            raise NotFiniteError("a contribution is not finite")
        vector.add(gathered, weight)
        for name, member in rest.items():
            self._members[name] = _added(self._members.get(name), member, weight, self._precise)
        self.count += 1
        self.weight += weight

    def total(self) -> Tensors:
        zeros = Tensors((name, torch.zeros(shape)) for name, shape in self._layout.entries)
        if self._vector is None:
            return zeros
        return zeros | self._vector.total() | {name: member.total() for name, member in self._members.items()}


class _VectorSum:
    """The small tensors of a sum, end to end in one vector: a few calls for each contribution, however many tensors it has."""

    def __init__(self, contribution: Tensors, precise: bool) -> None:
        """For the small tensors of the first contribution that are not low-rank, in float32 unless `precise`."""
        small = contribution.select(  # added faster in one vector than one by one; only types whose sum is float32
            name
            for name, member in contribution.items()
            if isinstance(member, Tensor)
            and member.numel() <= _SMALL
            and torch.promote_types(member.dtype, torch.float32) == torch.float32
        )
        self.names = tuple(small)
        self._layout = Layout.of(small)
        device = next((part.device for part in small.parts().values()), None)
        dtype = torch.float64 if precise else torch.float32
        self._sum = torch.zeros(self._layout.size, dtype=dtype, device=device)
        self._gathered = torch.zeros_like(self._sum)
        self._places = list(self._layout.unflatten(self._gathered).parts().values())

    def gathered(self, contribution: Tensors) -> Tensor:
        """The contribution's tensors end to end, in a buffer that the next call overwrites."""
        if self.names:
            torch._foreach_copy_(self._places, [dense(contribution[name]) for name in self.names])
        return self._gathered

    def add(self, gathered: Tensor, weight: float) -> None:
        self._sum.add_(gathered, alpha=weight)

    def total(self) -> Tensors:
        return self._layout.unflatten(self._sum.clone())


class _DenseSum:
    """One tensor, added to in place, float32 at least."""

    def __init__(self, shape: tuple[int, ...], like: Member, precise: bool) -> None:
        dtype = torch.float64 if precise else torch.promote_types(like.dtype, torch.float32)
        device = like.left.device if isinstance(like, LowRank) else like.device
        self._sum = torch.zeros(shape, dtype=dtype, device=device)

    def add(self, member: Member, weight: float) -> None:
        if isinstance(member, LowRank):
            self._sum.addmm_(member.left.to(self._sum), member.right.to(self._sum), alpha=weight)
        else:
            self._sum.add_(member.to(self._sum.device), alpha=weight)

    def total(self) -> Tensor:
        return self._sum.clone()


class _StackedSum:
    """Low-rank products side by side: [w1 L1, w2 L2, ...] [R1; R2; ...] is their weighted sum."""

    def __init__(self) -> None:
        self.parts: list[LowRank] = []

    def add(self, member: LowRank, weight: float) -> None:
        self.parts.append(LowRank(member.left * weight, member.right.clone()))

    def total(self) -> LowRank:
        stacked = LowRank(
            torch.cat([part.left for part in self.parts], 1), torch.cat([part.right for part in self.parts], 0)
        )
        return recompressed(stacked)


def stacks(shape: tuple[int, ...], rank: int) -> bool:
    """Whether a product of inner size `rank` is better kept as factors than formed.

    Up to half the smaller side, the factors are no larger than the matrix (if it is square) and are decomposed at least
    twice as fast (benchmarks/low_rank.py). Beyond, memory would grow with the cohort. Beyond `_MOST_STACKED`, new factors for
    the total would take longer to compute than the matrix (benchmarks/fra_merge.py).
    """
    return rank <= min(min(shape) // 2, _MOST_STACKED)


def _added(
    sum_so_far: _DenseSum | _StackedSum | None, member: Member, weight: float, precise: bool
) -> _DenseSum | _StackedSum:
    if isinstance(member, LowRank) and not isinstance(sum_so_far, _DenseSum) and not precise:
        stacked = sum_so_far or _StackedSum()
        if stacks(member.shape, member.rank + sum(part.rank for part in stacked.parts)):
            stacked.add(member, weight)
            return stacked
    if not isinstance(sum_so_far, _DenseSum):
        formed = _DenseSum(tuple(member.shape), member, precise)
        for part in sum_so_far.parts if sum_so_far else ():
            formed.add(part, 1.0)
        sum_so_far = formed
    sum_so_far.add(member, weight)
    return sum_so_far


class TrimmedSum:
    """`Summation` whose total over its weight is the coordinate-wise trimmed mean, or the median, of the contributions.

    Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning" (ICML 2018), definitions 1 and 2: of n values
    of a coordinate the k = ceil(b n) largest and the k smallest are left out, and the others are averaged. At least one is
    always left, so k is at most (n - 1) / 2, rounded down; with b = 1/2 the result is the median. As long as at most k
    contributions are not honest, each coordinate of the result lies between two honest values.

    All contributions have equal weight; `weight` is ignored. Every contribution of the round is kept. Products are formed one
    tensor at a time.
    """

    def __init__(self, layout: Layout, share: float) -> None:
        """share: b, the fraction of contributions that are left out at either end."""
        self._layout, self._share = layout, share
        self._kept: list[Tensors] = []

    @property
    def count(self) -> int:
        return len(self._kept)

    @property
    def weight(self) -> float:
        return float(len(self._kept))

    def add(self, contribution: Tensors, weight: float = 1.0) -> None:
        require_fits(self._layout, contribution)
        if not contribution.is_finite():
            raise NotFiniteError("a contribution is not finite")
        self._kept.append(
            Tensors(
                (name, LowRank(one.left.clone(), one.right.clone()) if isinstance(one, LowRank) else one.clone())
                for name, one in contribution.items()
            )
        )

    def total(self) -> Tensors:
        if not self._kept:
            return Tensors((name, torch.zeros(shape)) for name, shape in self._layout.entries)
        cut = min(math.ceil(self._share * self.count - _ROUNDING), (self.count - 1) // 2)
        found = {}
        for name, _ in self._layout.entries:
            # (n, *shape)
            values = torch.stack([dense(one[name]) for one in self._kept]).to(torch.float32).sort(0).values
            found[name] = values[cut : self.count - cut].mean(0) * self.weight
        return Tensors(found)
