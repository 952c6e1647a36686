"""The weights that a diagnostic compares.

Both papers compare the learned part beside the frozen model, FedARA the product of the factors. So where the adapters are
LoRA's, or can be written so, it is s B A of every adapted matrix; elsewhere every tensor that trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from secure_fed.learning.models.adapters.lora import LoraForm
from secure_fed.methods.method import LoraShaped, Method, State
from secure_fed.tensors.tensors import LowRank, Tensors, dense


@dataclass(frozen=True)
class Weights:
    """The compared part of a state of `method` in a run that began with `initial`."""

    method: Method
    initial: Tensors

    def pairs(self, before: Tensors, after: Tensors, trained: tuple[str, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each compared matrix in both states, formed one after the other; matrices whose shape changes are left out."""
        if isinstance(self.method, LoraShaped):
            yield from self._products(self.method, before, after)
            return
        for name in trained:
            one, other = before.tensor(name), after.tensor(name)
            if one.shape == other.shape:
                yield one, other

    def _products(self, method: LoraShaped, before: Tensors, after: Tensors) -> Iterator[tuple[Tensor, Tensor]]:
        one, other = (_formed(method.as_lora(self.initial, tensors)) for tensors in (before, after))
        for module in sorted(one.keys() | other.keys()):
            found = (one.get(module), other.get(module))
            v, w = (dense(product) if product is not None else None for product in found)
            if v is not None:
                yield v, torch.zeros_like(v) if w is None else w
            elif w is not None:
                yield torch.zeros_like(w), w

    def trained(self, state: State) -> tuple[str, ...]:
        """The names that train in the round after `state`."""
        return self.method.plan(state).trainable


def _formed(form: LoraForm) -> dict[str, LowRank]:
    """s B A by module, float64; a module whose factors have all been given up is not in it."""
    scale = form.adapter.scaling
    return {module: LowRank(scale * b.double(), a.double()) for module, (a, b) in form.factors.items()}
