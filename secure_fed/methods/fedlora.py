"""FedLoRA: A and B averaged separately, the common baseline.

Trautmann, Hales and Volk, "Aggregating Low Rank Adapters in Federated Fine-tuning" (2025), section III.A, call it vanilla
federated averaging; FeDeRA (Yan et al., arXiv 2404.18848) calls it FedLR. It releases, per adapted matrix, the mean change of
A and the mean change of B, so that eq. (1) without its tilde holds:

    A' = A + mean(A_i - A),   B' = B + mean(B_i - B),   but   B' A' != mean(B_i A_i).

The gap is the covariance over clients of B_i and A_i. Under noise it has a product of two noises in it (eq. 2, 3).

Deviation: any number of clients and any weights, where the paper writes two of one half each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter, LoraForm
from secure_fed.methods.averaging import change, moved, next_state
from secure_fed.methods.method import CHANGE, Card, RoundPlan, State
from secure_fed.tensors.tensors import Layout, Tensors

CARD = Card(
    name="fedlora",
    paper="Trautmann et al., 2025, section III.A; FedLR in Yan et al., arXiv 2404.18848",
    travels="A, B, head",
    mean_exact=False,
    options=LORA_OPTIONS,
)


def build(run: RunConfig) -> FedLora:
    return FedLora(LoraAdapter.of(run.method))


@dataclass(frozen=True)
class FedLora:
    """Averages A, B and the head."""

    adapter: LoraAdapter
    card: Card = CARD

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int) -> Tensors:
        return self.adapter.prepare(model, head, seed)

    def plan(self, state: State) -> RoundPlan:
        return RoundPlan(trainable=tuple(state.tensors), down=tuple(state.tensors))

    def layout(self, state: State, pass_name: str) -> Layout:
        return Layout.of(state.tensors)

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        return change(before, after)

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        return next_state(state, moved(state.tensors, means[CHANGE]))

    def as_lora(self, initial: Tensors, tensors: Tensors) -> LoraForm:
        """A and B, or their change where they began as parts of W."""
        return self.adapter.form(initial, tensors)
