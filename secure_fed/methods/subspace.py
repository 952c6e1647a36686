"""Averaging products B A: the mean change of every adapted matrix by products with thin matrices, one pass after the other.

With D = mean(D_i), D_i = s (B_i A_i - B A) as in `fra_lora`, (m, n), and k columns, min(m, n) at most:

    first          D_i Omega         (m, k)     Q_0 = an orthonormal basis of the mean's columns
    second         D_i^T Q_0         (n, k)     Q_1 = ...
    third          D_i Q_1           (m, k)     and so on
    last           the next of these products, W, and the head's change

    D is about W Q^T where the last product was with D_i, Q W^T where it was with D_i^T; Q is the last basis

Each pass is linear in D_i, so it may be masked, clipped and noised like any sum, and Q is computed from released means. If D
has rank k at most, the result is D itself, up to rounding.

Omega is uniform over matrices with orthonormal columns, times sqrt(n / k), so that E |D_i Omega|^2 = |D_i|^2, and for a basis
|D_i Q| <= |D_i|: one clip norm suits all passes. Omega is made from a digest of A and B at the start of the round: public,
independent of the round's data, and new in every round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor
from torch.nn.functional import pad

from secure_fed.learning.models.adapters.lora import Pair, pairs
from secure_fed.methods.averaged import AveragedLora, next_state
from secure_fed.methods.ffa_lora import without_a
from secure_fed.methods.fra_lora import FraLora, Split, delta
from secure_fed.methods.method import CHANGE, RoundPlan, State
from secure_fed.tensors import sketch
from secure_fed.tensors.low_rank import Svd
from secure_fed.tensors.tensors import Layout, LowRank, Member, Tensors


def start(rows: int, columns: int, seed: int) -> Tensor:
    """Omega, (n, k), float64: a function of its arguments, so that all parties compute the same."""
    drawn = sketch.directions(rows, columns, seed)[:, :columns]  # a sketch's scale counts its checks
    return drawn * math.sqrt((columns + sketch.CHECKS) / columns)


def basis(mean: Tensor) -> Tensor:
    """Orthonormal columns with the span of `mean`'s columns, or zero columns; see `sketch.basis`."""
    return sketch.basis(pad(mean, (0, sketch.CHECKS)))


@dataclass(frozen=True)
class Subspace(AveragedLora):
    """Averages the head and the products B A, these projected on a subspace of k columns.

    columns: k, limited by the matrix's rows and columns. passes: their names in order, two or more, CHANGE the last.
    split: the function that splits a product into the next factors. b_alone: whether clients train B alone.
    """

    columns: int
    passes: tuple[str, ...]
    split: Split
    b_alone: bool = False

    @property
    def _whole(self) -> FraLora:
        return FraLora(adapter=self.adapter, denoise="none")

    def factors(self, product: Svd) -> tuple[Tensor, Tensor]:
        return self.split(product)

    def trained(self, state: State) -> Tensors:
        return without_a(state.tensors) if self.b_alone else state.tensors

    def plan(self, state: State) -> RoundPlan:
        return RoundPlan(tuple(self.trained(state)), down=tuple(state.tensors), passes=self.passes)

    def layout(self, state: State, pass_name: str) -> Layout:
        entries = dict(self._whole.layout(state, CHANGE).entries)
        deltas = {delta(pair.module): entries.pop(delta(pair.module)) for pair in pairs(state.tensors)}
        sent = {} if pass_name != CHANGE else entries
        for name, (m, n) in deltas.items():
            sent[name] = (n if self._turned(pass_name) else m, min(self.columns, m, n))
        return Layout(tuple(sorted(sent.items())))

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        """A client's products in this pass; an A that `after` lacks was frozen."""
        found = pairs(before)
        frozen = before.select(pair.a for pair in found)
        changes = self._whole.contribute(CHANGE, before, frozen | after, {})
        head = changes.without(delta(pair.module) for pair in found)
        sent = {}
        for pair in found:
            # D_i or D_i^T times Q, computed in float64 and sent in the type of the change
            change, q = cast(LowRank, changes[delta(pair.module)]), self._by(pass_name, before, pair, means)
            left, right = change.left.double(), change.right.double()
            q = q.to(left.device)
            made: Tensor = right.T @ (left.T @ q) if self._turned(pass_name) else left @ (right @ q)
            sent[delta(pair.module)] = made.to(change.dtype)
        return head | sent if pass_name == CHANGE else Tensors(sent)

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        steps: dict[str, Member] = {}
        for pair in pairs(state.tensors):
            name, q = delta(pair.module), self._by(CHANGE, state.tensors, pair, means)
            w = means[CHANGE].tensor(name).to(q)
            steps[name] = LowRank(q, w.T) if self._turned(CHANGE) else LowRank(w, q.T)
        merged = self._whole.merged(state.tensors, {CHANGE: means[CHANGE] | steps}, self.split)
        return next_state(state, merged)

    def _by(self, pass_name: str, before: Tensors, pair: Pair, means: Mapping[str, Tensors]) -> Tensor:
        """The matrix that a pass multiplies by: Omega in the first pass, then the basis from the previous pass."""
        place, name = self.passes.index(pass_name), delta(pair.module)
        if place:
            return basis(means[self.passes[place - 1]].tensor(name))
        a, b = before.tensor(pair.a), before.tensor(pair.b)
        columns = min(self.columns, b.shape[0], a.shape[1])
        return start(a.shape[1], columns, sketch.seed_of(name, a, b))

    def _turned(self, pass_name: str) -> bool:
        """Whether the pass multiplies by D_i^T instead of D_i."""
        return self.passes.index(pass_name) % 2 == 1
