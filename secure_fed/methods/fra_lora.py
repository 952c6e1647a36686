"""FRA-LoRA: the server averages the products B_i A_i and splits the mean again.

Trautmann, Hales and Volk, "Aggregating Low Rank Adapters in Federated Fine-tuning" (2025), section IV. With s the scale of
the adapter and D_i = s (B_i A_i - B A) what client i contributes for each adapted matrix,

    s B' A' = the best rank-r approximation of  s B A + mean(D_i) = s mean(B_i A_i)        eq. (4), (5), (6)

computed in `low_rank` from factors, or from the dense matrix where these would be no smaller. The head is averaged.

A contribution stays in factors, [s dB, s B] [A_i ; dA] with dB = B_i - B and dA = A_i - A: both halves are as small as the
change is, where [B_i, -B] [A_i ; A] would be a difference of large numbers.

Deviations: clients contribute changes, not products, so that what a client can move is bounded by the norm of one tensor;
the mean is the same. Eq. (4) halves both factors, which gives a quarter: one of them carries the weights. Eq. (6) counts r + 1
terms and leaves the split of D open: r terms, B = U sqrt(D) and A = sqrt(D) V, signs fixed. Where the mean has rank below r,
the spare rows of A stay orthonormal beside zeros in B, so that they can learn.

Under client-level privacy the mean of D_i carries noise on each of its m n entries, far more than rank r of it can hold. So
D is denoised first, by `privacy/denoise.py`: "shrink" takes each of its singular values for what it most likely was before
noise of that public level, and keeps at most r; "truncate" keeps the first r as they are; "none" leaves all of D to eq. (5).
This is ours, not the paper's. D has been released by then, so it costs no privacy. Where nothing of D survives, B A stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secure_fed.adapters.lora import LoraAdapter, pairs, read
from secure_fed.config import MethodConfig
from secure_fed.errors import MethodError
from secure_fed.low_rank import Svd, balanced, denoised, truncated
from secure_fed.methods.averaging import change, moved, next_state
from secure_fed.methods.method import CHANGE, Card, RoundPlan, State
from secure_fed.tensors import Layout, LowRank, Member, Tensors

CARD = Card(
    name="fra_lora",
    paper="Trautmann et al., 2025, section IV",
    travels="change of B A as factors of twice the rank, head; down A, B, head",
    mean_exact=True,
    options=("denoise",),
)

Split = Callable[[Svd], tuple[Tensor, Tensor]]


def build(config: MethodConfig) -> FraLora:
    return FraLora(LoraAdapter.of(config), config.denoise)


@dataclass(frozen=True)
class FraLora:
    """Averages the products B A and the head; `denoise` is what happens to a noised mean."""

    adapter: LoraAdapter
    denoise: str = "shrink"

    @property
    def card(self) -> Card:
        return CARD

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int) -> Tensors:
        found = self.adapter.inject(model, head, seed)
        return read(model, [name for pair in found for name in (pair.a, pair.b)] + list(head))

    def plan(self, state: State) -> RoundPlan:
        return RoundPlan(trainable=tuple(state.tensors), down=tuple(state.tensors))

    def layout(self, state: State, pass_name: str) -> Layout:
        return Layout.of(self._contribution(state.tensors, state.tensors))

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        return self._contribution(before, after)

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        return next_state(state, self.merged(state.tensors, means[CHANGE], balanced, noise_std))

    def merged(self, tensors: Tensors, mean: Tensors, split: Split, noise_std: float = 0.0) -> Tensors:
        """`tensors` with the mean change of every product and of the head put in, the products split by `split`."""
        factors: dict[str, Tensor] = {}
        for pair in pairs(tensors):
            a, b = tensors.tensor(pair.a), tensors.tensor(pair.b)
            step = self._denoised(mean[delta(pair.module)], noise_std) * (1 / self.adapter.scaling)
            product = _sum(LowRank(b, a), step)
            new_b, new_a = split(truncated(product, a.shape[0]))
            factors |= {pair.a: new_a.to(a.dtype).contiguous(), pair.b: new_b.to(b.dtype).contiguous()}
        head = mean.without(delta(pair.module) for pair in pairs(tensors))
        return moved(tensors, head) | factors

    def _denoised(self, mean: Member, noise_std: float) -> Member:
        if noise_std == 0 or self.denoise == "none":
            return mean
        return denoised(mean, self.adapter.rank, noise_std, shrink=self.denoise == "shrink")

    def _contribution(self, before: Tensors, after: Tensors) -> Tensors:
        found, scale = pairs(before), self.adapter.scaling
        factors = {name for pair in found for name in (pair.a, pair.b)}
        if missing := sorted(factors - set(after)):
            raise MethodError(
                f"{CARD.name} sends products of factors, so {missing[0]} cannot stay on the client: "
                "name only tensors of the head in method.personal"
            )
        products = {}
        for pair in found:
            (a, b), (a_i, b_i) = ((side.tensor(pair.a), side.tensor(pair.b)) for side in (before, after))
            products[delta(pair.module)] = LowRank(torch.cat([b_i - b, b], 1) * scale, torch.cat([a_i, a_i - a], 0))
        return change(before, after.without(factors)) | products


def delta(module: str) -> str:
    """The name under which the change of that module's matrix travels."""
    return f"{module}.delta"


def _sum(product: LowRank, mean: Member) -> Member:
    return product + mean if isinstance(mean, LowRank) else torch.addmm(mean, product.left, product.right)
