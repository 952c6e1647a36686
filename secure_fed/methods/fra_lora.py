"""FRA-LoRA: the server averages the products B_i A_i and splits the mean again.

Trautmann, Hales and Volk, "Aggregating Low Rank Adapters in Federated Fine-tuning" (2025), section IV. With s the scale of
the adapter and D_i = s (B_i A_i - B A) client i's contribution for each adapted matrix,

    s B' A' = the best rank-r approximation of  s B A + mean(D_i) = s mean(B_i A_i)        eq. (4), (5), (6)

computed in `low_rank` from factors, or from the dense matrix where factors would be no smaller. The head is averaged.

A contribution stays in factors, [s dB, s B] [A_i ; dA] with dB = B_i - B and dA = A_i - A: both halves are as small as the
change, where [B_i, -B] [A_i ; A] would be a difference of large numbers.

Deviations: clients contribute changes, not products, so that the norm of one tensor bounds a client's influence; the mean is
the same. Eq. (4) halves both factors, which gives a quarter: here one factor has the weights. Eq. (6) counts r + 1 terms and
leaves the split of D open: here r terms, B = U sqrt(D) and A = sqrt(D) V, signs fixed. Where the mean has rank below r, the
spare rows of A stay orthonormal beside zeros in B, so that they can learn.

Under client-level privacy the mean D of a round has noise on each of its m n entries, far more than rank r can represent. So it
is denoised, after its release and at no cost in privacy (`denoise`). This is ours, not the paper's:

    "tangent"    s B' A' = best(s B A + P(D)), P the projection on all X A + B Y (`low_rank.tangent`)
    "shrink"     each singular value is shrunk to the size of least error under noise of a public level (`privacy/denoise.py`),
                 and r are kept at most
    "truncate"   the first r are kept unchanged
    "none"       all of D is left to eq. (5)

"tangent" is linear and has no threshold. Of a contribution, s (dB A + B dA + dB dA), it keeps the first two terms whole, which
are all but the square of a local step. It keeps the noise on r (m + n - r) of m n numbers; on r m, while B is zero. Noise that
is correlated over rounds still cancels after the projection, if B and A rotate slowly. Applied to single means, the other three
select singular vectors of noised matrices, so they select noise and add it to the model before later rounds can cancel it.

`denoise_over` chooses the matrix that is shrunk:

    "sum"     S, the sum of all steps of the server so far, at the noise of S:   s B' A' = best(s B_0 A_0 + shrunk(S))
    "mean"    the step of this round, at its own noise:                          s B' A' = best(s B A + shrunk(D))

with B_0 A_0 the start and best() of rank r. A direction too weak to be seen in any one mean adds up in S, and noise that is
correlated over rounds cancels only in S: a single mean has more of it than of independent noise, and once means are shrunk one
by one, the rest of it does not cancel. `benchmarks/fra_over_rounds.py` measures both; "sum" is the default, except with
sketches.

S does not estimate a change that clients would learn from the start. Every D is relative to the model that clients received.
They contribute again the directions that shrinkage removed, so S grows until B' A' includes them: S = (s B A - s B_0 A_0) + the
part of S that the model lacks, which is kept (error feedback, as in compressed descent). The estimate is B' A', not S. If no
singular value survives, B A is the start ("sum") or does not change ("mean").

If a sum is computed coordinate by coordinate (under secure aggregation, or of noised contributions), mean(D_i) costs m n
numbers a matrix. With `sketch` = p columns it is computed in two passes (module `sketch`) of p (m + n) numbers and a few more:

    sketch    D_i [Omega, Omega_t]                         its mean gives Q (m, p)
    change    Q^T D_i, and the head's change               mean(D_i) is about Q mean(Q^T D_i)

This is exact where mean(D_i) has rank p at most, as it has for up to p / r - 1 clients; `reported` measures the part that is
missed. Omega is made from a digest of A and B at the start of the round: public, independent of the round's data, and new in
every round. Under privacy each pass is a separate release, clipped and noised by itself, and Q^T D is denoised, whose p rows
contain less noise than the m rows of D. If contributions are sent unmasked and in factors, a sketch is no smaller than these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secure_fed.config import MethodConfig, RunConfig
from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter, Pair, pairs
from secure_fed.methods.averaged import AveragedLora, change, factored, moved, next_state
from secure_fed.methods.method import CHANGE, Card, RoundPlan, State
from secure_fed.tensors import sketch as sketches
from secure_fed.tensors.low_rank import Svd, balanced, denoised, tangent
from secure_fed.tensors.tensors import Layout, LowRank, Member, Tensors

CARD = Card(
    name="fra_lora",
    paper="Trautmann et al., 2025, section IV",
    travels="change of B A as factors of twice the rank, head; down A, B, head",
    mean_exact=True,
    options=(*LORA_OPTIONS, "denoise", "denoise_over", "transport_form", "sketch", "ranks", "ranks_column"),
)

SKETCH = "sketch"
_DELTA = ".delta"
Split = Callable[[Svd], tuple[Tensor, Tensor]]


def build(run: RunConfig) -> FraLora:
    method = run.method
    return FraLora(LoraAdapter.of(method), CARD, method.denoise, sketch_of(method), over_sum(method))


def sketch_of(config: MethodConfig) -> int | None:
    """The columns of the sketch, by default four times the rank; None where the whole change is sent."""
    return (config.sketch or 4 * config.rank) if config.transport_form == "sketch" else None


def over_sum(config: MethodConfig) -> bool:
    """Whether the sum of all means is denoised, and not each mean; by default with "shrink" and without sketches."""
    auto = config.denoise == "shrink" and config.transport_form != "sketch"
    return auto if config.denoise_over == "auto" else config.denoise_over == "sum"


@dataclass(frozen=True)
class FraLora(AveragedLora):
    """Averages the products B A and the head.

    denoise: how means are denoised. sketch: columns of the sketch of the mean, None for the whole mean. summed: whether the
    sum of all means is denoised, and not each mean.
    """

    card: Card = CARD
    denoise: str = "tangent"
    sketch: int | None = None
    summed: bool = False

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int) -> Tensors:
        tensors = super().prepare(model, head, seed)
        if self.sketch is not None:
            _require_smaller(self.sketch, {pair.module: _shape(tensors, pair) for pair in pairs(tensors)})
        return tensors

    def plan(self, state: State) -> RoundPlan:
        passes = (CHANGE,) if self.sketch is None else (SKETCH, CHANGE)
        return RoundPlan(trainable=tuple(state.tensors), down=tuple(state.tensors), passes=passes)

    def layout(self, state: State, pass_name: str) -> Layout:
        found = pairs(state.tensors)
        head = state.tensors.without(name for pair in found for name in (pair.a, pair.b))
        entries = [] if pass_name == SKETCH else list(Layout.of(head).entries)
        for pair in found:
            m, n = _shape(state.tensors, pair)
            if self.sketch is not None:
                m, n = (m, self.sketch + sketches.CHECKS) if pass_name == SKETCH else (self.sketch, n)
            entries.append((delta(pair.module), (m, n)))
        return Layout(tuple(sorted(entries)))

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        products = self._products(before, after)
        if self.sketch is not None and pass_name == SKETCH:
            return _sketched(before, products, self.sketch)
        head = change(before, after.without(name for pair in pairs(before) for name in (pair.a, pair.b)))
        if self.sketch is None:
            return head | products
        bases = {name: sketches.basis(means[SKETCH].tensor(name)) for name in products}
        return head | {name: sketches.projected(product, bases[name]) for name, product in products.items()}

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        return next_state(state, self.merged(state.tensors, means, balanced, noise_std))

    def from_sums(self, state: State) -> bool:
        return self.summed

    def taken_in(self, state: State) -> int:
        """The whole head, and of each matrix r (m + n - r) numbers if only the tangent space is kept, else all."""
        size = self.layout(state, CHANGE).size
        if self.denoise != "tangent" or self.sketch is not None:
            return size
        r, shapes = self.adapter.rank, [_shape(state.tensors, pair) for pair in pairs(state.tensors)]
        return size - sum((m - r) * (n - r) for m, n in shapes)

    def reported(self, means: Mapping[str, Tensors], following: State) -> dict[str, float]:
        """The part of the mean change that lay outside the sketch, as a share of its norm; empty without a sketch.

        It is computed from released means, so it costs no privacy; if these are noised, it includes the noise.
        """
        if SKETCH not in means:
            return {}
        seen = means[SKETCH]
        return {"sketch_residual": sketches.residual(seen.tensor(name) for name in seen if name.endswith(_DELTA))}

    def merged(self, tensors: Tensors, means: Mapping[str, Tensors], split: Split, noise_std: float = 0.0) -> Tensors:
        """`tensors` with the mean change of every product and of the head added, the products split by `split`."""
        factors: dict[str, Tensor] = {}
        for pair in pairs(tensors):
            a, b = tensors.tensor(pair.a), tensors.tensor(pair.b)
            before = LowRank(b, a)
            step = self._step(delta(pair.module), means, before, noise_std) * (1 / self.adapter.scaling)
            product = before + step if isinstance(step, LowRank) else torch.addmm(step, b, a)
            factors |= factored(pair, product, a, b, split)
        head = means[CHANGE].without(delta(pair.module) for pair in pairs(tensors))
        return moved(tensors, head) | factors

    def _step(self, name: str, means: Mapping[str, Tensors], product: LowRank, noise_std: float) -> Member:
        """The mean change of the matrix `product` (m, n)."""
        mean = means[CHANGE][name]
        if noise_std and self.denoise not in ("none", "tangent"):
            mean = denoised(mean, min(self.adapter.rank, *mean.shape), noise_std, shrink=self.denoise == "shrink")
        if self.sketch is not None:
            mean = sketches.lifted(sketches.basis(means[SKETCH].tensor(name)), mean)
        return tangent(mean, product) if noise_std and self.denoise == "tangent" else mean

    def _products(self, before: Tensors, after: Tensors) -> dict[str, LowRank]:
        """The change of every adapted matrix, in factors, by the name under which it is sent."""
        found, scale = pairs(before), self.adapter.scaling
        factors = {name for pair in found for name in (pair.a, pair.b)}
        if missing := sorted(factors - set(after)):
            raise MethodError(
                f"{self.card.name} sends products of factors, so {missing[0]} cannot stay on the client: "
                "name only tensors of the head in method.personal"
            )
        products = {}
        for pair in found:
            (a, b), (a_i, b_i) = ((side.tensor(pair.a), side.tensor(pair.b)) for side in (before, after))
            products[delta(pair.module)] = LowRank(torch.cat([b_i - b, b], 1) * scale, torch.cat([a_i, a_i - a], 0))
        return products


def delta(module: str) -> str:
    """The name under which the change of this module's matrix is sent."""
    return module + _DELTA


