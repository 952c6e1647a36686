"""FedPower: the mean product of A and B by subspace iteration, noised before columns are made orthonormal.

Tran, Milanova and Patterson, "Improving Parameter-Efficient Federated Learning with Differentially Private Refactorization"
(arXiv 2605.08443). Their server clips every client's full-rank update, adds these up, and factorises the sum by simultaneous
subspace iteration with noise before the final orthonormalisation (PowerDP), where it rotates a basis and is not multiplied.

Here every product of the iteration is a pass over the clients, `power_iterations` of them and a last pass:

    power-0    D_i Omega         (m, k)     Q_0 = an orthonormal basis of the noised mean's columns
    power-1    D_i^T Q_0         (n, k)     Q_1 = ...
    ...
    change     the next product, and the head's change; noised too, but not made orthonormal: W

with D_i = s (B_i A_i - B A) and k the rank plus `oversampling` columns (`methods/subspace.py`). The best approximation of
rank r of B A + W Q^T / s (with an odd `power_iterations`, B A + Q W^T / s) is split into B' = U S and A' = V^T, whose rows are
orthonormal. Clients train both factors, and the server sends both.

Differences from the paper, of which only the abstract was available and not the algorithms (so the number of columns and the
split are ours, too):

- In the paper a trusted server has every client's update: the noise is central. Products with a public basis are linear in the
  update, so here each client computes its own, and the iteration works in the clear, under secure aggregation, and with
  central, distributed or local noise.
- In the paper, products before the final one stay on the server. Here clients get each basis, so each product is noised and
  charged as a release: `power_iterations` + 1 of them a round.
- In the paper the update is clipped; here each pass's product is clipped, to the same norm. As Q is orthonormal,
  |D_i Q| <= |D_i|: updates that the paper does not clip are not clipped, and others are clipped less. (With Omega the norm is
  kept on average only.)
- Changes are factorised, not products, and B A, which is public, is added. The remaining noise is not reduced.
- An example is protected by noised gradients of both factors, as in every method here; the passes then add no noise.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter
from secure_fed.methods.method import CHANGE, Card
from secure_fed.methods.subspace import Subspace
from secure_fed.tensors.low_rank import right_orthonormal

CARD = Card(
    name="fedpower",
    paper="Tran et al., 2026, arXiv 2605.08443",
    travels="products of the change of B A with bases, head; down A, B, head",
    mean_exact=False,
    options=(*LORA_OPTIONS, "oversampling", "power_iterations"),
    memoryless="the basis that a change is written in is another in every round",
    needs_means="its passes are linear in the changes, and a median is not",
)


def build(run: RunConfig) -> Subspace:
    passes = (*(f"power-{number}" for number in range(run.method.power_iterations)), CHANGE)
    columns = run.method.rank + run.method.oversampling
    return Subspace(LoraAdapter.of(run.method), CARD, columns, passes, right_orthonormal)
