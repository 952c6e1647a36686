"""Trials of a model on a few short examples: is each example's loss its own, and do passes leave the model as it is?

Every moving tensor is moved away from zero first, since at the usual start B = 0 the gradient of A vanishes and would prove
nothing. The examples are nobody's: made up, or public. A made-up example has random tokens of the model's vocabulary in the
columns of a task's examples. Only the names of the columns, and the form of a label (one number, one for each token, or
several), are taken from an example of the data. A trial on private examples would make one client's data decide how every
client's gradients are computed, and so move bits that no noise covers. Where there are neither, trials that can only refuse use
those of the data.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from secure_fed.activity import activity
from secure_fed.errors import ModelError
from secure_fed.learning.data.encode import ASIDE, IGNORED, PARTS, per_token
from secure_fed.learning.models.architecture import couples_examples
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.local import Placed, losses, seeded
from secure_fed.learning.training.objective import CANNOT, Objective, changed, checksums
from secure_fed.learning.training.pass_shapes import Kinds, Padded, length

Gradients = Mapping[str, Tensor]
_BATCH = 5
_LOOKED_AT = 512
_SHORT = (12, 6)  # tokens: of a text of two tokens, some gradients are rounding alone


def require_uncoupled(objective: Objective, collate: Collate, placed: Placed, items: Sequence[Any]) -> None:
    """ModelError if the loss of an example depends on its batch, or if the model keeps statistics of examples it has seen.

    The model keeps some if a pass, forward or backward, changes a buffer or a parameter. items: examples of the data, of which
    only the columns count if examples can be made up; this can only refuse. A mixture of experts is not compared: it gets one
    example at a time. Afterwards the objective is in training mode.
    """

    def checked() -> tuple[int, ...]:
        away = moved_away(placed)
        with (
            activity("checking that each example's loss is its own") as now,
            parameters_stay(objective, {**placed.tensors, **away.moving}),
            still(objective),
        ):
            probe = short(objective, collate, placed, items[0], _BATCH) or varied(list(items[:_BATCH]), _BATCH)
            count = len(probe)
            orders = [range(count), range(count - 1, -1, -1), [0] * count, range(2)]
            first, second = (_losses(objective, collate, away, probe[:1]) for _ in range(2))
            if not same_losses(first, second, 0.0):  # the model draws random numbers, which would tell losses apart
                objective.eval()
            if not couples_examples(objective.model):
                own = torch.cat([_losses(objective, collate, away, [item]) for item in probe])
                for order in map(list, orders):
                    now.step()
                    found = _losses(objective, collate, away, [probe[i] for i in order])
                    if not same_losses(found, own[order], objective.tolerance):
                        raise ModelError(
                            "the loss of an example depends on the others in its batch (it is averaged over all tokens of the "
                            "batch, compares examples, has room for so many of them, or padding counts), so no example can be "
                            "protected; give a loss that is each example's own, shape (B,)"
                        )
            buffers = objective.changed_buffers()
        objective.begin()
        with seeded(objective.device, np.random.default_rng(0)):
            require_constant(objective, collate, away, probe[0])
        buffers += objective.changed_buffers()
        objective.begin()
        if buffers:
            raise remembers(f"buffer {buffers[0]}")
        return (1,)

    objective.kept.sizes(
        ("uncoupled", placed.shapes), partial(objective.surroundings, collate, placed.tensors), checked
    )


def require_constant(objective: Objective, collate: Collate, placed: Placed, item: Any) -> None:
    """ModelError if a pass over the example, forward or backward, changes a parameter. Buffers are restored by `begin`."""
    with parameters_stay(objective, placed.tensors), objective.holding(placed.tensors):
        found = losses(objective, collate, [item])
        if found.requires_grad:
            torch.autograd.backward(found.sum())


def _losses(objective: Objective, collate: Collate, placed: Placed, items: Sequence[Any]) -> Tensor:
    with torch.no_grad(), objective.holding(placed.tensors):
        return losses(objective, collate, items)


@contextmanager
def parameters_stay(objective: Objective, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """ModelError after the block if a parameter of the model, or one of the tensors that replace them, has been changed."""
    models = (objective, *objective.beside)
    for one in models:
        one.note_parameters()
    before = checksums(tensors)
    yield
    if found := [*changed(before, tensors), *(name for one in models for name in one.changed_parameters())]:
        raise remembers(f"parameter {found[0]}")


def remembers(what: str) -> ModelError:
    """The error for a parameter or a buffer that passes change."""
    return ModelError(
        f"{what} of the model changes as it runs, so it may keep statistics of the examples, which no noise covers; give a "
        "model whose passes change no parameter and no buffer"
    )


@contextmanager
def still(objective: Objective) -> Iterator[WithoutDropout]:
    """Training mode without dropout, and with seeded random numbers. Afterwards mode and buffers are restored."""
    trained = objective.model.training
    objective.begin()
    try:
        with seeded(objective.device, np.random.default_rng(0)), WithoutDropout() as without:
            yield without
    finally:
        objective.begin()
        if not trained:
            objective.eval()


class WithoutDropout(TorchFunctionMode):
    """Makes dropout the identity. seen: whether there was any."""

    seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.dropout:
            return self._through(*args, **kwargs)
        if func is functional.scaled_dot_product_attention and kwargs.get("dropout_p", 0.0) > 0:
            self.seen, kwargs["dropout_p"] = True, 0.0
        return func(*args, **kwargs)

    def _through(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        self.seen |= training and p > 0
        return input


def moved_away(placed: Placed, seed: int = 0) -> Placed:
    """The same with every moving tensor moved away from its start."""
    generator = torch.Generator().manual_seed(seed)
    moving = {
        name: (tensor.detach() + 0.05 * torch.randn(tensor.shape, generator=generator).to(tensor)).requires_grad_()
        for name, tensor in placed.moving.items()
    }
    return replace(placed, moving=moving)


def same_losses(found: Tensor, own: Tensor, tolerance: float) -> bool:
    """Whether every loss is the expected one, up to `tolerance` of itself and of 1, or of the largest if that is smaller.

    The second term is for losses near zero: they are differences of scores, which are rounded. No large loss hides another's.
    """
    floor = own.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(max=1.0)
    allowed = tolerance * (own.nan_to_num(0.0, 0.0, 0.0).abs() + floor)
    equal = (found - own).abs() <= allowed
    return bool((equal | (found == own) | (found.isnan() & own.isnan())).all())


def agree(found: Gradients, expected: Gradients, tolerance: float) -> bool:
    """Whether every example's gradient is the expected one, tensor by tensor. found, expected: {name: (B, *shape)}.

    A row may differ by `tolerance` of its own norm, so that no large gradient hides another's. Clipping moves no two vectors
    apart: after it, rows differ by at most twice `tolerance` of the clip norm, whatever that is. A thousandth of the row's norm
    over all tensors is added to its norm in one: a gradient that is zero by the model's symmetry (an attention's key bias) is
    only rounding on both paths.

    This decides whether a rule is right for a model. That an example's gradient depends on no other example is decided to the
    bit (`pass_shapes.agreeing_sizes`).
    """
    if any(found[name].shape != expected[name].shape for name in expected):
        return False
    norms = {name: _norms(gradient) for name, gradient in expected.items()}
    floor = 1e-3 * torch.stack(list(norms.values())).norm(dim=0)
    return all(
        bool((_norms(found[name] - gradient) <= tolerance * (norms[name] + floor)).all())
        for name, gradient in expected.items()
    )


def _norms(stack: Tensor) -> Tensor:
    """(B,) the norms of the rows of (B, *shape)."""
    norms: Tensor = torch.linalg.vector_norm(stack.detach().reshape(len(stack), -1), dim=1)
    return norms


def short(objective: Objective, collate: Collate, placed: Placed, pattern: Any, count: int) -> list[Any]:
    """Short texts of different lengths in the columns of `pattern`, or else public examples of any kind; [] without any."""
    kinds = Kinds.of(objective, collate)
    tried = map(kinds.padded, _SHORT) if hasattr(collate, "padded_to") else [kinds(pattern)]
    found = (of_kind(objective, kinds, placed, kind, pattern, count) for kind in tried)
    return next(filter(None, found), None) or list(objective.public[:_LOOKED_AT])


def of_kind(objective: Objective, kinds: Kinds, placed: Placed, kind: Hashable, pattern: Any, count: int) -> list[Any]:
    """`count` examples of a kind; [] if they can neither be made up nor found among the public ones.

    pattern: an example, for its columns.
    """
    items = made_up(kinds, kind, objective.model, pattern, count)
    if not items or not _takes(objective, kinds.collate, placed, [max(items, key=length)]):
        items = [item for item in objective.public[:_LOOKED_AT] if kinds(item) == kind]
    return varied(items, count) if items else []


def _takes(objective: Objective, collate: Collate, placed: Placed, items: Sequence[Any]) -> bool:
    """Whether the model computes finite losses of these examples."""
    try:
        with torch.no_grad(), seeded(objective.device, np.random.default_rng(0)), objective.holding(placed.tensors):
            return bool(losses(objective, collate, items).isfinite().all())
    except CANNOT:
        return False


def made_up(kinds: Kinds, kind: Hashable, model: nn.Module, pattern: Any, count: int) -> list[dict[str, Any]]:
    """`count` made-up examples of a kind, in the columns of `pattern`; [] if the kind is not `Padded` or has no vocabulary.

    Their lengths are spread over the lengths of the kind, their tokens are random, and labels are 0 and 1.
    """
    words = embedding_rows(model, "input")
    if not isinstance(kind, Padded) or not words or not isinstance(pattern, Mapping):
        return []
    rng = np.random.default_rng(0)
    shortest, longest = (kind.width, kind.width) if kind.full else (min(kind.above + 1, kind.work - 1), kind.work - 1)
    lengths = rng.permutation(np.linspace(max(2, shortest), max(2, longest), count).round().astype(int))
    tokenwise = getattr(getattr(kinds.collate, "plain", kinds.collate), "labels", None) is per_token
    made = []
    for number, tokens in enumerate(map(int, lengths)):
        item: dict[str, Any] = {"input_ids": rng.integers(0, words, tokens)}
        for name, value in pattern.items():
            if name in ("labels", "label"):
                item[name] = _label(value, number, tokens, rng, tokenwise=tokenwise)
            elif name not in ("input_ids", ASIDE, PARTS):
                item[name] = np.full(tokens, int(name == "attention_mask"))
        made.append(item)
    return made


def embedding_rows(model: nn.Module, side: str) -> int:
    """The number of tokens that the model embeds ("input"), or to which it gives scores ("output"); 0 if unknown or none."""
    try:
        weight = getattr(getattr(model, f"get_{side}_embeddings")(), "weight", None)
    except (NotImplementedError, AttributeError, TypeError):
        return 0
    return len(weight) if isinstance(weight, Tensor) and weight.ndim == 2 else 0


def _label(like: Any, number: int, tokens: int, rng: np.random.Generator, *, tokenwise: bool) -> Any:
    """A label of zeros and ones in the form of `like`; of labels for tokens, every third is `IGNORED`."""
    if tokenwise:
        labels = rng.integers(0, 2, tokens)
        labels[2::3] = IGNORED
        return labels
    shape, kind = np.shape(like), np.asarray(like).dtype.kind
    bits = (number + np.arange(int(np.prod(shape)))) % 2
    if kind in "iu" and shape == (2,) and isinstance(like, tuple):  # the first and the last token of an answer
        return (0, min(1, tokens - 1))
    filled = bits.reshape(shape).astype(float if kind == "f" else int)
    return filled if shape else filled.item()


def varied(items: Sequence[Any], count: int) -> list[Any]:
    """`count` examples made from fewer: the items, and copies of them with their floating-point numbers in another order."""
    return [_rolled(items[i % len(items)], i // len(items)) for i in range(count)]


def _rolled(item: Any, by: int) -> Any:
    if by == 0:
        return item
    if isinstance(item, Mapping):
        return {name: value if "mask" in str(name) else _rolled(value, by) for name, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_rolled(value, by) for value in item)
    if isinstance(item, Tensor) and item.ndim and item.is_floating_point():
        return item.roll(by, -1)
    if isinstance(item, np.ndarray) and item.ndim and item.dtype.kind == "f":
        return np.roll(item, by, -1)
    return item
