"""A causal language model's predictions of labelled tokens, without the scores of all tokens in memory.

B texts of L tokens under a vocabulary of V have B L V scores: 3 GiB in float32 for 64 texts of 256 tokens and V = 49,152, and
cross-entropy copies them. Here the base model computes its hidden states h (B, L, n), and the layers after it, the head, are
applied to chunks of at most `MOST` scores, of which one number a token is kept. In training,

    a frozen head         computes a chunk's losses l_t and dl_t/dh_t, n numbers a token, at once, and nothing twice: a token's
                          loss depends on the state of no other token
    a head that trains    computes each chunk again in the backward pass

The head is the model's own `forward`, around a base model whose output is given, so that scores are scaled and capped as ever
(Granite, Cohere, Gemma 2). Whether this gives the scores of the plain call is compared once for every model. If it does not (a
module of another form, PEFT's virtual tokens), or if hooks read its output, the model is called as it is, and its scores
are read in chunks. So are the few scores of short texts under a small vocabulary.

Positions that share a product:

    by default                all positions of the batch, cut along L: shapes depend on B, L and V alone. Of a batch of one row,
                              its labelled positions. So no label moves the rounding of another row, as a guarantee needs.
    within `rows_together`    the labelled positions of all rows, which is less work, for passes that protect nobody
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from secure_fed.learning.data.encode import IGNORED
from secure_fed.learning.tasks.task import inputs_of, logits

# float32 scores (N, V) and targets (N,), some of them `IGNORED` -> numbers of each token, (N,) each
Read = Callable[[Tensor, Tensor], Sequence[Tensor]]

_TOGETHER: ContextVar[bool] = ContextVar("rows_together", default=False)
_DEVICE: ContextVar[str] = ContextVar("shaped_for", default="cpu")


@contextmanager
def rows_together() -> Iterator[None]:
    """Within the block, in this thread, positions of several rows share a product: for passes that protect no row."""
    before = _TOGETHER.set(True)
    try:
        yield
    finally:
        _TOGETHER.reset(before)


@contextmanager
def shaped_for(device: torch.device) -> Iterator[None]:
    """Within the block, tensors of the meta device are cut into chunks as if they were on this device."""
    before = _DEVICE.set(device.type)
    try:
        yield
    finally:
        _DEVICE.reset(before)


def token_losses(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(B, L - 1) negative log-likelihoods of the labelled tokens, 0 elsewhere, and a mask of these tokens.

    A token is predicted from the tokens before it, so the first token of a text has no prediction.
    """
    (losses,), counted = token_figures(model, batch, lambda scores, targets: [surprise(scores, targets)])
    return losses, counted


def surprise(scores: Tensor, targets: Tensor) -> Tensor:
    """(N,) negative log-likelihoods of the targets; 0 for `IGNORED`."""
    found: Tensor = _Surprise.apply(scores, targets)  # type: ignore[no-untyped-call]
    return found


def token_figures(model: nn.Module, batch: Mapping[str, Any], read: Read) -> tuple[Sequence[Tensor], Tensor]:
    """The numbers that `read` gives for each labelled token, (B, L - 1) each, and a mask of these tokens.

    The first of these numbers is differentiable. Those of other tokens are 0, or what `read` makes of `IGNORED`.
    """
    targets = batch["labels"][:, 1:]
    counted = targets != IGNORED
    parts = _Parts.of(model, batch)
    if parts is None:
        return _chunked(None, logits(model, batch)[:, :-1], targets, read), counted
    states = parts.states(inputs_of(batch))[:, :-1]
    if parts.own_rows or not (_TOGETHER.get() or len(targets) == 1):
        return _chunked(parts, states, targets, read), counted
    places = counted.flatten().nonzero()[:, 0]
    picked, of_picked = (part.flatten(0, 1).index_select(0, places).unsqueeze(0) for part in (states, targets))
    found = _chunked(parts, picked, of_picked, read)
    blank = torch.zeros_like(targets, dtype=torch.float32).flatten()
    return [blank.to(own.dtype).index_copy(0, places, own[0]).view(targets.shape) for own in found], counted


