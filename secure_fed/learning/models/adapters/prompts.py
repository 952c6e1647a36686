"""Virtual tokens in front of the text, whose embeddings are learned: p vectors stored directly, or made by a small network.

A text x of L tokens is read as [P ; E(x)] with P (p, H) and E the model's own token embeddings. P is

    stored         p H numbers (Lester et al., 2021), which start as the embeddings of p tokens drawn from the vocabulary;
    made           MLP(Q) with Q (p, H) and three linear layers with ReLU between them, or an LSTM and two linear
                   layers (Liu et al., P-tuning, 2021).

The modules are PEFT's (`PromptEmbedding`, `PromptEncoder`), called with the numbers 0 .. p - 1 for every example, so that each
layer has a dimension of examples and per-example gradients are computed in one pass.

Virtual tokens take the first p positions. After the base model all outputs are as long as the text again, with one exception:
an encoder's sequence classifier pools the first token, and as in PEFT this is the first virtual token. A decoder's classifier
pools the last token of the text. This differs from PEFT, which passes only embeddings to the classifier, so that it pools the
batch's last position for every text, padding or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import PromptEmbedding, PromptEncoder, PromptEncoderConfig, PromptTuningConfig
from torch import Tensor, nn

from secure_fed.learning.models.adapters import virtual_tokens as virtual
from secure_fed.learning.models.adapters.virtual_tokens import Inputs, Room
from secure_fed.learning.models.device_map import place_of, present

_PROMPT = "prompt"


@dataclass(frozen=True)
class _VirtualTokens(ABC):
    """`length` virtual tokens before texts of up to `max_length` tokens."""

    length: int = 20
    max_length: int = 0

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        """Put them into `model` in place; returns the names of their parameters."""
        base = virtual.base_of(model, "a prompt")
        room = Room.of(base, self.length, self.max_length)
        names = virtual.install(model, base, _PROMPT, lambda: self.made(virtual.embeddings_of(base)), head, seed)
        base.register_forward_pre_hook(_Prepended(room), with_kwargs=True)
        if not _pools_the_first(model):
            base.register_forward_hook(_Stripped(self.length))
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


def _pools_the_first(model: nn.Module) -> bool:
    """Whether the head reads only the first token of the base model's output: a sequence classifier on an encoder.

    A decoder's head is called `score`, and finds its token in the ids of the text.
    """
    of_sequences = type(model).__name__.endswith("ForSequenceClassification") and hasattr(model, "classifier")
    return of_sequences and getattr(model.config, "classifier_pooling", "cls") == "cls"


@dataclass(frozen=True)
class _Prepended:
    """A forward pre-hook: input_ids (B, L) become inputs_embeds (B, p + L, H)."""

    room: Room

    def __call__(self, base: nn.Module, args: tuple[Any, ...], kwargs: Inputs) -> tuple[tuple[()], Inputs]:
        named, length = virtual.by_name(base, args, kwargs), self.room.length
        text: Tensor | None = named.get("inputs_embeds")
        if text is None:
            text = virtual.embeddings_of(base)(named.pop("input_ids"))
        self.room.require(text.shape[1], f"a text of {text.shape[1]} tokens", "cut texts to at most")
        prompt: Tensor = base.get_submodule(_PROMPT)(virtual.numbered(length, text))
        named |= {"input_ids": None, "inputs_embeds": torch.cat([prompt.to(text.dtype), text], 1)}
        if named.get("attention_mask") is not None:
            named["attention_mask"] = virtual.masked(named["attention_mask"], length)
        if named.get("token_type_ids") is not None:
            types: Tensor = named["token_type_ids"]
            named["token_type_ids"] = torch.cat([types.new_zeros(len(types), length), types], 1)
        if named.get("position_ids") is not None:
            places: Tensor = named["position_ids"]
            named["position_ids"] = torch.cat([places[:, :1] + virtual.numbered(length, places), places + length], 1)
        return (), named


@dataclass(frozen=True)
class _Stripped:
    """A forward hook that removes the base model's outputs for virtual tokens, (B, p + L, H) -> (B, L, H)."""

    length: int

    def __call__(self, base: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0][:, self.length :], *output[1:])
        output.last_hidden_state = output.last_hidden_state[:, self.length :]
        if output.get("hidden_states") is not None:
            output.hidden_states = tuple(layer[:, self.length :] for layer in output.hidden_states)
        return output
