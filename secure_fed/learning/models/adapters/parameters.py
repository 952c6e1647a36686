"""A model's own parameters: read by name, trained by name, and as an adapter that adds no layer.

The adapter is all of them, the biases, or none beside the head. A parameter that a model uses in two places (tied embeddings)
has the first of its names. Buffers, such as position ids, are no parameters and do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secure_fed.errors import MethodError
from secure_fed.learning.models.devices import is_divided, keep
from secure_fed.tensors.tensors import Tensors


def read(model: nn.Module, names: Iterable[str]) -> Tensors:
    """Copies of the named parameters, float32 on the CPU whatever the model computes in.

    For a model on the meta device, which has shapes and no numbers, tensors on that device. Offloaded parameters are kept on
    their device from here on (`devices.keep`), since a run replaces them or trains them.
    """
    names = list(names)
    keep(model, names)

    def copied(parameter: Tensor) -> Tensor:
        if parameter.is_meta:
            return torch.empty_like(parameter, dtype=torch.float32)
        return parameter.to("cpu", torch.float32, copy=True)

    return Tensors((name, copied(model.get_parameter(name).detach())) for name in names)


def train_only(model: nn.Module, names: Iterable[str]) -> None:
    """Freeze all parameters but these."""
    model.requires_grad_(False)
    for name in names:
        model.get_parameter(name).requires_grad_(True)


@dataclass(frozen=True)
class Everything:
    """Every parameter of the model."""

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        if is_divided(model):
            raise MethodError(
                "the model is divided over devices, by accelerate, and this method trains every weight: load the model without "
                "device_map, or choose a method on LoRA"
            ).about("method.name", "fedft", "a method that trains beside a divided model")
        return _trained(model, [name for name, _ in model.named_parameters()])


@dataclass(frozen=True)
class Biases:
    """Every bias of the model, of linear layers and of normalisations, including the head's.

    Its name is `bias`, as in torch, or `q_bias` and the like, as in DeBERTa and `nn.MultiheadAttention`.
    """

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        names = [
            name
            for name, parameter in model.named_parameters()
            if parameter.ndim == 1 and f"_{name.rpartition('.')[2]}".endswith("_bias")
        ]
        if not set(names).difference(head):
            raise MethodError(
                f"{type(model).__name__} has no biases outside its head, so there is nothing for this method to train: "
                "choose a method on LoRA, or an adapter"
            )
        return _trained(model, names, head)


@dataclass(frozen=True)
class HeadAlone:
    """No parameter beside the head."""

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        if not head:
            raise MethodError(
                f"{type(model).__name__} has no head of its own, so there is nothing for this method to train: name modules in "
                "method.modules_to_save, or choose a method on LoRA"
            )
        return _trained(model, [], head)


def _trained(model: nn.Module, names: list[str], head: Sequence[str] = ()) -> list[str]:
    """Make only `names` and the head train; returns `names`. Refuses parameters that cannot have a gradient."""
    for name in names:
        dtype = model.get_parameter(name).dtype
        if not dtype.is_floating_point:
            raise MethodError(
                f"parameter {name} of the model is {dtype}, which cannot train: load the model without quantisation, or "
                "choose a method on LoRA"
            )
    train_only(model, [*names, *head])
    return names
