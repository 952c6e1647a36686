"""The changes of a LoRA adapter's first factors in an update, as row spaces for testing inputs.

The visible changes depend on the method and on whether B is still zero:

    A and B themselves         FedLoRA, and FRA's factors in the clear, [s dB, s B] [A + dA ; dA]
    B alone                    FFA, and every method while B = 0, when dL/dA is zero
    the change of the product  FRA with noise or masks: s (B' dA + dB A). While B = 0 it is s dB A, which gives dB; after
                               that it is s B' dA outside the span of A's rows, which are known

Nothing here depends on the length of an update: clipping may have scaled it by an unknown factor f. Where f matters, for the
size of float32 rounding, it is computed from the update (`rounding_grid`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from attacks.steps.rounding_grid import scaled_by
from attacks.texts.adamw_step import factor_of, undone
from attacks.texts.first_layer import FirstLayer
from attacks.texts.span import MEMBER_A, MEMBER_B, Family, Rows, SpanTest, rounding, row_space
from secure_fed.learning.models.adapters.lora import Pair
from secure_fed.methods.fra_lora import delta
from secure_fed.tensors.tensors import LowRank, Tensors

Shown = tuple[Rows | None, Rows | None]  # the changes of A and B


@dataclass(frozen=True)
class Sent:
    """A contribution, or a sum of contributions, and the state where it started.

    noise_std: of all known noise on a coordinate. clients: the number of summed contributions, each rounded by itself. step:
    lr, for a contribution of one AdamW step; 0 for a sum of plain gradients. faster: for tensors with their own learning rate,
    its ratio to lr.
    """

    contribution: Tensors
    before: Tensors
    noise_std: float = 0.0
    clients: int = 1
    step: float = 0.0
    faster: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def factor(self) -> float:
        """The factor by which the update was multiplied. If noise hides it, 1 is assumed: clipping only shortens, so rounding
        is overestimated, and is small beside the noise anyway.
        """
        if self.noise_std:
            return 1.0
        common = [name for name in self.contribution if name in self.before]
        if self.step:
            steps = (self.contribution.tensor(name) / self.faster.get(name, 1.0) for name in common)
            return factor_of(steps, self.step)
        return scaled_by((self.contribution.tensor(name), self.before.tensor(name)) for name in common) or 1.0

    def rows(self, change: Tensor, before: Tensor) -> Rows:
        """A change of parameters that were `before`, times the factor."""
        error = rounding(change.double(), before.double()) * math.sqrt(self.clients)
        return Rows(change.double(), math.hypot(error, self.noise_std))

    def gradients(self, change: Tensor, before: Tensor, factor: float = 1.0) -> Rows:
        """A change of parameters that were `before`, times that factor, as a sum of plain gradients."""
        if not self.step or self.noise_std or self.clients > 1:
            return self.rows(change, before * factor)
        return Rows(*undone(change, before, self.step, factor))

    def change(self, name: str) -> Rows:
        return self.gradients(self.contribution.tensor(name), self.before.tensor(name), self.factor)

    def product(self, pair: Pair) -> Tensor | LowRank | None:
        """The change of that module's product, if it is sent and is not a sketch."""
        name = delta(pair.module)
        if name not in self.contribution:
            return None
        whole = (self.before[pair.b].shape[0], self.before[pair.a].shape[1])
        return self.contribution[name] if tuple(self.contribution[name].shape) == whole else None


def families(sent: Sequence[Sent], first: FirstLayer, scale: float) -> list[Family]:
    """The tests that updates of the same batch of inputs allow: tests of A before tests of B.

    scale: s of W + s B A. Vacuous families are included, so that they can be reported.
    """
    rows_a: list[Rows] = []
    tests_b: list[SpanTest] = []
    products: list[Family] = []
    for one in sent:
        shown = [_factors(one, pair, scale) for pair in first.pairs]
        of_a = [change for change, _ in shown if change is not None]
        rows_a += of_a
        for pair, (_, change) in zip(first.pairs, shown, strict=True):
            if change is not None and not (
                one.step and change.share > MEMBER_B
            ):  # certain finds depend on this precision
                a = one.before.tensor(pair.a)
                tests_b.append(SpanTest(row_space([change]), a.shape[0], MEMBER_B, a))
        if not of_a and (product := _products(one, first.pairs)):
            products.append(product)
    found = [Family("A", (_stacked(rows_a, sum(len(rows.matrix) for rows in rows_a)),))] if rows_a else []
    return [*found, *products, *([Family("B", tuple(tests_b))] if tests_b else [])]


def _stacked(rows: Sequence[Rows], most: int, through: Tensor | None = None) -> SpanTest:
    """The test of row spaces with the same inputs and at most `most` directions."""
    room = rows[0].matrix.shape[1]
    return SpanTest(row_space(rows, most), room, MEMBER_A, through)


def _factors(one: Sent, pair: Pair, scale: float) -> Shown:
    """The changes of A and B that the update shows."""
    names = one.contribution
    if pair.a in names or pair.b in names:
        return (one.change(pair.a) if pair.a in names else None), (one.change(pair.b) if pair.b in names else None)
    product = one.product(pair)
    if product is None:
        return None, None
    a, b = one.before.tensor(pair.a), one.before.tensor(pair.b)
    if isinstance(product, LowRank) and (shown := _in_the_clear(one, product, a, b, scale)):
        return shown
    return None, (None if b.any() else _b_of_product(one, product, a, scale))


def _in_the_clear(one: Sent, product: LowRank, a: Tensor, b: Tensor, scale: float) -> Shown | None:
    """Both changes, from f [s dB, s B] [A + dA ; dA]; A and B are known, so f is too."""
    rank = a.shape[0]
    if product.rank != 2 * rank:
        return None
    after, change = product.right[:rank], product.right[rank:]
    if not torch.allclose(after - change, a, rtol=1e-4, atol=1e-6):
        return None
    moved, kept = product.left[:, :rank] / scale, product.left[:, rank:] / scale
    return one.gradients(change, a), one.gradients(moved, kept if b.any() else b)


def _b_of_product(one: Sent, product: Tensor | LowRank, a: Tensor, scale: float) -> Rows:
    """The change of B from s dB A."""
    inverse = torch.linalg.pinv(a.double())
    dense = product.dense() if isinstance(product, LowRank) else product
    spread = float(inverse.norm()) / math.sqrt(inverse.shape[1]) / scale  # noise is scaled by the inverse
    return Rows(dense.double() @ inverse / scale, one.rows(dense, torch.zeros_like(dense)).std * spread)


def _products(one: Sent, pairs: Sequence[Pair]) -> Family | None:
    """The test outside the span of every A's rows, for products whose factors do not show. The rounding of A cannot be
    separated from its change, since both are multiplied by the same B'; it adds few directions compared with the dimension of
    the space.
    """
    found = [product for pair in pairs if (product := one.product(pair)) is not None]
    if len(found) < len(pairs) or not any(one.before.tensor(pair.b).any() for pair in pairs):
        return None
    known = torch.cat([one.before.tensor(pair.a).double() for pair in pairs])
    off = torch.linalg.qr(known.T, mode="complete")[0][
        :, len(known) :
    ].T.contiguous()  # orthogonal to the rows of every A
    if not len(off):
        return None
    parts = []
    for product in found:
        dense = product.dense() if isinstance(product, LowRank) else product
        parts.append(Rows(dense.double() @ off.T, one.rows(dense, torch.zeros_like(dense)).std))
    return Family("product", (_stacked(parts, len(known), off),))
