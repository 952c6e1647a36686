"""A model's parameters by name, to read or to train."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from secure_fed.learning.models.device_map import keep
from secure_fed.tensors.tensors import Tensors


def read(model: nn.Module, names: Iterable[str]) -> Tensors:
    """Copies of the named parameters, float32 on the CPU whatever the model computes in.

    For a model on the meta device, which has shapes and no numbers, tensors on that device. Offloaded parameters are kept on
    their device from here on (`device_map.keep`), since a run replaces them or trains them.
    """
    names = list(names)
    keep(model, names)
    return Tensors((name, _copied(model.get_parameter(name).detach())) for name in names)


def train_only(model: nn.Module, names: Iterable[str]) -> None:
    """Freeze all parameters but these."""
    model.requires_grad_(False)
    for name in names:
        model.get_parameter(name).requires_grad_(True)


def _copied(parameter: Tensor) -> Tensor:
    if parameter.is_meta:
        return torch.empty_like(parameter, dtype=torch.float32)
    return parameter.to("cpu", torch.float32, copy=True)
