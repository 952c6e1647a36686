"""FRA-LoRA for the first rounds, FFA-LoRA from then on.

Trautmann, Hales and Volk, "Aggregating Low Rank Adapters in Federated Fine-tuning" (2025), section VI, point 2: FRA
while A still improves, then FFA, which has half as many parameters and overfits less. In the last FRA round the server splits
the mean product U S V^T into A = V^T, which stays from then on, and B = U S. So FFA starts from FRA's model, with an A as well
conditioned as FFA's own orthonormal A.

The server sends A in the FFA rounds too: it is not made from the seed, and a client may be drawn for the first time after the
switch. Clients send B and the head.

Under client-level privacy FRA rounds denoise as `fra_lora` does, and the last one splits the denoised product: if sums are
shrunk, the start plus the shrunk sum of all means. FFA continues from there.

With `sketch`, FRA rounds have the two passes of `fra_lora`; FFA rounds have one pass as always.

Deviation: the paper proposes the combination and leaves the round of the switch and the split open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter, pairs
from secure_fed.methods.averaged import change, moved, next_state
from secure_fed.methods.ffa_lora import without_a
from secure_fed.methods.fra_lora import FraLora, over_sum, sketch_of
from secure_fed.methods.method import CHANGE, Card, RoundPlan, State
from secure_fed.tensors.low_rank import Svd, balanced, right_orthonormal
from secure_fed.tensors.tensors import Layout, Tensors

CARD = Card(
    name="fra_then_ffa",
    paper="Trautmann et al., 2025, section VI",
    travels="as fra_lora, then up B, head and down A, B, head",
    mean_exact=True,
    options=(*LORA_OPTIONS, "switch_round", "denoise", "denoise_over", "transport_form", "sketch"),
)


def build(run: RunConfig) -> FraThenFfa:
    method, rounds = run.method, run.federation.rounds
    # FRA rounds: as set, or five, or half of fewer than ten rounds. A run of one round is FRA.
    switch_round = min(5, max(1, rounds // 2)) if method.switch_round is None else method.switch_round
    fra = LoraAdapter.of(method), CARD, method.denoise, sketch_of(method), over_sum(method)
    built = FraThenFfa(*fra, switch_round=switch_round)
    built.settings(rounds)
    return built


@dataclass(frozen=True)
class FraThenFfa(FraLora):
    """`switch_round` rounds of FRA-LoRA, then A stays."""

    switch_round: int = field(kw_only=True)

    def settings(self, rounds: int) -> dict[str, Any]:
        """The round of the switch, fixed so that resuming with more rounds does not move it. At least one round must be FFA."""
        if self.switch_round >= max(rounds, 2):
            raise ConfigError(
                f"method.switch_round is {self.switch_round}, and there are {rounds} rounds, so that FFA would never begin: "
                "lower it, raise federation.rounds, or set method.name = 'fra_lora'"
            ).about("method.switch_round", self.switch_round, f"below federation.rounds = {rounds}")
        return {"switch_round": self.switch_round}

    def plan(self, state: State) -> RoundPlan:
        if state.round < self.switch_round:
            return super().plan(state)
        return RoundPlan(trainable=tuple(without_a(state.tensors)), down=tuple(state.tensors))

    def layout(self, state: State, pass_name: str) -> Layout:
        if state.round < self.switch_round:
            return super().layout(state, pass_name)
        return Layout.of(without_a(state.tensors))

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        a_trained = bool(pairs(after))
        return super().contribute(pass_name, before, after, means) if a_trained else change(before, after)

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        if state.round >= self.switch_round:
            return next_state(state, moved(state.tensors, means[CHANGE]))
        last = state.round == self.switch_round - 1
        split = right_orthonormal if last else balanced
        return next_state(state, self.merged(state.tensors, means, split, noise_std))

    def from_sums(self, state: State) -> bool:
        return self.summed and state.round < self.switch_round

    def taken_in(self, state: State) -> int:
        """`FraLora.taken_in` in FRA rounds, and every number of a release in FFA rounds."""
        return super().taken_in(state) if state.round < self.switch_round else self.layout(state, CHANGE).size

    def factors(self, product: Svd) -> tuple[Tensor, Tensor]:
        return right_orthonormal(product)
