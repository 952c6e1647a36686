"""The inputs of a model's first adapted layers, and all candidates for them.

The first layers read the same tensor before any context enters it (query, key and value of the first block). Their inputs
depend only on a token, its position and its type. Token embeddings and the norms in front of these layers are frozen and
public, so anybody can compute the input of every candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secure_fed.learning.models.adapters.lora import Pair, pairs

ANYWHERE = -1  # the position of a token in models whose first inputs do not depend on it
_FEWEST = 3  # tokens in a vocabulary
_AT_ONCE = 1 << 24  # numbers of inputs computed at once


@dataclass(frozen=True)
class FirstLayer:
    """The adapted modules that all read the model's first inputs, in the order of their names.

    positions: the number of candidate positions; 1 if inputs do not depend on the position. types: the candidate token types;
    empty if the model has none.
    """

    model: nn.Module
    pairs: tuple[Pair, ...]
    vocabulary: int
    positions: int
    placed: bool
    types: tuple[int, ...]

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All candidates, in blocks: keys (N, 2) of position and token, and inputs (N, n) of the first layers.

        The same token with another type is another candidate with the same key.
        """
        width = self.inputs(torch.zeros(1, 1, dtype=torch.long)).shape[-1]
        step = max(1, _AT_ONCE // (self.positions * width))
        places = torch.arange(self.positions) if self.placed else torch.tensor([ANYWHERE])
        for start in range(0, self.vocabulary, step):
            tokens = torch.arange(start, min(start + step, self.vocabulary))
            ids = tokens[:, None].expand(-1, self.positions)
            keys = torch.stack([places.expand(ids.shape), ids], -1).reshape(-1, 2)
            for kind in self.types or (None,):
                yield keys, self.inputs(ids, kind).reshape(-1, width)

    def inputs(self, ids: Tensor, kind: int | None = None) -> Tensor:
        """(texts, tokens, n) the first layers' inputs for these token ids (texts, tokens), all of one type."""
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if kind is not None:
            given["token_type_ids"] = torch.full_like(ids, kind)
        return first_reads(self.model, given, [self.pairs[0].module])[self.pairs[0].module]

    def key(self, position: int, token: int) -> tuple[int, int]:
        """The key of this token as a candidate at this position."""
        return (position if self.placed else ANYWHERE, token)


class NoFirstLayerError(Exception):
    """No adapted layer has inputs that depend only on a token and its position; the message says why."""


def first_layer(model: nn.Module, names: Sequence[str], longest: int, types: Sequence[int] = ()) -> FirstLayer:
    """The first adapted layers of `model`, among LoRA's tensors of these names, or NoFirstLayerError.

    longest: the number of candidate positions. types: token types that occur in public data.
    """
    found = pairs(names)
    if not found:
        raise NoFirstLayerError("the method puts no factors A and B beside the model's first layers")
    vocabulary = _vocabulary(model)
    low, high = min(5, vocabulary - 2), vocabulary - 1
    texts = torch.tensor([[low, high, low, low], [high, high, high, low]])
    reads = _tried(model, texts, [pair.module for pair in found])
    first = next(iter(reads.values()))
    if not torch.allclose(first[0, 1], first[1, 1], rtol=0, atol=1e-5):
        raise NoFirstLayerError(
            f"layer {next(iter(reads))}, the first with an adapter, reads what earlier layers made of the whole text"
        )
    same = tuple(
        pair
        for pair in found
        if pair.module in reads and reads[pair.module].shape == first.shape and torch.equal(reads[pair.module], first)
    )
    placed = not torch.allclose(first[0, 0], first[0, 2], rtol=0, atol=1e-6)
    return FirstLayer(model, same, vocabulary, longest if placed else 1, placed, tuple(types))


def _tried(model: nn.Module, texts: Tensor, modules: Sequence[str]) -> dict[str, Tensor]:
    """The inputs of the first of these modules, a vector per token, or NoFirstLayerError. The model may be user-defined."""
    name = type(model).__name__
    try:
        reads = first_reads(model, {"input_ids": texts, "attention_mask": torch.ones_like(texts)}, modules)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        raise NoFirstLayerError(f"{name} does not run on input_ids and attention_mask alone ({error})") from error
    if not reads:
        raise NoFirstLayerError(f"{name} calls none of its layers with an adapter on a text")
    module, first = next(iter(reads.items()))
    if first.ndim != 3 or first.shape[:2] != texts.shape:
        raise NoFirstLayerError(f"layer {module}, the first with an adapter, does not read one vector a token")
    return reads


@torch.no_grad()
def first_reads(model: nn.Module, given: Mapping[str, Tensor], modules: Sequence[str]) -> dict[str, Tensor]:
    """The input of each of these modules in a forward pass, in the order of their calls; stops at the first module whose input
    differs from the first's.
    """
    reads: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else next(iter(kwargs.values()))
            first = next(iter(reads.values()), value)
            if name in reads or value.shape != first.shape or not torch.equal(value, first):
                raise _EnoughError
            reads[name] = value.detach().float()
            if len(reads) == len(modules):
                raise _EnoughError

        return read

    training, device = model.training, next(model.parameters()).device
    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name), with_kwargs=True) for name in modules]
    model.eval()
    try:
        with suppress(_EnoughError):
            model(**{name: value.to(device) for name, value in given.items()})
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    return {name: value.cpu() for name, value in reads.items()}


class _EnoughError(Exception):
    """The first layers have read; the rest of the model need not run."""


def _vocabulary(model: nn.Module) -> int:
    ask = getattr(model, "get_input_embeddings", None)
    try:
        embeddings = ask() if ask is not None else None
    except (NotImplementedError, AttributeError):  # raised by transformers' models that read no tokens
        embeddings = None
    if not isinstance(embeddings, nn.Embedding):
        raise NoFirstLayerError(f"{type(model).__name__} does not say which of its layers embeds tokens")
    if embeddings.num_embeddings < _FEWEST:
        raise NoFirstLayerError(f"a vocabulary of {embeddings.num_embeddings} tokens leaves nothing to find")
    return embeddings.num_embeddings
