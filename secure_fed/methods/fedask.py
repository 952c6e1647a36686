"""FedASK: the mean product of A and B by two sketching passes, split into new factors.

Wen, Zhu, Xu, Zhou and Han, "Differentially Private Federated Low Rank Adaptation Beyond Fixed-Matrix" (NeurIPS 2025, arXiv
2507.09990); details follow their published program. It is a randomised SVD of the mean product (Halko,
Martinsson and Tropp, 2011), both of whose products are sums over the clients:

    sketch    D_i Omega       (m, k)     Q: an orthonormal basis of the mean's columns
    change    D_i^T Q         (n, k)     and the head's change; mean(D_i) is about Q mean(D_i^T Q)^T

with k the rank plus `oversampling` columns (`methods/subspace.py`). The best approximation of rank r of the updated product is
split into B' = U sqrt(S) and A' = sqrt(S) V^T. The server sends both in every round. As in the paper, there is no denoising.

Trained tensors: both factors; or B alone where gradients are noised (privacy.unit = example or person), because the noises of
both factors would multiply in their product; the program has a switch for it. With B alone, D = mean(B_i - B) A has rank r at
most, so that both passes are exact, and the rows of A' lie in the row space of A: the SVD changes the basis in which B trains,
and not the space.

Exact where mean(D_i) has rank k at most, as it has for up to k / r - 1 clients; otherwise the part outside the sketch is lost.

Deviations: clients contribute changes D_i = s (B_i A_i - B A) and not products B_i A_i, so that the norm of its message bounds
a client's influence, and only the change has to fit into the sketch. Omega has orthonormal columns and is new in every round;
the program draws one Gaussian for all rounds. Client-level privacy is not in the paper: each pass is then a separate release,
clipped and noised by itself. The head trains and is sent.
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
    noised_gradients = run.privacy.unit in ("example", "person")
    columns = run.method.rank + run.method.oversampling
    return Subspace(LoraAdapter.of(run.method), CARD, columns, (SKETCH, CHANGE), balanced, b_alone=noised_gradients)
