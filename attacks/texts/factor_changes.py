"""The changes of a LoRA adapter's first factors in an update, as row spaces for testing inputs.

The visible changes depend on the method and on whether B is still zero:

    A and B themselves         FedLoRA, and FRA's factors in the clear, [s dB, s B] [A + dA ; dA]
    B alone                    FFA, and every method while B = 0, when dL/dA is zero
    the change of the product  FRA with noise or masks: s (B' dA + dB A). While B = 0 it is s dB A, which gives dB; after
                               that it is s B' dA outside the span of A's rows, which are known

Nothing here depends on the length of an update: clipping may have scaled it by an unknown factor f. Where f matters, for the
size of float32 rounding, it is computed from the update (`scaled_by`). One step of AdamW is undone first (`undone`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from attacks.texts.span import (
    MEMBER_A,
    MEMBER_B,
    UNIT_ROUNDOFF,
    Family,
    FirstLayer,
    Rows,
    SpanTest,
    rounding,
    row_space,
)
from secure_fed.learning.models.adapters.lora import Pair
from secure_fed.methods.fra_lora import delta
from secure_fed.tensors.tensors import LowRank, Tensors, dense

Shown = tuple[Rows | None, Rows | None]  # the changes of A and B
EPS = 1e-8  # of torch's AdamW
_ROUNDINGS = 1.0  # of the step's arithmetic, in u of its length
_ALIKE = 1e-5
_TRIED = 4096
_ENTRIES = 64  # the smallest entries, whose fit to a grid is tested
_MULTIPLES = 1 << 16  # the largest multiple tried for the smallest entry
# The largest multiple of any entry: float32 results also lie on finer grids, of their own rounding.
_LARGEST = 1 << 18
_AT_ONCE = 1 << 12
_FIT = 0.6  # mean cosine of phases; entries on no grid reach 0.5 at most, over all grids tried
_BITS = 24  # of a float32 number


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
            # certain finds depend on this precision
            if change is not None and not (one.step and change.share > MEMBER_B):
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
    if b.any():
        return None, None
    # The change of B from s dB A.
    inverse = torch.linalg.pinv(a.double())
    whole = dense(product)
    spread = float(inverse.norm()) / math.sqrt(inverse.shape[1]) / scale  # noise is scaled by the inverse
    return None, Rows(whole.double() @ inverse / scale, one.rows(whole, torch.zeros_like(whole)).std * spread)


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


def _products(one: Sent, pairs: Sequence[Pair]) -> Family | None:
    """The test outside the span of every A's rows, for products whose factors do not show. The rounding of A cannot be
    separated from its change, since both are multiplied by the same B'; it adds few directions compared with the dimension of
    the space.
    """
    found = [product for pair in pairs if (product := one.product(pair)) is not None]
    if len(found) < len(pairs) or not any(one.before.tensor(pair.b).any() for pair in pairs):
        return None
    known = torch.cat([one.before.tensor(pair.a).double() for pair in pairs])
    # orthogonal to the rows of every A
    off = torch.linalg.qr(known.T, mode="complete")[0][:, len(known) :].T.contiguous()
    if not len(off):
        return None
    wholes = map(dense, found)
    parts = [Rows(whole.double() @ off.T, one.rows(whole, torch.zeros_like(whole)).std) for whole in wholes]
    return Family("product", (_stacked(parts, len(known), off),))


def factor_of(changes: Iterable[Tensor], lr: float) -> float:
    """f of an update of one AdamW step, from its largest change; 1 if that is the size of a step with a large gradient.

    In an update that was multiplied by f, as by clipping, f lr replaces lr. If the head's gradients are large, the update's
    largest change equals f lr, up to EPS / |g|.
    """
    longest = max((float(change.abs().max()) for change in changes if change.numel()), default=0.0)
    factor = longest / _longest_steps(lr)[1]
    return 1.0 if abs(factor - 1) < _ALIKE else factor


@cache
def _longest_steps(lr: float) -> tuple[float, float]:
    """The mean and the largest step of gradients for which EPS is negligible: lr, up to the rounding of AdamW's constants."""
    parameter = nn.Parameter(torch.zeros(_TRIED))
    parameter.grad = 1e3 * torch.rand(_TRIED, generator=torch.Generator().manual_seed(0)) + 1e3
    AdamW([parameter], lr, weight_decay=0.0).step()
    steps = parameter.detach().abs().double()
    return float(steps.mean()), float(steps.max())


