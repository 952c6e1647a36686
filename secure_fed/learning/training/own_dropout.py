"""Dropout that draws from a generator of its own.

torch's dropout draws from one generator of the process. Passes that are computed at the same time would use its numbers in an
order that cannot be repeated, so within `OwnDropout` each pass draws its masks from its own generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


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

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        kept = torch.empty_like(x).bernoulli_(1 - p, generator=self._generator)
        return x * kept.div_(1 - p) if p < 1 else x * 0.0

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
