"""FedSVD: clients train B; the server refactors the mean product, so that the next A has orthonormal rows.

Lee, Park, Lee, Wagner, Seong, Bocklet, Lee and Hwang, "FedSVD: Adaptive Orthogonalization for Private Federated Learning
with LoRA" (NeurIPS 2025, arXiv 2505.12805). With A frozen in the round and the same for all clients, the mean is exact, and the
server's SVD of it changes the basis in which B is written without changing the product:

    U S V^T = mean(B_i) A,     A' = V^T,     B' = U S,     B' A' = mean(B_i) A = mean(B_i A)

With orthonormal rows of A, the gradient of B is no longer than the gradient of the product, and noise on B has the same norm in
the product. As in the paper, there is no denoising. The scale s of the adapter is the same before and after.

The server sends A in every round: after the first it is not made from the seed. Clients send B and the head.

Limit of the SVD: the rows of mean(B_i) A lie in the row space of A, so as long as the product has full rank, A keeps its row
space, and only its basis changes. Algorithms that do not depend on the basis (plain SGD, clipping by the Frobenius norm,
Gaussian noise) take the same steps as FFA-LoRA with an orthonormal A. AdamW, which scales each coordinate by itself, does not.

Deviations from the authors' published program: it starts with LoRA's uniform A, which the first SVD makes orthonormal; ours is
orthonormal from the start, so that the first round is not another method. Signs are fixed, and where the product has rank below
r the spare rows of A' are a fixed orthonormal complement beside zeros in B', where the program uses the output of its SVD. It
freezes the classification head of encoders; here the head trains and is sent, as in every method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter, pairs
from secure_fed.methods.averaged import AveragedLora, factored, moved, next_state
from secure_fed.methods.ffa_lora import orthonormal, without_a
from secure_fed.methods.method import CHANGE, Card, RoundPlan, State
from secure_fed.tensors.low_rank import Svd, right_orthonormal
from secure_fed.tensors.tensors import LowRank, Tensors

CARD = Card(
    name="fedsvd",
    paper="Lee et al., NeurIPS 2025, arXiv 2505.12805",
    travels="up B, head; down A, B, head",
    mean_exact=True,
    options=LORA_OPTIONS,
    memoryless="the basis that B is written in is another in every round, and changes in several of them cannot be added up",
)


def build(run: RunConfig) -> FedSvd:
    return FedSvd(LoraAdapter.of(run.method), CARD)


@dataclass(frozen=True)
class FedSvd(AveragedLora):
    """Averages B and the head; the server refactors the mean product into an orthonormal A and the next B."""

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int) -> Tensors:
        return self.adapter.prepare(model, head, seed, orthonormal)

    def trained(self, state: State) -> Tensors:
        return without_a(state.tensors)

    def plan(self, state: State) -> RoundPlan:
        return RoundPlan(trainable=tuple(self.trained(state)), down=tuple(state.tensors))

    def rewritten(self, tensors: Tensors) -> tuple[str, ...]:
        """Every B: the server changes A and B together."""
        return tuple(pair.b for pair in pairs(tensors))

    def factors(self, product: Svd) -> tuple[Tensor, Tensor]:
        return right_orthonormal(product)

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        averaged = moved(state.tensors, means[CHANGE])
        factors: dict[str, Tensor] = {}
        for pair in pairs(averaged):
            a, b = averaged.tensor(pair.a), averaged.tensor(pair.b)
            factors |= factored(pair, LowRank(b, a), a, b, self.factors)
        return next_state(state, averaged | factors)
