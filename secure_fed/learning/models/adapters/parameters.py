"""A model's parameters by name, to read or to train; and the base class of our own layers with per-example gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from secure_fed.learning.models.adapters.own_tensors import EachOwn, of_each
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


class ExampleWise(nn.Module):
    """A layer of one input and one output, (B, ...) each, whose output for an example is a function of that example's input and
    of the layer's own parameters (not its children's).

    Its forward uses only operations that `torch.func` can batch: no branch on values, nothing random, nothing in place. So the
    layer can be called with parameters that differ between examples (`EachOwn`), and `learning/training/cohort/passes.py`
    computes each example's gradient by the layer's own backward pass over that example alone.
    """

    def __call__(self, x: Tensor) -> Any:
        given: Mapping[str, Any] = self._parameters
        own = {name: value.rows for name, value in given.items() if isinstance(value, EachOwn)}
        if not own:
            return super().__call__(x)
        shared = {name: value for name, value in given.items() if value is not None and name not in own}

        def of_one(values: Mapping[str, Tensor], x_i: Tensor) -> Tensor:
            y_i: Tensor = functional_call(self, {**shared, **values}, (x_i,))
            return y_i

        examples = len(next(iter(own.values())))
        y: Tensor = vmap(of_one)(own, of_each(x, examples))
        return y.flatten(0, 1)
