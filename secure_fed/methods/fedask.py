"""FedASK: the mean product of A and B by two sketching passes, split anew into both.

Wen, Zhu, Xu, Zhou and Han, "Differentially Private Federated Low Rank Adaptation Beyond Fixed-Matrix" (NeurIPS 2025, arXiv
2507.09990); details are those of the program that they publish. It is a randomised SVD of the mean product (Halko,
Martinsson and Tropp, 2011), both of whose products are sums over the clients:

    sketch    D_i Omega       (m, k)     Q: an orthonormal basis of the mean's columns
    change    D_i^T Q         (n, k)     and the head's change; mean(D_i) is about Q mean(D_i^T Q)^T

with k the rank and `oversampling` columns more (`methods/subspace.py`). The best approximation of rank r of what this gives is
split into B' = U sqrt(S) and A' = sqrt(S) V^T. Both come down in every round. No noise is taken out of a mean: the paper
takes none.

What trains: both factors; or B alone where the noise is in the gradients (privacy.unit = example or group), because noise on
both would meet in their product; the program has a switch for it. There D = mean(B_i - B) A has rank r at most, so that both
passes are exact, and the rows of A' lie in those of A: the SVD changes the basis that B trains in, and not the space.

Exact where mean(D_i) has rank k at most, as it has for up to k / r - 1 clients; beyond, what lies outside the sketch is lost.

Deviations: clients contribute changes, D_i = s (B_i A_i - B A) for B_i A_i, so that what a client can move is bounded by the
norm of what it sends, and only the change has to fit into the sketch. Omega has orthonormal columns and is new in every
round, where the program draws one Gaussian for all of them. Under client-level privacy, which is not the paper's, each pass
is a release of its own, clipped and noised by itself. The head trains and travels.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter
from secure_fed.methods.method import CHANGE, Card
from secure_fed.methods.subspace import Subspace
from secure_fed.tensors.low_rank import balanced

CARD = Card(
    name="fedask",
    paper="Wen et al., NeurIPS 2025, arXiv 2507.09990",
    travels="two sketches of the change of B A, head; down A, B, head",
    mean_exact=False,
    options=(*LORA_OPTIONS, "oversampling"),
    memoryless="the basis that a change is written in is another in every round",
    needs_means="its passes are linear in the changes, and a median is not",
)

SKETCH = "sketch"


def build(run: RunConfig) -> Subspace:
    noised_gradients = run.privacy.unit in ("example", "group")
    columns = run.method.rank + run.method.oversampling
    return Subspace(LoraAdapter.of(run.method), CARD, columns, (SKETCH, CHANGE), balanced, b_alone=noised_gradients)
