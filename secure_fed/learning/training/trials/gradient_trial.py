"""Trials, on examples, of how a model's per-example gradients can be computed.

Every moving tensor is moved away from zero first, since at the usual start B = 0 the gradient of A vanishes and would prove
nothing. The result of a trial is a property of the model and of the shape of its batches, not of the examples in the trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from secure_fed.activity import activity
from secure_fed.errors import ModelError, SecureFedError
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.checksums import changed, checksums
from secure_fed.learning.training.local import Placed, seeded
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.per_example import Gradients, Path, by_layer, losses, one_by_one
from secure_fed.learning.training.trials.bit_trial import CANNOT, sizes_that_agree, sizes_up_to
from secure_fed.learning.training.trials.supported import mixes_experts


def tried(
    objective: Objective, alone: Collate, together: Collate, placed: Placed, probe: Sequence[Any]
) -> tuple[Path, tuple[int, ...]]:
    """The path for gradients of examples like `probe`, and the sizes that a pass may have, up to `len(probe)`.

    `by_layer` if it agrees with `one_by_one`, in passes of the sizes with which each example's gradient is bit-identical
    whatever the other examples and their order; otherwise `one_by_one`, in passes of one. alone, together: see `path_for`.
    """
    if path_for(objective, alone, placed, probe, together) is by_layer:
        with still(objective, lambda: losses(objective, alone, placed, probe[:1])):
            away = moved_away(placed)
            sizes = sizes_that_agree(
                lambda items: by_layer(objective, together, away, items), probe, sizes_up_to(len(probe))
            )
            if sizes:
                return by_layer, sizes
    return one_by_one, (1,)


def path_for(
    objective: Objective, alone: Collate, placed: Placed, probe: Sequence[Any], together: Collate | None = None
) -> Path:
    """`by_layer` if it agrees with `one_by_one` on the examples of `probe`, otherwise `one_by_one`.

    alone: the collate function for one example. together: the collate function for several examples, if it differs.

    A mixture of experts uses `one_by_one`, and so does a model that draws random numbers beyond dropout: it may draw once for
    all examples of a pass, and then the examples that share a draw would depend on the other examples.

    ModelError as in `require_uncoupled`. The objective's mode and buffers are restored.
    """
    together = together or alone
    require_uncoupled(objective, alone, together, placed, probe)
    with still(objective, lambda: losses(objective, alone, placed, probe[:1])) as draws:
        if draws or mixes_experts(objective.model) or len(probe) < 2:
            return one_by_one
        away = moved_away(placed)
        try:
            quick = by_layer(objective, together, away, probe)
        except CANNOT:
            return one_by_one
        slow = one_by_one(objective, alone, away, probe)
        return by_layer if agree(quick, slow, objective.tolerance) else one_by_one


def agree(found: Gradients, expected: Gradients, tolerance: float) -> bool:
    """Whether every example's gradient is the expected one, tensor by tensor. found, expected: {name: (B, *shape)}.

    A row may differ by `tolerance` of its own norm, so that no large gradient hides another's. Clipping moves no two vectors
    apart: after it, rows differ by at most twice `tolerance` of the clip norm, whatever that is. A thousandth of the row's norm
    over all tensors is added to its norm in one: a gradient that is zero by the model's symmetry (an attention's key bias) is
    only rounding on both paths.

    This decides whether a rule is right for a model. That an example's gradient depends on no other example is decided to the
    bit (`bit_trial`).
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


def same_losses(found: Tensor, own: Tensor, tolerance: float) -> bool:
    """Whether every loss is the expected one, up to `tolerance` of itself and of 1, or of the largest if that is smaller.

    The second term is for losses near zero: they are differences of scores, which are rounded. No large loss hides another's.
    """
    floor = own.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(max=1.0)
    allowed = tolerance * (own.nan_to_num(0.0, 0.0, 0.0).abs() + floor)
    equal = (found - own).abs() <= allowed
    return bool((equal | (found == own) | (found.isnan() & own.isnan())).all())


