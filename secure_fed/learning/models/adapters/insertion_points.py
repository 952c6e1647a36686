"""The places of bottleneck adapters: behind the attention and behind the feed-forward of every layer of a transformer.

An adapter changes the output of the last linear layer of such a block, before dropout and the residual connection:
y -> y + adapter(y), or another function of y. It becomes a child of that linear layer, so that the base model keeps the names
of its parameters, and every model its own forward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.targets import matrix_shape
from secure_fed.learning.models.architecture import name_of

CHILD = "adapter"  # one name for all modules of `insert`, so that a second adapter at a place is noticed


class Place(NamedTuple):
    """The last linear layer of one block: its name, the number of its layer (from 0), the block, and its output width."""

    module: str
    layer: int
    block: str  # "attention" or "feed_forward"
    width: int


# Ends of the names of those linear layers, behind the layer's number: BERT, RoBERTa, DeBERTa; DistilBERT; LLaMA; GPT-2.
_ATTENTION = ("attention.output.dense", "attention.out_lin", "self_attn.o_proj", "attn.c_proj")
_FEED_FORWARD = ("output.dense", "ffn.lin2", "mlp.down_proj", "mlp.c_proj")


def places(model: nn.Module) -> list[Place]:
    """Every place of the model, in the order of its layers, attention first."""
    found = [
        Place(name, int(match[1]), block, matrix_shape(module)[0])
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        for block, ends in (("attention", _ATTENTION), ("feed_forward", _FEED_FORWARD))
        if (match := re.fullmatch(rf".*\.(\d+)\.(?:{'|'.join(map(re.escape, ends))})", name))
    ]
    if not found:
        raise MethodError(
            f"no attention and feed-forward blocks are known in {name_of(model)}, behind which an adapter could stand: "
            "choose a method on LoRA, which takes method.target_modules"
        )
    return sorted(found, key=lambda place: (place.layer, place.block))


def insert(model: nn.Module, blocks: Collection[str], make: Callable[[Place], nn.Module]) -> list[str]:
    """Put `make(place)` behind every block of these kinds, in the order of the layers; returns the parameters' names.

    Modules are made on the CPU, whatever the default device is, and the process-wide random state is not changed.
    """
    names = []
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for place in places(model):
            if place.block in blocks:
                adapter = make(place)
                at = attach(model, place.module, CHILD, adapter)
                names += [f"{at}.{name}" for name, _ in adapter.named_parameters()]
    return names


def attach(model: nn.Module, place: str, name: str, adapter: nn.Module, *, in_front: bool = False) -> str:
    """Make `adapter` the child `name` of the layer `place`, whose output it replaces; returns its full name.

    The adapter is called with this output alone, or with `in_front` replaces the layer's input, and moves to its device.
    """
    layer = model.get_submodule(place)
    if hasattr(layer, name):
        raise MethodError(f"layer {place} of the model already has an adapter: give a model without any")
    layer.register_module(name, adapter.to(layer.get_parameter("weight").device))
    if in_front:
        layer.register_forward_pre_hook(partial(_fed, name))
    else:
        layer.register_forward_hook(partial(_replaced, name))
    return f"{place}.{name}"


def _replaced(name: str, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """A forward hook that finds its adapter by name, so that a copy of the model calls the copied adapter."""
    changed: Tensor = layer.get_submodule(name)(output)
    return changed


def _fed(name: str, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook that finds its adapter by name, like `_replaced`."""
    return (layer.get_submodule(name)(args[0]), *args[1:])