def undone(change: Tensor, before: Tensor, lr: float, factor: float = 1.0) -> tuple[Tensor, float]:
    """f times the gradient, and the standard deviation of its error on a coordinate, from f times a step's change.

    AdamW divides a gradient by its size, and still its first step from fresh memory, without weight decay, shows the gradient:
    it changes every parameter by -lr g / (|g| + EPS), EPS = 1e-8. All changes have a size of about lr, but each is smaller by a
    share that reveals |g|: with r = |change| / lr,

        |g| = EPS r / (1 - r)

    r is known up to the rounding of the parameter, u |after| / lr, and of the step itself, a few u, with u = 2^-24. The
    resulting error of |g| is g^2 / EPS times as large: some per cent of a gradient of 0.001, and all of a gradient of 0.1. So
    the small gradients of the lower layers are recovered, and the gradients of the head's bias are not. This method is the
    project's own. A client restarts AdamW in each round, so in a round with one local step, that step is a first step.
    """
    step = change.double() / factor
    length = _longest_steps(lr)[0]
    share = step.abs() / length
    doubt = UNIT_ROUNDOFF * ((before.double() + step).abs() / length + _ROUNDINGS * share)
    # if the remaining share is mere rounding, the size is at least this
    size = EPS * share / (1 - share).clamp_min(doubt)
    error = factor * size.square() / EPS * doubt
    return -factor * step.sign() * size, float(torch.sqrt(error.square().mean())) if error.numel() else 0.0


def scaled_by(changes: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """f from changes f (after - before), given with their `before`; None if no grid is visible.

    Parameters are kept in float32. So after - before is a whole multiple of the spacing of float32 numbers at `before`,
    wherever the change is small beside it, and f (after - before) is a whole multiple of f times that spacing. So f can be
    computed from `before`: the largest step of which all small entries, each divided by its spacing, are multiples. Neither
    clipping nor a mean weight hides the size of the rounding from a server. Noise of more than a fifth of a spacing hides the
    grid, as do sums of updates with different factors.
    """
    parts = []  # the sizes of the entries of each change, in float32 spacings at `before`
    for change, before in ((one.double().flatten(), other.double().flatten()) for one, other in changes):
        moved = (change != 0) & (before != 0)
        _, exponent = torch.frexp(before[moved])
        parts.append(torch.ldexp(change[moved].abs(), _BITS - exponent))
    values = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    if len(values) < _ENTRIES:
        return None
    small = values.topk(_ENTRIES, largest=False).values.sort().values
    for start in range(1, _MULTIPLES, _AT_ONCE):
        steps = _refined(small, small[0] / torch.arange(start, start + _AT_ONCE, dtype=torch.float64))
        fits = (2 * math.pi * small / steps[:, None]).cos().mean(1) > _FIT
        fits &= small[-1] / steps < _LARGEST
        if fits.any():
            return float(steps[fits.byte().argmax()])
    return None


def _refined(small: Tensor, steps: Tensor) -> Tensor:
    """(N,) steps, each refined to fit the smallest 1, 2, 4, ... entries best, as multiples of the previous step."""
    count = 1
    while count <= len(small):
        head = small[:count]
        multiples = (head / steps[:, None]).round().clamp_min(1)
        steps = (multiples @ head) / multiples.square().sum(1)
        count *= 2
    return steps
