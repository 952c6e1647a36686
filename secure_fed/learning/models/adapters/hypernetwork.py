"""Adapters that one small network makes for all places of a model, from features of a client's data.

With d the model's width, t the size of an embedding, r the bottleneck and s the rank of the network's factors:

    I = W_L p + b_L + W_F f + b_F + e_l                   (t,)     p: shares of the classes, f: the texts, e_l: the layer
    W = F_U S_U / ||F_U S_U||_F                           (d, r t), read as (d, r, t)
    U = W I,  D = U^T                                     (d, r), (r, d)
    y -> y + U GELU(D y)

f is computed from the adapted y itself: the mean over an example's tokens, scaled to length 1. Every example has its own f,
hence an adapter of its own. With `of_batch`, training uses the largest f of a batch, coordinate by coordinate; evaluation never
does, so that no prediction depends on other examples of the batch. Padding is left out in both. In a model that generates text
f is left out: a mean over all tokens would reveal the tokens to be predicted.

The network is one child of the model. The places refer to it outside torch's registry of children, so that its parameters have
one name. `copy.deepcopy` keeps these references, and tensors from `torch.func.functional_call` reach the places.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.inserted import Place, attach, places
from secure_fed.learning.models.adapters.parameters import train_only
from secure_fed.learning.models.adapters.per_example import rows_of
from secure_fed.learning.models.devices import place_of

NAME = "hypernetwork"
SHARES = f"{NAME}.class_shares"  # p, which may be a client's own
# Of a model's pass: its attention mask, and the norm that all places need. A layer that gradient checkpointing computes again
# in the backward pass finds those of its own pass here.
_OF_PASS: ContextVar[tuple[Tensor | None, Tensor | None]] = ContextVar("of_pass", default=(None, None))


class Hypernetwork(nn.Module):
    """Makes adapters.

    Its Gaussian draws have standard deviation 1 in W_L, W_F and e, whose inputs have length 1 at most (f is longer with
    `of_batch`), and 1 / sqrt(s) in the factors, whose size is normalised away. Class shares start uniform and do not train.
    """

    def __init__(
        self, width: int, classes: int, layers: int, settings: Hypernetworks, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.bottleneck, self.context, self.of_batch = settings.bottleneck, True, settings.of_batch
        t, r, s = settings.context_dim, settings.bottleneck, settings.hyper_dim

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, device="cpu"))

        self.label_weight, self.label_bias = drawn(t, classes), _constant(0.0, t)
        self.context_weight, self.context_bias = drawn(t, width), _constant(0.0, t)
        self.layer = drawn(layers, t)
        self.left, self.right = drawn(width, s), drawn(s, r * t)
        for factor in (self.left, self.right):
            factor.data /= s**0.5
        self.class_shares = _constant(1 / classes, classes)

    def embedding(self, y: Tensor, layer: int) -> Tensor:
        """I of one layer's adapter: (B, t), one for each example; (1, t), shared by all, without context, and in training with
        `of_batch`. y: (B, T, d).
        """
        by_shares = torch.einsum("btc,bc->bt", rows_of(self.label_weight), rows_of(self.class_shares))
        fixed = by_shares + rows_of(self.label_bias) + rows_of(self.context_bias) + rows_of(self.layer)[:, layer]
        if not self.context:
            return fixed
        texts = self._texts(y)
        pooled = texts.amax(0, keepdim=True) if self.training and self.of_batch else texts
        return fixed + torch.einsum("btd,bd->bt", rows_of(self.context_weight), pooled)

    def up(self, embedding: Tensor) -> Tensor:
        """U (B, d, r) from I (B, t). F_U is multiplied last, so that no example needs its own W, t times as large as U."""
        factors = rows_of(self.right).unflatten(2, (self.bottleneck, -1))  # (B or 1, s, r, t)
        narrow = torch.einsum("bsrt,bt->bsr", factors, embedding)
        _, norm = _OF_PASS.get()
        return torch.einsum("bds,bsr->bdr", rows_of(self.left), narrow) / (self.length() if norm is None else norm)

    def length(self) -> Tensor:
        """||F_U S_U||_F, the root of sum((F_U^T F_U) * (S_U S_U^T)): (B or 1, 1, 1)."""
        left, right = rows_of(self.left), rows_of(self.right)
        return ((left.mT @ left) * (right @ right.mT)).sum((1, 2), keepdim=True).sqrt()

    def _texts(self, y: Tensor) -> Tensor:
        """(B, d): the mean over the tokens of every example, scaled to length 1."""
        mask, _ = _OF_PASS.get()
        if mask is None:
            return functional.normalize(y.mean(1), dim=-1)
        weight = mask[:, -y.shape[1] :].to(y.dtype).unsqueeze(-1)
        return functional.normalize((y * weight).sum(1), dim=-1)  # the number of tokens cancels


class MadeAdapter(nn.Module):
    """An adapter without parameters: the network computes it in every forward pass."""

    def __init__(self, network: Hypernetwork, layer: int) -> None:
        super().__init__()
        self._network = (network,)  # in a tuple, where torch does not look for children
        self._layer = layer

    def forward(self, y: Tensor) -> Tensor:
        (network,) = self._network
        wide = y.to(network.left.dtype)
        up = network.up(network.embedding(wide, self._layer))
        change = functional.gelu(wide @ up) @ up.mT
        return y + change.to(y.dtype)


@dataclass(frozen=True)
class Hypernetworks:
    """An adapter after every attention and feed-forward block, all of them made by one network."""

    context_dim: int = 8
    bottleneck: int = 16
    hyper_dim: int = 64
    of_batch: bool = False

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        """Put the network into `model` in place and return its parameters' names, of which the class shares do not train.

        Drawn on the CPU from `seed` alone. The adapters' changes start small, but not at zero: with D = U^T a zero U would have
        no gradient.
        """
        found = places(model)
        width = _width(model, found)
        layers = max(place.layer for place in found) + 1
        generator = torch.Generator("cpu").manual_seed(seed)
        network = Hypernetwork(width, classes(model), layers, self, generator)
        for place in found:
            attach(model, place.module, "made_adapter", MadeAdapter(network, place.layer))
        network.context = not getattr(model, "can_generate", bool)()
        network.to(place_of(model.get_submodule(found[0].module)))
        model.register_module(NAME, network.train(model.training))
        model.register_forward_pre_hook(_masked, with_kwargs=True)
        model.register_forward_hook(_unmasked, always_call=True)
        names = [f"{NAME}.{name}" for name, _ in network.named_parameters()]
        train_only(model, (name for name in dict.fromkeys([*names, *head]) if name != SHARES))
        return names


def classes(model: nn.Module) -> int:
    """The number of classes in the model's configuration."""
    count: int = getattr(getattr(model, "config", None), "num_labels", 1)
    return max(1, count)


