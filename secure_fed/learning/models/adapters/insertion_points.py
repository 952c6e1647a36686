"""Where bottleneck adapters go: behind the attention and behind the feed-forward of every layer of a transformer.

An adapter changes the output of the last linear layer of such a block, before dropout and the residual connection:
y -> y + adapter(y), or whatever the adapter makes of y. It becomes a child of that linear layer, so that the base model keeps
the names of its parameters, and every model its own forward.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from secure_fed.errors import MethodError


class Place(NamedTuple):
    """The last linear layer of one block: its name, the layer it is in (from 0), the block, and how wide its output is."""

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
        Place(name, int(match[1]), block, _width(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        for block, ends in (("attention", _ATTENTION), ("feed_forward", _FEED_FORWARD))
        if (match := re.fullmatch(rf".*\.(\d+)\.(?:{'|'.join(map(re.escape, ends))})", name))
    ]
    if not found:
        raise MethodError(
            f"no attention and feed-forward blocks are known in {type(model).__name__}, behind which an adapter could stand: "
            "choose a method on LoRA, which takes method.target_modules"
        )
    return sorted(found, key=lambda place: (place.layer, place.block))


def attach(model: nn.Module, place: str, name: str, adapter: nn.Module) -> str:
    """Make `adapter` the child `name` of the layer `place`, whose output it is given and replaces; returns its full name.

    The adapter is called with that output alone, and moved to where the layer is.
    """
    layer = model.get_submodule(place)
    if hasattr(layer, name):
        raise MethodError(f"layer {place} of the model already has an adapter: give a model without any")
    layer.register_module(name, adapter.to(layer.get_parameter("weight").device))
    layer.register_forward_hook(_Replaced(name))
    return f"{place}.{name}"


class _Replaced:
    """A forward hook that knows its adapter by name, so that a copy of the model calls the copy."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        changed: Tensor = layer.get_submodule(self._name)(output)
        return changed


def _width(layer: nn.Module) -> int:
    shape = layer.get_parameter("weight").shape
    return int(shape[0] if isinstance(layer, nn.Linear) else shape[1])
