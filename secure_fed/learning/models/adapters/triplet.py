"""B E A beside any linear layer: a low-rank change whose ranks each have a trainable size.

An adapted layer computes `W x + s B E A x` with W (m, n) frozen, A (k, n), E (k,) as a diagonal matrix, B (m, k) and the scale
s = alpha / r, or alpha / sqrt(r). At first k = r, the entries of A and B are N(0, 0.02^2) and E is zero, so that the model's
outputs are unchanged. The shapes follow the tensors of the round: ranks may be pruned, and a layer without ranks is skipped, at
no cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.lora import LoraAdapter, LoraForm, keep_to_modules, matrix_shape
from secure_fed.learning.models.adapters.parameters import train_only
from secure_fed.learning.models.adapters.per_example import ExampleWise
from secure_fed.learning.models.devices import place_of
from secure_fed.tensors.tensors import Tensors

_CHILD = "triplet"
_A, _E, _B = (f".{_CHILD}.{factor}" for factor in "AEB")
_STD = 0.02


class Triplet(NamedTuple):
    """One adapted module and its parameter names: A is (k, n), E (k,), B (m, k)."""

    module: str
    a: str
    e: str
    b: str


def triplets(names: Iterable[str]) -> list[Triplet]:
    """The adapted modules among tensor names, in name order."""
    modules = sorted(name.removesuffix(_A) for name in names if name.endswith(_A))
    return [Triplet(module, module + _A, module + _E, module + _B) for module in modules]


class TripletLayer(ExampleWise):
    """x (..., n) -> s B E A x (..., m), in float32 whatever the model computes in."""

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)
        self.E = nn.Parameter(torch.zeros(a.shape[0], device=a.device))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        scaled = functional.linear(x.to(self.A.dtype), self.A) * (self.E * self.scale)
        return functional.linear(scaled, self.B).to(x.dtype)


def _added(dropout: float, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """A forward hook of the linear layer that finds its child by name, so that a copy of the model calls the copied child."""
    added = layer.get_submodule(_CHILD)
    if not isinstance(added, TripletLayer) or not len(added.E):
        return output
    x = functional.dropout(args[0], dropout, layer.training) if dropout else args[0]
    changed: Tensor = output + added(x)
    return changed


@dataclass(frozen=True)
class TripletAdapter:
    """The triplets' rank, scale, dropout and places: the settings in `lora`, for B E A instead of B A."""

    lora: LoraAdapter

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        """Put triplets into `model` in place, all parameters but theirs and the head's frozen, and return their names.

        A and B are drawn on the CPU from `seed` alone, in name order; the model's outputs and the names of the base model's
        parameters are unchanged. A layer of the head trains in full and gets no triplet.
        """
        targets = self.lora.targets(model, head)
        if any(isinstance(module, TripletLayer) for module in model.modules()):
            raise MethodError(f"the {type(model).__name__} already holds triplets: give a model without any")
        generator = torch.Generator().manual_seed(seed)
        for layer in targets.values():
            place = place_of(layer)
            m, n = matrix_shape(layer)
            with torch.device("cpu"):  # whatever the default device is
                a = torch.randn(self.lora.rank, n, generator=generator) * _STD
                b = torch.randn(m, self.lora.rank, generator=generator) * _STD
            added = TripletLayer(a.to(place), b.to(place), self.lora.scaling)
            layer.register_module(_CHILD, added)
            layer.register_forward_hook(partial(_added, self.lora.dropout))
        keep_to_modules(model)
        names = [name for module in targets for name in (module + _A, module + _E, module + _B)]
        train_only(model, [*names, *head])
        return names

    def form(self, tensors: Tensors) -> LoraForm:
        """The same change as LoRA: A, and B E in place of B, of every module with a rank left, at the initial rank's scale."""
        factors = {}
        for triplet in triplets(tensors):
            a, e, b = (tensors.tensor(name) for name in (triplet.a, triplet.e, triplet.b))
            if len(e):
                factors[triplet.module] = (a, b * e)
        return LoraForm(self.lora, factors)


def importance(tensors: Tensors) -> dict[str, Tensor]:
    """|E_i| + mean |B_:i| + mean |A_i:| for every rank i of every module, (k,) by module."""
    found = {}
    for triplet in triplets(tensors):
        a, e, b = (tensors.tensor(name) for name in (triplet.a, triplet.e, triplet.b))
        found[triplet.module] = e.abs() + b.abs().mean(0) + a.abs().mean(1)
    return found


def kept(tensors: Tensors, live: Mapping[str, Tensor]) -> Tensors:
    """`tensors` with only the ranks that `live`, a mask (k,) by module, keeps."""
    left: dict[str, Tensor] = {}
    for triplet in triplets(tensors):
        a, e, b = (tensors.tensor(name) for name in (triplet.a, triplet.e, triplet.b))
        stays = live[triplet.module]
        left |= {triplet.a: a[stays], triplet.e: e[stays], triplet.b: b[:, stays].contiguous()}
    return tensors | left
