"""The places of bottleneck adapters: behind the attention and behind the feed-forward of every layer of a transformer.

An adapter changes the output of the last linear layer of such a block, before dropout and the residual connection:
y -> y + adapter(y), or another function of y. It becomes a child of that linear layer, so that the base model keeps the names
of its parameters, and every model its own forward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.targets import matrix_shape
from secure_fed.learning.models.architecture import name_of
from secure_fed.learning.models.device_map import place_of

CHILD = "adapter"  # one name for all modules of `insert`, so that a second adapter at a place is noticed


class Place(NamedTuple):
    """The last linear layer of one block: its name, the number of its layer (from 0), the block, and its output width."""

    module: str
    layer: int
    block: str  # "attention" or "feed_forward"
    width: int


# Ends of the names of those linear layers, behind the layer's number.
_ENDS = {
    "attention": (
        "attention.output.dense",  # BERT, RoBERTa, DeBERTa
        "attention.attn.o",  # MPNet
        "attention.out_lin",  # DistilBERT
        "self_attn.o_proj",  # LLaMA
        "attn.c_proj",  # GPT-2
        "attn.attention.out_proj",  # GPT-Neo
    ),
    "feed_forward": (
        "output.dense",  # BERT, RoBERTa, DeBERTa, MPNet
        "ffn.lin2",  # DistilBERT
        "mlp.down_proj",  # LLaMA
        "mlp.c_proj",  # GPT-2, GPT-Neo
        "mlp.fc2",  # Jina, whose attention is LLaMA's
    ),
}
_BLOCKS = tuple(_ENDS)
_REMEDY = "choose a method on LoRA, which takes method.target_modules"


def places(model: nn.Module, blocks: Collection[str] = _BLOCKS) -> list[Place]:
    """Every place behind blocks of these kinds, in the order of the layers, attention first.

    Refuses a model with a layer that has no known block of one of these kinds.
    """
    found, layers = list[Place](), dict[str, set[str]]()  # the kinds of blocks known in a layer, by its name
    for name, module in model.named_modules():
        for block, ends in _ENDS.items():
            match = re.fullmatch(rf"(.*\.(\d+))\.(?:{'|'.join(map(re.escape, ends))})", name)
            if match and isinstance(module, nn.Linear | Conv1D):
                found.append(Place(name, int(match[2]), block, matrix_shape(module)[0]))
                layers.setdefault(match[1], set()).add(block)
    if not found:
        raise MethodError(
            f"no attention and feed-forward blocks are known in {name_of(model)}, behind which an adapter could stand: "
            f"{_REMEDY}"
        )
    _require_all(model, layers, blocks)
    return sorted((place for place in found if place.block in blocks), key=lambda place: (place.layer, place.block))


def _require_all(model: nn.Module, layers: Mapping[str, Collection[str]], blocks: Collection[str]) -> None:
    """Refuse a model with a layer that has no known block of one of these kinds.

    A layer may have further feed-forward blocks in a stack of its own, as in MobileBERT.
    """
    for stack in dict.fromkeys(layer.rpartition(".")[0] for layer in layers):
        if any(stack.startswith(f"{layer}.") for layer in layers):
            continue
        for number, _ in model.get_submodule(stack).named_children():
            layer = f"{stack}.{number}"
            if missing := [block for block in _BLOCKS if block in blocks and block not in layers.get(layer, ())]:
                raise MethodError(
                    f"no {missing[0].replace('_', '-')} block is known in {layer} of {name_of(model)}, behind which an adapter "
                    f"could stand: {_REMEDY}"
                )


def insert(model: nn.Module, blocks: Collection[str], make: Callable[[Place], nn.Module]) -> list[str]:
    """Put `make(place)` behind every block of these kinds, in the order of the layers; returns the parameters' names.

    Modules are made on the CPU, whatever the default device is, and the process-wide random state is not changed.
    """
    names = []
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for place in places(model, blocks):
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
    layer.register_module(name, adapter.to(place_of(layer)))
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
