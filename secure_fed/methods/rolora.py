"""RoLoRA: B trains in the even rounds, A in the odd ones.

Chen, Ju, Dalal, Zhu and Khisti, "Robust Federated Finetuning of Foundation Models via Alternating Minimization of LoRA"
(arXiv 2409.02346); a baseline in Table 3 of FedTT's paper. With one factor the same for everybody the mean of the other is the
mean of the product, mean(B_i A) = mean(B_i) A and mean(B A_i) = B mean(A_i), as in FFA-LoRA, while both get to learn.

Up goes what trained: B or A, and the head. Down go both, since both change in the run and a client may be drawn
for the first time in any round.

Deviations: rounds are counted from 0 and B is first, for A beside B = 0 has no gradient; the head trains in every round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter, LoraForm, pairs
from secure_fed.methods.averaging import change, moved, next_state
from secure_fed.methods.method import CHANGE, Card, RoundPlan, State
from secure_fed.tensors.tensors import Layout, Tensors

CARD = Card(
    name="rolora",
    paper="Chen et al., arXiv 2409.02346",
    travels="up B or A in turn, head; down A, B, head",
    mean_exact=True,
    options=LORA_OPTIONS,
    memoryless="B and A change in turn, so the means of two rounds are of other tensors",
)


def build(run: RunConfig) -> RoLora:
    return RoLora(LoraAdapter.of(run.method))


@dataclass(frozen=True)
class RoLora:
    """Averages B and the head, then A and the head, and so on."""

    adapter: LoraAdapter
    card: Card = CARD

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int) -> Tensors:
        return self.adapter.prepare(model, head, seed)

    def plan(self, state: State) -> RoundPlan:
        return RoundPlan(trainable=tuple(_trained(state)), down=tuple(state.tensors))

    def layout(self, state: State, pass_name: str) -> Layout:
        return Layout.of(_trained(state))

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        return change(before, after)

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        return next_state(state, moved(state.tensors, means[CHANGE]))

    def as_lora(self, initial: Tensors, tensors: Tensors) -> LoraForm:
        """A and B, or their change where they began as parts of W."""
        return self.adapter.form(initial, tensors)


def _trained(state: State) -> Tensors:
    """The state without the factor that rests in its round: A in even ones, B in odd ones."""
    even = state.round % 2 == 0
    return state.tensors.without(pair.a if even else pair.b for pair in pairs(state.tensors))
