"""Shared by the tests of adapters behind blocks: models with changed adapters, and forward passes written out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.secure_fed import small_models
from tests.secure_fed.adapters.virtual import made

# The last linear layer of each block, by hand.
BLOCKS = {
    "bert": {
        "attention": "bert.encoder.layer.{}.attention.output.dense",
        "feed_forward": "bert.encoder.layer.{}.output.dense",
    },
    "distilbert": {
        "attention": "distilbert.transformer.layer.{}.attention.out_lin",
        "feed_forward": "distilbert.transformer.layer.{}.ffn.lin2",
    },
    "llama": {"attention": "model.layers.{}.self_attn.o_proj", "feed_forward": "model.layers.{}.mlp.down_proj"},
    "gpt2": {"attention": "transformer.h.{}.attn.c_proj", "feed_forward": "transformer.h.{}.mlp.c_proj"},
}


def adapted(architecture: str, adapter: Any, seed: int = 0) -> tuple[nn.Module, list[str]]:
    """A float64 model with an adapter, and its parameter names. Adapter and head are moved away from their initial values."""
    model = made(architecture)
    head = small_models.head_of(model)
    names = list(adapter.inject(model, head, seed))
    model.double()
    shake(model, [*names, *head])
    return model, names


def shake(model: nn.Module, names: Sequence[str], seed: int = 11) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in names:
            parameter = model.get_parameter(name)
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def by_hand(adapted_model: nn.Module, architecture: str, change: Callable[[str, Tensor], Tensor]) -> Tensor:
    """The logits of the model without adapters, with `change(layer, y)` in place of the output y of each block's last layer.

    layer: the name of the block's last linear layer.
    """
    plain = made(architecture)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(adapted_model.get_parameter(name))
    for layer in (0, 1):
        for name in BLOCKS[architecture].values():
            at = name.format(layer)
            plain.get_submodule(at).register_forward_hook(lambda _, args, y, at=at: change(at, y))
    return small_models.logits(plain)


def each_token(y: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """`change` applied separately to every (d,) vector of y (..., d)."""
    rows = [change(row) for row in y.reshape(-1, y.shape[-1])]
    return torch.stack(rows).reshape(y.shape)


def counted(model: nn.Module, names: Sequence[str]) -> int:
    return sum(model.get_parameter(name).numel() for name in names)
