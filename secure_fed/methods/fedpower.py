"""FedPower: the mean product of A and B by subspace iteration, noised before columns are made orthonormal.

Tran, Milanova and Patterson, "Improving Parameter-Efficient Federated Learning with Differentially Private Refactorization"
(arXiv 2605.08443). Their server clips every client's full-rank update, adds these up, and factorises the sum by simultaneous
subspace iteration with noise before the final orthonormalisation (PowerDP), where it turns a basis, and does not multiply.

Here every product of the iteration is a pass over the clients, `power_iterations` of them and a last one:

    power-0    D_i Omega         (m, k)     Q_0 = an orthonormal basis of the noised mean's columns
    power-1    D_i^T Q_0         (n, k)     Q_1 = ...
    ...
    change     the next product, and the head's change; noised too, but not made orthonormal: W

with D_i = s (B_i A_i - B A) and k the rank and `oversampling` columns more (`methods/subspace.py`). The best approximation of
rank r of B A + W Q^T / s is split into B' = U S and A' = V^T, whose rows are orthonormal. Both factors train and come down.

What differs from the paper, of which its abstract was to be had, and not its algorithms (so the number of columns and the
split are ours, too):

- There the server holds every client's update and is trusted with it: the noise is central. Products with a public basis are
  linear in the update, so here each client makes its own, and the iteration runs in the clear, behind masks, and with noise
  from the server, in shares, or from each client.
- There products before the final one stay within the server. Here clients get each basis, so each product is noised and
  charged as a release: `power_iterations` + 1 of them a round.
- There the update is clipped; here what a pass sends of it is, to the same norm. As Q is orthonormal, |D_i Q| <= |D_i|: what
  the paper leaves alone is left alone, and of the rest less is taken. (With Omega the norm is kept on average only.)
- Changes are factorised, not products, and B A, which is public, is added. Nothing is done to the noise that is left.
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
