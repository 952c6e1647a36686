"""The coordinate-wise trimmed mean and median of a round's contributions, in place of their mean.

Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning" (ICML 2018), definitions 1 and 2: of n values of a
coordinate the k = ceil(b n) largest and the k smallest are left out, and the others are averaged. At least one is always left,
so k is at most (n - 1) / 2, rounded down; with b = 1/2 the result is the median. As long as at most k contributions are not
honest, each coordinate of the result lies between two honest values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from secure_fed.tensors.layout import Layout
from secure_fed.tensors.sums import NotFiniteError, require_fits
from secure_fed.tensors.tensors import LowRank, Member, Tensors, dense

MEDIAN = 0.5


class TrimmedSum:
    """`Summation` whose total over its weight is the trimmed mean. All contributions have equal weight; `weight` is ignored.

    It keeps every contribution of the round. Products are formed one tensor at a time.
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
        self._kept.append(Tensors((name, _copied(member)) for name, member in contribution.items()))

    def total(self) -> Tensors:
        if not self._kept:
            return Tensors((name, torch.zeros(shape)) for name, shape in self._layout.entries)
        cut = min(math.ceil(self._share * self.count - _ROUNDING), (self.count - 1) // 2)
        return Tensors((name, self._center(name, cut) * self.weight) for name, _ in self._layout.entries)

    def _center(self, name: str, cut: int) -> Tensor:
        """The trimmed mean of one tensor, coordinate by coordinate; `cut` values are left out at either end."""
        values = torch.stack([dense(one[name]) for one in self._kept]).to(torch.float32).sort(0).values  # (n, *shape)
        return values[cut : self.count - cut].mean(0)


def _copied(member: Member) -> Member:
    return LowRank(member.left.clone(), member.right.clone()) if isinstance(member, LowRank) else member.clone()


_ROUNDING = 1e-9  # 0.07 * 100 is 7.000000000000001 in floats, and means 7