def shares(labels: Collection[Any], count: int) -> Tensor:
    """(count,) the share of each class among these labels; uniform without labels, or if any is no class number."""
    numbers = [label.item() if isinstance(label, Tensor) and label.ndim == 0 else label for label in labels]
    known = [int(label) for label in numbers if isinstance(label, int | np.integer) and 0 <= label < count]
    if not known or len(known) < len(labels):
        return torch.full((count,), 1 / count)
    return torch.bincount(torch.tensor(known), minlength=count).float() / len(known)


def _masked(model: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """A forward pre-hook of the model: gives the network the attention mask, and makes it compute its norm once."""
    named = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **given}
    mask = named.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise MethodError(
            "c2a averages over the tokens that count, and needs an attention_mask of shape (batch, tokens): give one"
        )
    _OF_PASS.set((mask, cast(Hypernetwork, model.get_submodule(NAME)).length()))


def _unmasked(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    _OF_PASS.set((None, None))


def _width(model: nn.Module, found: Sequence[Place]) -> int:
    widths = {place.width for place in found}
    if len(widths) > 1:
        raise MethodError(
            f"the blocks of {type(model).__name__} are {' and '.join(map(str, sorted(widths)))} wide, and a hypernetwork makes "
            "adapters of one width: choose another method"
        )
    return widths.pop()


def _constant(value: float, count: int) -> nn.Parameter:
    return nn.Parameter(torch.full((count,), value, device="cpu"))
