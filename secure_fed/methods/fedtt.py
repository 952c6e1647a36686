"""FedTT: bottleneck adapters whose matrices are tensor trains.

Ghiasvand, Yang, Xue, Alizadeh, Zhang and Pedarsani, "Communication-Efficient and Tensorized Federated Fine-Tuning of Large
Language Models" (arXiv 2410.13097), section 4.1 and algorithm 1. An adapter y -> y + up(GELU(down(y))) stands behind every
attention and feed-forward block; a matrix W is its train of cores, eq. (1), which is never multiplied out. Cores, biases, what
is left of the head, and a train on the head's square layer are averaged: the mean of trains is not the train of means, eq. (2).

Deviations: the paper replaces the weight of the head's square layer by a train; here the train is added to that weight, which
stays frozen. As many numbers train; but a weight that was trained before keeps what it learned, and the classes do not have to
be told apart through a train's rank alone. Where the paper does not say how a train starts, cores start orthonormal, and the
last core of each up-projection and of the head's train starts at zero. `method.rank` is the rank of all trains (5 in the
paper), also where the sides of a core could not use as much.

Counts at rank 5 with a bottleneck of 64: a train over [8, 8, 12, 8, 8] holds 780 numbers, one over [12, 8, 8, 8, 8, 12] 920. On
DeBERTa-base the 24 adapters make 37 440 and their biases 19 968; with the head's train, its biases and two classes 60 634: the
0.06M printed, which must include the biases (0.04M without). For LLaMA2-7B, [16, 16, 16, 4, 4, 4], the same sum is 140 800 in
cores and 407 040 with biases, for 13B 192 000 and 606 720. Printed are 0.52M and 0.64M; no whole rank gives the first, with or
without biases and the norms of the base model.
"""

from __future__ import annotations

from dataclasses import dataclass

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.tensor_train import TensorTrains, frozen
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card, State
from secure_fed.tensors.tensors import Tensors

CARD = Card(
    name="fedtt",
    paper="Ghiasvand et al., arXiv 2410.13097, algorithm 1",
    travels="all cores, biases, head with a train for its square weight",
    mean_exact=False,
    options=("rank", "bottleneck"),
    lr=1e-2,
)


def build(run: RunConfig) -> FedTt:
    return FedTt(TensorTrains(run.method.rank, run.method.bottleneck or 64), CARD)


@dataclass(frozen=True)
class FedTt(Averaged):
    """Averages all cores, biases, and what trains of the head; the head's square weight is in the state and stays."""

    def trained(self, state: State) -> Tensors:
        return state.tensors.without(frozen(state.tensors))
