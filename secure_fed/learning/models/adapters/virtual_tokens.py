"""Virtual tokens in front of a transformer's text: their place, room among the positions, and the mask.

The modules are PEFT's own, as children of the base model, which keeps the names of its parameters. Hooks on the base model add
the virtual tokens and remove them again. Hooks have no tensors and find their module by its name, so that a copy of the model
calls the copied module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.parameters import train_only
from secure_fed.learning.models.architecture import positions_of
from secure_fed.learning.models.device_map import place_of

Inputs = dict[str, Any]


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


def by_name(base: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
    """The arguments of one call, by name; a text whose beginning is in a cache is refused."""
    named = {**dict(zip(inspect.signature(base.forward).parameters, args, strict=False)), **kwargs}
    cache = named.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise MethodError(
            "virtual tokens are put before whole texts, and this call gives the rest of a text whose beginning is in a cache: "
            "call with use_cache=False"
        )
    return named


def masked(mask: Tensor, length: int) -> Tensor:
    """(B, p + L): the mask (B, L) with p unmasked virtual tokens in front."""
    if mask.ndim != 2:
        raise MethodError(
            f"attention_mask has the shape {tuple(mask.shape)}; virtual tokens need one of (examples, tokens)"
        )
    return torch.cat([mask.new_ones(len(mask), length), mask], 1)
