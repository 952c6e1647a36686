"""Virtual tokens in front of a text: learned embeddings (a prompt), or learned keys and values of every layer (a prefix).

The modules are PEFT's own, as children of the base model, which keeps the names of its parameters. Hooks on the base model add
the virtual tokens and remove them again. Hooks have no tensors and find their module by its name, so that a copy of the model
calls the copied module. The modules are called with the numbers 0 .. p - 1 of the virtual tokens for every example, so that
each layer has a dimension of examples and per-example gradients are computed in one pass.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from peft import (
    PrefixEncoder,
    PrefixTuningConfig,
    PromptEmbedding,
    PromptEncoder,
    PromptEncoderConfig,
    PromptTuningConfig,
)
from torch import Tensor, nn
from transformers import DynamicCache

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.parameters import train_only
from secure_fed.learning.models.architecture import positions_of
from secure_fed.learning.models.devices import place_of, present

Inputs = dict[str, Any]
_PROMPT = "prompt"
_PREFIX = "prefix"


@dataclass(frozen=True)
class Room:
    """The number of positions of the base model `name` (None for no limit), and the number of virtual tokens (`length`)."""

    name: str
    positions: int | None
    length: int

    @classmethod
    def of(cls, base: nn.Module, length: int, max_length: int) -> Room:
        """Refuses a `length` that leaves no room for texts of `max_length` tokens.

        A model with fewer positions than `max_length` was not loaded from the settings, so they do not limit its texts.
        """
        limit = positions_of(base)
        room = cls(type(base).__name__, limit, length)
        if limit is not None and length >= limit:
            raise MethodError(
                f"method.prompt_length = {length} leaves no room for text: {room.name} has {limit} positions; "
                f"set method.prompt_length below {limit}"
            )
        if limit is not None and max_length <= limit:
            room.require(max_length, f"model.max_length = {max_length}", "set model.max_length to at most")
        return room

    def require(self, tokens: int, text: str, advice: str) -> None:
        """Refuse a text of `tokens` tokens if there are not enough positions."""
        if self.positions is None or tokens + self.length <= self.positions:
            return
        fewer = self.positions - tokens
        shorter = f"set method.prompt_length to at most {fewer}, or " if fewer > 0 else ""
        raise MethodError(
            f"{text} and method.prompt_length = {self.length} need {tokens + self.length} positions, and {self.name} has "
            f"{self.positions}: {shorter}{advice} {self.positions - self.length}"
        )


def positions_left(model: nn.Module) -> int | None:
    """The number of tokens of a text that the model has positions for, behind its virtual tokens; None if there is no limit."""
    rooms = (getattr(hook, "room", None) for module in model.modules() for hook in module._forward_pre_hooks.values())
    taken = sum(room.length for room in rooms if isinstance(room, Room))
    limit = positions_of(model)
    return limit and limit - taken


def base_of(model: nn.Module, method: str) -> nn.Module:
    """The module that takes `inputs_embeds`: the transformer inside a model with a head, or the model itself."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    if not isinstance(base, nn.Module) or not hasattr(base, "config") or not takes(base, "inputs_embeds"):
        raise MethodError(
            f"{type(model).__name__} has no part that takes embedded tokens (inputs_embeds), before which {method} puts "
            "virtual ones: choose a method on LoRA, which takes method.target_modules"
        )
    if getattr(base.config, "is_encoder_decoder", False):
        raise MethodError(
            f"{method} is for models of one stack, and {type(model).__name__} has an encoder and a decoder"
        )
    return base


def takes(base: nn.Module, argument: str) -> bool:
    """Whether the module's forward has an argument of this name."""
    return argument in inspect.signature(base.forward).parameters


def embeddings_of(base: nn.Module) -> nn.Module:
    """The layer that embeds the tokens of the text."""
    layer: nn.Module = base.get_input_embeddings()  # type: ignore[operator]  # of every transformers model
    return layer


def install(
    model: nn.Module, base: nn.Module, name: str, make: Callable[[], nn.Module], head: Sequence[str], seed: int
) -> list[str]:
    """Make the module a child of `base`, train only it and the head, and return the names of its parameters.

    `make` draws from `seed` alone, on the CPU; the process-wide random state is not changed.
    """
    if hasattr(base, name):
        raise MethodError(f"the {type(model).__name__} already has virtual tokens: give a model without any")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        module = make()
    base.register_module(name, module.to(place_of(embeddings_of(base))))
    own = {id(parameter) for parameter in module.parameters()}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in own]
    train_only(model, [*names, *head])
    return names