def _shape(tensors: Tensors, pair: Pair) -> tuple[int, int]:
    """(m, n) of the adapted matrix."""
    return tensors[pair.b].shape[0], tensors[pair.a].shape[1]


def _require_smaller(columns: int, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Refuse a sketch that has as many numbers as one of the matrices, or more."""
    module = min(shapes, key=lambda module: sketches.most_columns(shapes[module]))
    shape, most = shapes[module], sketches.most_columns(shapes[module])
    if columns <= most:
        return
    remedy = f"set method.sketch to {most} or less, or" if most else "leave it out of method.target_modules, or set"
    raise MethodError(
        f"method.sketch = {columns} (4 x method.rank if not set) makes {sketches.size(shape, columns)} numbers of "
        f"{module}, {shape[0]} x {shape[1]}, which has {shape[0] * shape[1]}: {remedy} method.transport_form = 'dense'"
    )


def _sketched(before: Tensors, products: Mapping[str, LowRank], columns: int) -> Tensors:
    """A client's first messages, the sketches; their seeds are computed from the tensors that all clients started from."""
    sent = {}
    for pair in pairs(before):
        name = delta(pair.module)
        seed = sketches.seed_of(name, before.tensor(pair.a), before.tensor(pair.b))
        sent[name] = sketches.sketched(products[name], columns, seed)
    return Tensors(sent)
