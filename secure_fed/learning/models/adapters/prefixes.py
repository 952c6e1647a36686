"""Learned keys and values in front of the text's, in the attention of every layer (prefix tuning; P-tuning v2).

Layer l attends to [K_l ; W_K x] and [V_l ; W_V x], with K_l and V_l (p, H) learned for every layer. They are one row of
2 layers H numbers for each virtual token, stored directly in PEFT's `PrefixEncoder`, or computed by two linear layers with tanh
between them (`projected`). H is the width of the layer's keys, less than the model's where heads share them (LLaMA 2 70B).

The model gets them as a cache of earlier tokens, as in PEFT; a model without a cache (DeBERTa, DistilBERT) is refused. The text
keeps its length everywhere, and its positions count from p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft import PrefixEncoder, PrefixTuningConfig
from torch import Tensor, nn
from transformers import DynamicCache

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters import virtual_tokens as virtual
from secure_fed.learning.models.adapters.virtual_tokens import Inputs, Room

_PREFIX = "prefix"


class Keys(NamedTuple):
    """The shape of a transformer's keys: the number of layers, the number of key heads, and the width of a head."""

    layers: int
    heads: int
    head_dim: int

    @classmethod
    def of(cls, base: nn.Module) -> Keys:
        config: Any = base.config
        heads = int(config.num_attention_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, head_dim)

    @property
    def width(self) -> int:
        """H."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Prefix:
    """`length` learned keys and values a layer, before texts of up to `max_length` tokens."""

    length: int = 20
    max_length: int = 0
    projected: bool = False

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        """Put them into `model` in place; returns the names of their parameters."""
        base = virtual.base_of(model, "a prefix")
        if not virtual.takes(base, "past_key_values"):
            raise MethodError(
                f"prefix tuning gives every layer keys and values of tokens before the text, and {type(base).__name__} takes "
                "none (no past_key_values): choose method.name prompt_tuning or p_tuning"
            )
        room, keys = Room.of(base, self.length, self.max_length), Keys.of(base)
        names = virtual.install(model, base, _PREFIX, lambda: self._made(keys), head, seed)
        base.register_forward_pre_hook(_Prefixed(room, keys), with_kwargs=True)
        for layer in base.modules():  # else checkpointing would drop the cache, which may be written to once
            if hasattr(layer, "gradient_checkpointing"):
                layer._can_checkpoint_with_cache = True  # type: ignore[assignment]
        return names

    def _made(self, keys: Keys) -> nn.Module:
        config = PrefixTuningConfig(
            num_virtual_tokens=self.length,
            token_dim=keys.width,
            num_layers=keys.layers,
            encoder_hidden_size=keys.width,
            prefix_projection=self.projected,
        )
        return PrefixEncoder(config)


@dataclass(frozen=True)
class _Prefixed:
    """A forward pre-hook: a fresh cache holds p keys and values a layer, for every example."""

    room: Room
    keys: Keys

    def __call__(self, base: nn.Module, args: tuple[Any, ...], kwargs: Inputs) -> tuple[tuple[()], Inputs]:
        named, length = virtual.by_name(base, args, kwargs), self.room.length
        text: Tensor = named["input_ids" if named.get("input_ids") is not None else "inputs_embeds"]
        self.room.require(text.shape[1], f"a text of {text.shape[1]} tokens", "cut texts to at most")
        rows: Tensor = base.get_submodule(_PREFIX)(virtual.numbered(length, text))  # (B, p, 2 layers H)
        named["past_key_values"] = _cache(rows.to(virtual.embeddings_of(base).get_parameter("weight").dtype), self.keys)
        if named.get("attention_mask") is not None:
            named["attention_mask"] = virtual.masked(named["attention_mask"], length)
        if named.get("position_ids") is not None:
            named["position_ids"] = named["position_ids"] + length
        return (), named


class _Fixed(DynamicCache):
    """A cache of earlier tokens that keeps no others, so that a layer can be computed twice (checkpointing)."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        earlier: Any = self.layers[layer_idx]
        return torch.cat([earlier.keys, key_states], -2), torch.cat([earlier.values, value_states], -2)


def _cache(rows: Tensor, keys: Keys) -> DynamicCache:
    """The K and V of every layer, (B, heads, p, head_dim) each; a row has K and V of the first layer, then of the next."""
    parts = rows.unflatten(2, (2 * keys.layers, keys.heads, keys.head_dim)).permute(2, 0, 3, 1, 4)
    return _Fixed([(parts[2 * layer], parts[2 * layer + 1]) for layer in range(keys.layers)])
