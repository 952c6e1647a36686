"""Gradient checkpointing: a layer's activations are computed again in the backward pass, instead of being kept.

transformers marks the layers that can do this (`gradient_checkpointing`). All of them use torch's non-reentrant kind here,
also where a given model was set to the reentrant kind: the gradients are the same, and it needs no gradient at a layer's
inputs, which a frozen embedding does not have. Dropout draws the same masks again (`same_again`, or torch's own
generator, which torch restores).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from secure_fed.errors import ConfigError
from secure_fed.learning.models.architecture import of_text
from secure_fed.learning.models.device_map import is_offloaded
from secure_fed.learning.models.own_dropout import same_again


def is_checkpointing(model: nn.Module) -> bool:
    """Whether layers of the model are computed again in the backward pass."""
    return any(getattr(layer, "gradient_checkpointing", False) is True for layer in model.modules())


def set_checkpointing(model: nn.Module, on: bool) -> None:
    """Turn checkpointing on or off; ConfigError for a model without layers that have it."""
    layers = [layer for layer in model.modules() if hasattr(layer, "gradient_checkpointing")]
    if on and not layers:
        name = type(model).__name__
        raise ConfigError(
            f"training.checkpointing is true, and {name} has no layers with gradient checkpointing; set it to 'auto', and "
            "training.microbatch to save memory"
        ).about("training.checkpointing", True, "'auto' or false")
    for layer in layers:
        layer.gradient_checkpointing = on  # type: ignore[assignment]
        if on:
            layer._gradient_checkpointing_func = again  # type: ignore[assignment]


def again(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """layer(*args, **kwargs), computed again in the backward pass, with the context variables that it has now."""
    now = copy_context()

    def within(*own: Any, **named: Any) -> Any:
        return now.copy().run(layer, *own, **named)

    return checkpoint(within, *args, use_reentrant=False, context_fn=same_again, **kwargs)


def wanted(setting: bool | str, model: nn.Module, tokens: int | None, device: torch.device) -> bool:
    """Whether to turn checkpointing on. setting: `training.checkpointing`. tokens: of the largest pass; None if unknown.

    "auto": as a given model is set; on, if the activations of a pass would fill more than half of the device's memory, or if
    layers are offloaded, since a pass would otherwise keep all their weights. The choice depends on public numbers and the
    device alone, so that no client's data decide how bits are rounded.
    """
    if isinstance(setting, bool):
        return setting
    if is_checkpointing(model):
        return True
    if not any(hasattr(layer, "gradient_checkpointing") for layer in model.modules()):
        return False
    if is_offloaded(model):
        return True
    if tokens is None:
        return False
    return tokens * activations(model) > memory(device) / 2


def activations(model: nn.Module) -> int:
    """About the bytes of activations that the backward pass needs for one token, by the model's configuration."""
    config = of_text(getattr(model, "config", None))
    layers, width = (getattr(config, name, None) or 0 for name in ("num_hidden_layers", "hidden_size"))
    inner = getattr(config, "intermediate_size", None) or 4 * width
    kind = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    # A layer keeps some twelve tensors of its width (inputs of norms and adapters, queries, keys, values), four of the inner.
    return int(layers * (12 * width + 4 * inner) * kind.itemsize)


def memory(device: torch.device) -> int:
    """The bytes of memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