def last_scores(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(B, V) float32 scores of the token after each text; `attention_mask` is 1 for the tokens of a text, 0 behind it."""
    ends = batch["attention_mask"].sum(1) - 1
    rows = torch.arange(len(ends), device=ends.device)
    if (parts := _Parts.of(model, batch)) is None:
        return logits(model, batch)[rows, ends]
    return parts.scores(parts.states(inputs_of(batch))[rows, ends].unsqueeze(1))[:, 0]


@dataclass(frozen=True)
class _Parts:
    """A causal model as its base model, the child of this name, and its head, everything outside the base model.

    model: transformers' model, without PEFT's wrapper. vocabulary: V. tensors: the head's parameters in place of the model's
    own, for a time when the model has others.
    """

    model: nn.Module
    base: str
    vocabulary: int = 0
    tensors: Mapping[str, Tensor] | None = None

    @classmethod
    def of(cls, model: nn.Module, batch: Mapping[str, Any]) -> _Parts | None:
        """None if the model has to be called as it is, or if that saves nothing."""
        causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        base = getattr(causal, "base_model_prefix", "")
        rows, length = batch["input_ids"].shape
        if base not in causal._modules or length < 2 or model._forward_hooks or causal._forward_hooks:
            return None
        if model not in _VOCABULARIES:
            _VOCABULARIES[model] = _compared(cls(causal, base), model, batch)
        scores = length * _VOCABULARIES[model]
        if scores <= FEW and rows * scores <= _most(batch["input_ids"]):
            return None
        return cls(causal, base, _VOCABULARIES[model])

    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """(B, L, n) hidden states. Keys and values are not kept, because no later call reads them."""
        output: Any = self.model.get_submodule(self.base)(**inputs, use_cache=False)
        states: Tensor = output[0]
        return states

    def scores(self, states: Tensor) -> Tensor:
        """(R, N, V) float32 scores from hidden states (R, N, n)."""
        blank = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
        output: Any = functional_call(self._around(_Given(states)), dict(self.tensors or {}), (), {"input_ids": blank})
        scores: Tensor = output.logits
        return scores.float()

    def head(self) -> nn.Module:
        """The model without its base model, with the same layers and parameters."""
        return self._around(_Given())

    def _around(self, base: nn.Module) -> nn.Module:
        """A second object with everything of the model, and another base model; the model itself is not changed."""
        made: nn.Module = object.__new__(type(self.model))
        made.__dict__ = vars(self.model) | {"_modules": self.model._modules | {self.base: base}}
        return made

    @property
    def own_rows(self) -> bool:
        """Whether the head has a tensor of which every example has its own (`EachOwn`)."""
        return any(hasattr(tensor, "rows") for tensor in self.head().parameters())

    @property
    def trains(self) -> bool:
        return any(getattr(tensor, "rows", tensor).requires_grad for tensor in self.head().parameters())

    @property
    def repeats(self) -> bool:
        """Whether a second call of the head gives the same scores, and is nobody's concern: without dropout or hooks."""
        return not any(
            isinstance(layer, nn.Dropout) or layer._forward_hooks or layer._forward_pre_hooks
            for layer in self.head().modules()
        )


class _Given(nn.Module):
    """In the place of a base model: its output is given, and everything else that it could return is None."""

    def __init__(self, states: Tensor | None = None) -> None:
        super().__init__()
        self.states = states

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output((self.states,))


class _Output(tuple[Any, ...]):
    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


def _compared(parts: _Parts, model: nn.Module, batch: Mapping[str, Any]) -> int:
    """V if base model and head give the scores of the whole model, 0 if not.

    Compared on nobody's tokens, a few in each of as many rows as the batch has, in evaluation mode.
    """
    inputs = {name: torch.zeros_like(part[:, :_COMPARED]) for name, part in inputs_of(batch).items()}
    inputs["input_ids"][:, 1::2] = 1
    if "attention_mask" in inputs:
        inputs["attention_mask"][:, :-1] = 1
    device = inputs["input_ids"].device
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            model.eval()
            whole, states = logits(model, inputs), parts.states(inputs)
            found = parts.scores(states)
    except Exception:  # of any kind: the model is not of this form, and its plain call tells whether it works at all
        return 0
    finally:
        for module, mode in modes:
            module.training = mode
    if whole.shape != found.shape or not whole.isfinite().all():
        return 0
    rounding = 8 * torch.finfo(states.dtype).eps * float(whole.abs().max())
    return whole.shape[-1] if float((whole - found).abs().max()) <= rounding else 0


def _chunked(parts: _Parts | None, states: Tensor, targets: Tensor, read: Read) -> Sequence[Tensor]:
    """The numbers of every token, (R, N) each, from states (R, N, n) and targets (R, N). parts: None if states are scores."""
    rows, count = targets.shape
    most = max(1, _most(states) // (rows * (parts.vocabulary if parts else states.shape[-1])))
    width = -(-count // -(-count // most)) if count else 1  # pieces of like size
    trains = torch.is_grad_enabled() and (parts is None or parts.trains)
    again = trains and width < count and (parts is None or parts.repeats)
    if again and parts is not None:
        parts = replace(parts, tensors=dict(parts.head().named_parameters()))

    def numbers(some: Tensor, of_some: Tensor) -> list[Tensor]:
        scores = parts.scores(some) if parts else some
        return [own.view(of_some.shape) for own in read(scores.flatten(0, 1), of_some.flatten())]

    if torch.is_grad_enabled() and states.requires_grad and not trains:
        found: Sequence[Tensor] = _AtOnce.apply(states, targets, numbers, width)  # type: ignore[no-untyped-call]
        return found
    each = partial(checkpoint, numbers, use_reentrant=False) if again else numbers
    return _joined(map(each, states.split(width, 1), targets.split(width, 1)))


def _joined(pieces: Iterable[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(own, 1) for own in zip(*pieces, strict=True))


class _AtOnce(torch.autograd.Function):
    """The numbers of every token, with the derivatives of the first already computed: dl_t/dh_t for every token t."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, targets: Tensor, numbers: Any, width: int) -> tuple[Tensor, ...]:
        found, slopes = [], []
        for some, of_some in zip(states.split(width, 1), targets.split(width, 1), strict=True):
            with torch.enable_grad():
                leaf = some.detach().requires_grad_()
                own = numbers(leaf, of_some)
                slopes += torch.autograd.grad(own[0].sum(), leaf)
            found.append([one.detach() for one in own])
        ctx.save_for_backward(torch.cat(slopes, 1))
        return _joined(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, along: Tensor, *others: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return (along.unsqueeze(-1) * slopes).to(slopes.dtype), None, None, None


class _Surprise(torch.autograd.Function):
    """log sum_v exp s_v - s_target, with one copy of the scores in either direction.

    In float32 on a processor, torch's cross-entropy of 49,152 scores loses two or three digits, because it adds one score after
    the other; `logsumexp` adds in pairs.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor) -> Tensor:
        ignored = targets == IGNORED
        total, places = scores.logsumexp(1), targets.masked_fill(ignored, 0).unsqueeze(1)
        ctx.save_for_backward(scores, total, places, ignored)
        return (total - scores.gather(1, places)[:, 0]).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor, None]:
        scores, total, places, ignored = ctx.saved_tensors
        along = along.masked_fill(ignored, 0).unsqueeze(1)
        slopes = (scores - total.unsqueeze(1)).exp_().mul_(along)
        return slopes.scatter_add_(1, places, -along), None


def _most(tensor: Tensor) -> int:
    """The most scores in a chunk: 128 MiB in float32, and on an accelerator, where small products are slow, 512 MiB."""
    kind = _DEVICE.get() if tensor.is_meta else tensor.device.type
    return MOST if kind == "cpu" else 4 * MOST


MOST = 2**25
FEW = 2**17  # scores of a text, up to which nothing is saved
_COMPARED = 4  # tokens
# V of models that can be taken apart, 0 of others
_VOCABULARIES: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
