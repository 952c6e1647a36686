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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter, LoraForm
from secure_fed.methods.averaging import next_state
from secure_fed.methods.method import CHANGE, Card, RoundPlan, State
from secure_fed.methods.subspace import Subspace
from secure_fed.tensors.low_rank import right_orthonormal
from secure_fed.tensors.tensors import Layout, Tensors

CARD = Card(
    name="fedpower",
    paper="Tran et al., 2026, arXiv 2605.08443",
    travels="products of the change of B A with bases, head; down A, B, head",
    mean_exact=False,
    options=(*LORA_OPTIONS, "oversampling", "power_iterations"),
    memoryless="the basis that a change is written in is another in every round",
)


def build(run: RunConfig) -> FedPower:
    return FedPower(LoraAdapter.of(run.method), run.method.oversampling, run.method.power_iterations)


@dataclass(frozen=True)
class FedPower:
    """Averages the products B A, as far as an iterated subspace holds them, and the head.

    oversampling: columns of a basis beyond the rank. iterations: products that are made orthonormal.
    """

    adapter: LoraAdapter
    oversampling: int = 8
    iterations: int = 2

    @property
    def card(self) -> Card:
        return CARD

    @property
    def _passes(self) -> Subspace:
        powers = [f"power-{number}" for number in range(self.iterations)]
        return Subspace(self.adapter, self.adapter.rank + self.oversampling, (*powers, CHANGE))

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int) -> Tensors:
        return self.adapter.prepare(model, head, seed)

    def plan(self, state: State) -> RoundPlan:
        names = tuple(state.tensors)
        return RoundPlan(trainable=names, down=names, passes=self._passes.passes)

    def layout(self, state: State, pass_name: str) -> Layout:
        return self._passes.layout(state, pass_name)

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        return self._passes.contribute(pass_name, before, after, means)

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        return next_state(state, self._passes.merged(state.tensors, means, right_orthonormal))

    def as_lora(self, initial: Tensors, tensors: Tensors) -> LoraForm:
        """A and B as they are."""
        return self.adapter.form(initial, tensors)
