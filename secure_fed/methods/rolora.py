"""RoLoRA: B trains in the even rounds, A in the odd ones.

Chen, Ju, Dalal, Zhu and Khisti, "Robust Federated Finetuning of Foundation Models via Alternating Minimization of LoRA"
(arXiv 2409.02346); a baseline in Table 3 of FedTT's paper. With one factor the same for all clients, averaging the other
averages the product, mean(B_i A) = mean(B_i) A and mean(B A_i) = B mean(A_i), as in FFA-LoRA, while both factors learn.

Clients send the trained factor, B or A, and the head. The server sends both, since both change in the run and a client may be
drawn for the first time in any round.

Deviations: rounds are counted from 0 and B is first, since A has no gradient while B = 0; the head trains in every round.
"""

from __future__ import annotations

from dataclasses import dataclass

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter, pairs
from secure_fed.methods.averaged import AveragedLora
from secure_fed.methods.method import Card, RoundPlan, State
from secure_fed.tensors.tensors import Tensors

CARD = Card(
    name="rolora",
    paper="Chen et al., arXiv 2409.02346",
    travels="up B or A in turn, head; down A, B, head",
    mean_exact=True,
    options=LORA_OPTIONS,
    memoryless="B and A change in turn, so the means of two rounds are of other tensors",
)


def build(run: RunConfig) -> RoLora:
    return RoLora(LoraAdapter.of(run.method), CARD)


@dataclass(frozen=True)
class RoLora(AveragedLora):
    """Averages B and the head, then A and the head, and so on."""

    def trained(self, state: State) -> Tensors:
        """The state without the factor that is frozen in its round: A in even rounds, B in odd rounds."""
        even = state.round % 2 == 0
        return state.tensors.without(pair.a if even else pair.b for pair in pairs(state.tensors))

    def plan(self, state: State) -> RoundPlan:
        return RoundPlan(trainable=tuple(self.trained(state)), down=tuple(state.tensors))