def probe_of(examples: Sequence[Any], collate: Collate) -> list[Any]:
    """Up to three examples, of different lengths if possible: equal lengths hide a loss that is averaged over tokens.

    If all have one length, the first is cut to half its tokens, if `collate` accepts that.
    """
    some = sorted((examples[i] for i in range(min(len(examples), _LOOKED_AT))), key=length)
    probe = [some[0], some[len(some) // 2], some[-1]] if len(some) > 2 else some
    if not 1 < length(probe[0]) == length(probe[-1]):
        return probe
    varied = [_halved(probe[0]), *probe[1:]]
    try:
        collate(varied)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, SecureFedError):
        return probe
    return varied


def length(item: Any) -> int:
    """The number of an example's unmasked tokens; 0 if it is unknown."""
    if not isinstance(item, Mapping) or "input_ids" not in item:
        return 0
    return int(np.sum(np.asarray(item["attention_mask"]))) if "attention_mask" in item else len(item["input_ids"])


def _halved(item: Mapping[str, Any]) -> dict[str, Any]:
    tokens = len(item["input_ids"])
    per_token = {name for name, value in item.items() if np.ndim(value) == 1 and len(value) == tokens}
    return {name: value[: tokens // 2] if name in per_token else value for name, value in item.items()}


def moved_away(placed: Placed, seed: int = 0) -> Placed:
    """The same with every moving tensor moved away from its start."""
    generator = torch.Generator().manual_seed(seed)
    moving = {
        name: (tensor.detach() + 0.05 * torch.randn(tensor.shape, generator=generator).to(tensor)).requires_grad_()
        for name, tensor in placed.moving.items()
    }
    return replace(placed, moving=moving)


def require_uncoupled(
    objective: Objective, alone: Collate, together: Collate, placed: Placed, probe: Sequence[Any]
) -> None:
    """ModelError if the loss of an example depends on its batch, or if the model keeps statistics of examples it has seen.

    The model keeps some if a pass, forward or backward, changes a buffer or a parameter.

    A mixture of experts is accepted: it gets one example at a time.
    """
    with still(objective, lambda: losses(objective, alone, placed, probe[:1])):
        away = moved_away(placed)
        with parameters_stay(objective, away.held | away.moving):
            if not mixes_experts(objective.model):
                _require_own(objective, alone, together, away, probe)
            _pass(objective, alone, away, probe[0])
        if buffers := objective.changed_buffers():
            raise ModelError(
                f"buffer {buffers[0]} of the model changes as it runs, so it may keep statistics of the examples, which no "
                "noise covers; give a model without such buffers"
            )


def require_steady_parameters(objective: Objective, alone: Collate, placed: Placed, probe: Sequence[Any]) -> None:
    """ModelError if a pass over the examples of `probe`, forward or backward, changes a parameter. The objective's mode and
    buffers are restored.
    """
    for item in probe:
        once = partial(losses, objective, alone, placed, [item])
        with still(objective, once), parameters_stay(objective, placed.held | placed.moving):
            _pass(objective, alone, placed, item)


def _pass(objective: Objective, alone: Collate, placed: Placed, item: Any) -> None:
    """One example's pass, forward and backward."""
    found = losses(objective, alone, placed, [item])
    if found.requires_grad:
        torch.autograd.grad(found.sum(), list(placed.moving.values()), allow_unused=True)


@contextmanager
def parameters_stay(objective: Objective, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """ModelError after the block if a parameter of the model, or one of the tensors that replace them, has been changed."""
    models = (objective, *objective.beside)
    for one in models:
        one.note_parameters()
    before = checksums(tensors)
    yield
    if found := [*changed(before, tensors), *(name for one in models for name in one.changed_parameters())]:
        raise ModelError(
            f"parameter {found[0]} of the model changes as it runs, so it may keep statistics of the examples, which no noise "
            "covers; give a model whose passes change no parameter"
        )


def _require_own(objective: Objective, alone: Collate, together: Collate, placed: Placed, probe: Sequence[Any]) -> None:
    """Require each example's loss to equal its loss alone: in whole and partial batches, other orders, among its copies."""
    count = len(probe)
    orders: list[Sequence[int]] = [range(size) for size in sizes_up_to(count)]
    orders += [range(count - 1, -1, -1), [0] * count, [count - 1] * count, [i % min(2, count) for i in range(count)]]
    with torch.no_grad(), activity("batches tried", len(orders)) as now:
        own = torch.cat([losses(objective, alone, placed, [item]) for item in probe])
        for order in map(list, orders):
            now.step()
            found = losses(objective, together, placed, [probe[i] for i in order])
            if not same_losses(found, own[order], objective.tolerance):
                raise ModelError(
                    "the loss of an example depends on the others in its batch (it is averaged over all tokens of the batch, "
                    "compares examples, has room for so many of them, or padding counts), so no example can be protected; "
                    "give a loss that is each example's own, shape (B,)"
                )


@contextmanager
def still(objective: Objective, once: Callable[[], Tensor]) -> Iterator[bool]:
    """Training mode without dropout; if the model draws other random numbers, evaluation mode, and True is yielded.

    Afterwards the objective's mode and buffers are restored.
    """
    trained = objective.model.training
    objective.begin()
    try:
        with seeded(objective.device, np.random.default_rng(0)), WithoutDropout():
            drawn = torch.get_rng_state()
            first, second = (once().detach() for _ in range(2))  # with gradients: a model may draw for training alone
            draws = not torch.equal(first, second) or not torch.equal(torch.get_rng_state(), drawn)
            if draws:
                objective.eval()
            yield draws
    finally:
        objective.begin()
        if not trained:
            objective.eval()


class WithoutDropout(TorchFunctionMode):
    """Makes dropout the identity."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.dropout:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention and "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


_LOOKED_AT = 64
