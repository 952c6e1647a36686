"""Dropout from a generator of its own, and gradient checkpointing, which draws the same masks again.

torch's dropout draws from one generator of the process. Passes that are computed at the same time would use its numbers in an
order that cannot be repeated, so within `OwnDropout` each pass draws its masks from its own generator.

Gradient checkpointing computes a layer's activations again in the backward pass, instead of keeping them. transformers marks
the layers that can do this (`gradient_checkpointing`). All of them use torch's non-reentrant kind here, also where a given
model was set to the reentrant kind: the gradients are the same, and it needs no gradient at a layer's inputs, which a frozen
embedding does not have. The second computation draws the same masks (`same_again`; torch restores its own generator).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from secure_fed.errors import ConfigError
from secure_fed.learning.models.architecture import of_text
from secure_fed.learning.models.devices import is_offloaded


class OwnDropout(TorchFunctionMode):
    """The dropout of layers, and of attention, from `seed` alone."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self._generator = torch.Generator(device).manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.dropout:
            return self._dropout(*args, **(kwargs or {}))
        if func is functional.scaled_dot_product_attention and (kwargs or {}).get("dropout_p", 0.0) > 0:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def repeated(self, state: Tensor) -> Iterator[None]:
        """Within the block, the masks that were drawn after the generator had this state."""
        now = self.state
        self._generator.set_state(state)
        try:
            yield
        finally:
            self._generator.set_state(now)

    @property
    def state(self) -> Tensor:
        return self._generator.get_state()

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        kept = torch.empty_like(x).bernoulli_(1 - p, generator=self._generator)
        factor = kept.div_(1 - p) if p < 1 else kept
        return x.mul_(factor) if inplace else x * factor

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """softmax(Q K^T s + mask) V with weights dropped."""
        if enable_gqa:
            key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
        scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value


def same_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for the two computations of a layer under checkpointing: the second has the same modes and the same masks.

    No mode is active within a backward pass, which is where the second is made.
    """
    modes = [
        (mode, mode.state if isinstance(mode, OwnDropout) else None) for mode in _get_current_function_mode_stack()
    ]
    return nullcontext(), _again(modes)


@contextmanager
def _again(modes: Sequence[tuple[TorchFunctionMode, Tensor | None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode, state in modes:
            if isinstance(mode, OwnDropout) and state is not None:
                stack.enter_context(mode.repeated(state))
            stack.enter_context(mode)
        yield


def again(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """layer(*args, **kwargs), computed again in the backward pass, with the context variables that it has now."""
    now = copy_context()

    def within(*own: Any, **named: Any) -> Any:
        return now.copy().run(layer, *own, **named)

    return checkpoint(within, *args, use_reentrant=False, context_fn=same_again, **kwargs)


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