def numbered(length: int, like: Tensor) -> Tensor:
    """(B, p): the numbers of the virtual tokens, for every example of `like` (B, ...)."""
    return torch.arange(length, device=like.device).expand(len(like), length)


def by_name(room: Room, base: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
    """The arguments of one call, by name, the mask (B, p + L) with unmasked virtual tokens in front.

    A text without room is refused, and one whose beginning is in a cache.
    """
    named = {**dict(zip(inspect.signature(base.forward).parameters, args, strict=False)), **kwargs}
    cache, mask = named.get("past_key_values"), named.get("attention_mask")
    if cache is not None and cache.get_seq_length():
        raise MethodError(
            "virtual tokens are put before whole texts, and this call gives the rest of a text whose beginning is in a cache: "
            "call with use_cache=False"
        )
    text: Tensor = named["input_ids" if named.get("input_ids") is not None else "inputs_embeds"]
    room.require(text.shape[1], f"a text of {text.shape[1]} tokens", "cut texts to at most")
    if mask is not None and mask.ndim != 2:
        raise MethodError(
            f"attention_mask has the shape {tuple(mask.shape)}; virtual tokens need one of (examples, tokens)"
        )
    if mask is not None:
        named["attention_mask"] = torch.cat([mask.new_ones(len(mask), room.length), mask], 1)
    return named


@dataclass(frozen=True)
class _VirtualTokens(ABC):
    """`length` virtual tokens, whose embeddings are learned, before texts of up to `max_length` tokens.

    A text x of L tokens is read as [P ; E(x)] with P (p, H) and E the model's own token embeddings. P is

        stored         p H numbers (Lester et al., 2021), which start as the embeddings of p tokens drawn from the vocabulary;
        made           MLP(Q) with Q (p, H) and three linear layers with ReLU between them, or an LSTM and two linear
                       layers (Liu et al., P-tuning, 2021).

    Virtual tokens take the first p positions. After the base model all outputs are as long as the text again, with one
    exception: an encoder's sequence classifier pools the first token, and as in PEFT this is the first virtual token. A
    decoder's classifier pools the last token of the text. This differs from PEFT, which passes only embeddings to the
    classifier, so that it pools the batch's last position for every text, padding or not.
    """

    length: int = 20
    max_length: int = 0

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        """Put them into `model` in place; returns the names of their parameters."""
        base = base_of(model, "a prompt")
        room = Room.of(base, self.length, self.max_length)
        names = install(model, base, _PROMPT, lambda: self.made(embeddings_of(base)), head, seed)
        base.register_forward_pre_hook(_Prepended(room), with_kwargs=True)
        # A sequence classifier on an encoder reads only the first token of the base model's output. A decoder's head is called
        # `score`, and finds its token in the ids of the text.
        of_sequences = type(model).__name__.endswith("ForSequenceClassification") and hasattr(model, "classifier")
        if not of_sequences or getattr(model.config, "classifier_pooling", "cls") != "cls":
            base.register_forward_hook(partial(_stripped, self.length))
        return names

    @abstractmethod
    def made(self, tokens: nn.Module) -> nn.Module:
        """The module that contains them. tokens: the layer that embeds the text's tokens."""


class PromptTokens(_VirtualTokens):
    """Virtual tokens whose embeddings are parameters."""

    def made(self, tokens: nn.Module) -> nn.Module:
        weight = tokens.get_parameter("weight")
        config = PromptTuningConfig(num_virtual_tokens=self.length, token_dim=weight.shape[1])
        config.num_transformer_submodules = 1
        config.prompt_tuning_init = "RANDOM" if place_of(tokens).type == "meta" else "SAMPLE_VOCAB"
        with present(tokens):  # some of whose rows are drawn
            return PromptEmbedding(config, tokens)


@dataclass(frozen=True)
class EncodedPromptTokens(_VirtualTokens):
    """Virtual tokens whose embeddings a network, as wide as the model, computes from embeddings of its own.

    network: PEFT's default, the MLP, or its LSTM, whose per-example gradients are computed one at a time.
    """

    network: Literal["MLP", "LSTM"] = "MLP"

    def made(self, tokens: nn.Module) -> nn.Module:
        hidden = tokens.get_parameter("weight").shape[1]
        config = PromptEncoderConfig(
            num_virtual_tokens=self.length,
            token_dim=hidden,
            encoder_hidden_size=hidden,
            encoder_reparameterization_type=self.network,
        )
        config.num_transformer_submodules = 1
        return PromptEncoder(config)


@dataclass(frozen=True)
class _Prepended:
    """A forward pre-hook: input_ids (B, L) become inputs_embeds (B, p + L, H)."""

    room: Room

    def __call__(self, base: nn.Module, args: tuple[Any, ...], kwargs: Inputs) -> tuple[tuple[()], Inputs]:
        named, length = by_name(self.room, base, args, kwargs), self.room.length
        text: Tensor | None = named.get("inputs_embeds")
        if text is None:
            text = embeddings_of(base)(named.pop("input_ids"))
        prompt: Tensor = base.get_submodule(_PROMPT)(numbered(length, text))
        named |= {"input_ids": None, "inputs_embeds": torch.cat([prompt.to(text.dtype), text], 1)}
        if named.get("token_type_ids") is not None:
            types: Tensor = named["token_type_ids"]
            named["token_type_ids"] = torch.cat([types.new_zeros(len(types), length), types], 1)
        if named.get("position_ids") is not None:
            places: Tensor = named["position_ids"]
            named["position_ids"] = torch.cat([places[:, :1] + numbered(length, places), places + length], 1)
        return (), named


def _stripped(length: int, base: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """A forward hook that removes the base model's outputs for virtual tokens, (B, p + L, H) -> (B, L, H)."""
    if isinstance(output, tuple):
        return (output[0][:, length:], *output[1:])
    output.last_hidden_state = output.last_hidden_state[:, length:]
    if output.get("hidden_states") is not None:
        output.hidden_states = tuple(layer[:, length:] for layer in output.hidden_states)
    return output


@dataclass(frozen=True)
class Prefix:
    """`length` learned keys and values a layer, before texts of up to `max_length` tokens (prefix tuning; P-tuning v2).

    Layer l attends to [K_l ; W_K x] and [V_l ; W_V x], with K_l and V_l (p, H) learned for every layer. They are one row of
    2 layers H numbers for each virtual token, stored directly in PEFT's `PrefixEncoder`, or computed by two linear layers with
    tanh between them (`projected`). H is the width of the layer's keys, less than the model's where heads share them (LLaMA 2
    70B).

    The model gets them as a cache of earlier tokens, as in PEFT; a model without a cache (DeBERTa, DistilBERT) is refused. The
    text keeps its length everywhere, and its positions count from p.
    """

    length: int = 20
    max_length: int = 0
    projected: bool = False

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        """Put them into `model` in place; returns the names of their parameters."""
        base = base_of(model, "a prefix")
        if not takes(base, "past_key_values"):
            raise MethodError(
                f"prefix tuning gives every layer keys and values of tokens before the text, and {type(base).__name__} takes "
                "none (no past_key_values): choose method.name prompt_tuning or p_tuning"
            )
        room, keys = Room.of(base, self.length, self.max_length), Keys.of(base)
        config = PrefixTuningConfig(
            num_virtual_tokens=self.length,
            token_dim=keys.width,
            num_layers=keys.layers,
            encoder_hidden_size=keys.width,
            prefix_projection=self.projected,
        )
        names = install(model, base, _PREFIX, lambda: PrefixEncoder(config), head, seed)
        base.register_forward_pre_hook(_Prefixed(room, keys), with_kwargs=True)
        for layer in base.modules():  # else checkpointing would drop the cache, which may be written to once
            if hasattr(layer, "gradient_checkpointing"):
                layer._can_checkpoint_with_cache = True  # type: ignore[assignment]
        return names


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
class _Prefixed:
    """A forward pre-hook: a fresh cache holds p keys and values a layer, for every example."""

    room: Room
    keys: Keys

    def __call__(self, base: nn.Module, args: tuple[Any, ...], kwargs: Inputs) -> tuple[tuple[()], Inputs]:
        named, length = by_name(self.room, base, args, kwargs), self.room.length
        text: Tensor = named["input_ids" if named.get("input_ids") is not None else "inputs_embeds"]
        rows: Tensor = base.get_submodule(_PREFIX)(numbered(length, text))  # (B, p, 2 layers H)
        rows = rows.to(embeddings_of(base).get_parameter("weight").dtype)
        # K and V of every layer, (B, heads, p, head_dim) each; a row has K and V of the first layer, then of the next.
        parts = rows.unflatten(2, (2 * self.keys.layers, self.keys.heads, self.keys.head_dim)).permute(2, 0, 3, 1, 4)
        named["past_key_values"] = _Fixed([(parts[2 * k], parts[2 * k + 1]) for k in range(self.keys.layers)])
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
