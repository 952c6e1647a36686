"""Dropout that draws from a generator of its own.

torch's dropout draws from one generator of the process. Passes that are computed at the same time would use its numbers in an
order that cannot be repeated, so within `OwnDropout` each pass draws its masks from its own generator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack


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
