"""The error of averaging factors instead of products (Trautmann et al., 2025, error analysis in section V).

Over the clients i of a round, with their weights in the mean, and per adapted matrix

    M = mean(B_i A_i),   err_FedAvg = M - mean(B_i) mean(A_i),   err_FRA = M - M_r,

M_r being the best approximation of M by the rank r of its factors. Both are relative to M: the Frobenius norm of the error over
all matrices, divided by the Frobenius norm of M. They show the error of either rule for these clients, whichever rule the run
uses; the paper's own err_FedAvg, for two clients of one half each, is 0.25 (B_1 - B_2)(A_1 - A_2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from secure_fed.learning.models.adapters.lora import Pair
from secure_fed.tensors.low_rank import truncated
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Layout, LowRank, Member, Tensors, dense


@dataclass
class AggregationError:
    """One round's means of factors and of products, over the clients seen so far."""

    pairs: Sequence[Pair]
    _sum: PlainSum | None = None

    def see(self, before: Tensors, after: Tensors, weight: float) -> None:
        whole = before | after
        factors = whole.select(name for pair in self.pairs for name in (pair.a, pair.b)).dense()
        products = {pair.module: LowRank(factors.tensor(pair.b), factors.tensor(pair.a)) for pair in self.pairs}
        seen = factors | products
        if self._sum is None:
            self._sum = PlainSum(Layout.of(seen))
        self._sum.add(seen, weight)

    def collected(self) -> dict[str, float]:
        total, self._sum = self._sum, None
        if total is None or not total.weight:
            return {}
        mean = total.total() * (1 / total.weight)
        lost = averaged = whole = 0.0
        for pair in self.pairs:
            a, b, product = mean.tensor(pair.a).double(), mean.tensor(pair.b).double(), _double(mean[pair.module])
            singular = truncated(product, min(product.shape)).s
            whole += float(singular.square().sum())
            lost += float(singular[a.shape[0] :].square().sum())
            averaged += float((dense(product) - b @ a).square().sum())
        if not whole:
            return {}
        return {"fedavg": math.sqrt(averaged / whole), "fra": math.sqrt(lost / whole)}


def _double(member: Member) -> Member:
    return LowRank(member.left.double(), member.right.double()) if isinstance(member, LowRank) else member.double()
