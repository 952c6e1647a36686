"""The model run for several trainings at once: their tensors stacked, (S, *shape), and `Objective.losses` mapped over them and
their batches,

    sum_s mean_i loss(w_s, x_si),

whose gradient in the stack is every training's own gradient, one above the other.

Batches of a pass are collated together, which pads them to the longest of all; a smaller batch is filled up with its first
example, whose losses are left out.

A model can break this: by control flow that goes by numbers, by coupling what padding adds with what counts, by drawing random
numbers of its own. So stacked gradients are to be compared first with those of one training at a time, on the model at hand
(`why_not`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from secure_fed.errors import ModelError, SecureFedError
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.gradient_trial import agree, moved_away, probe_of, still
from secure_fed.learning.training.local import Objective, Placed, require_one_each, seeded, to_device
from secure_fed.learning.training.per_example import losses as losses_of

Items = list[Any]


def losses_of_each(
    objective: Objective, places: Sequence[Placed], packed: Sequence[Items], collate: Collate
) -> list[Tensor]:
    """(B,) losses of each training, of its own batch at its own tensors, in one pass."""
    if len(places) == 1:
        return [losses_of(objective, collate, places[0], packed[0])]
    rows = max(map(len, packed))
    filled = [item for items in packed for item in [*items, *items[:1] * (rows - len(items))]]
    batch = _dealt(to_device(collate(filled), objective.device), len(places), rows)
    tensors, dims = _stack([place.held | place.moving for place in places])
    with _NoForAll():
        found = vmap(objective.losses, in_dims=(dims, 0), randomness="different")(tensors, batch)
    if found.shape != (len(places), rows):
        require_one_each(found[0], rows)
    return [own[: len(items)] for own, items in zip(found, packed, strict=True)]


def _stack(named: Sequence[Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, int | None]]:
    """Tensors stacked to (S, *shape), with 0; tensors that all trainings share are returned unstacked, with None."""
    shared = {name: all(own[name] is tensor for own in named) for name, tensor in named[0].items()}
    tensors = {
        name: tensor if shared[name] else torch.stack([own[name] for own in named]) for name, tensor in named[0].items()
    }
    return tensors, {name: None if same else 0 for name, same in shared.items()}


def _dealt(batch: Any, count: int, rows: int) -> Any:
    """One batch for each training: tensors of (count * rows, ...) become (count, rows, ...)."""
    if isinstance(batch, Tensor) and batch.ndim and len(batch) == count * rows:
        return batch.reshape(count, rows, *batch.shape[1:])
    if isinstance(batch, dict):
        return {name: _dealt(value, count, rows) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_dealt(value, count, rows) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise ModelError(
        f"a batch of {count * rows} examples holds a {type(batch).__name__} that is not one row for each of them; "
        "give a collate that makes tensors with the examples along the first dimension"
    )


class _NoForAll(TorchFunctionMode):
    """Within this mode a stacked tensor counts as False where a model needs one truth value for the whole stack.

    Models ask such questions (is nothing masked?) to save work where the answer is yes. A model that decides something else by
    them shows in the comparison of gradients.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__bool__:
            return func(*args, **(kwargs or {}))
        try:
            return func(*args)
        except RuntimeError as error:
            if "data-dependent" in str(error):
                return False
            raise


def why_not(objective: Objective, places: Sequence[Placed], examples: Sequence[Any], collate: Collate) -> str:
    """Why trainings from these three places cannot share a pass; "" if that gives each one's own losses and gradients.

    It is tried on batches of different sizes and lengths, one of which has no padding, at tensors moved away from a start where
    gradients may vanish. The objective is left in training mode, its buffers as they were.
    """
    if len(examples) < 2:
        return "there are no two examples to try it out on"
    probe = probe_of(examples, collate)
    packed = [[probe[-1]] * 3, [probe[0], probe[-1]], [probe[0]]]
    places = [moved_away(place, number) for number, place in enumerate(places)]
    with still(objective, lambda: losses_of(objective, collate, places[0], probe)) as draws:
        if draws:
            return "the model draws random numbers beyond dropout"
        alone = [_gradients(objective, [place], [own], collate)[0] for place, own in zip(places, packed, strict=True)]
        try:
            stacked = _gradients(objective, places, packed, collate)
        except _CANNOT as error:
            return _said(error)
        changed = objective.changed_buffers()
    if changed:
        return f"buffer {changed[0]} of the model changes as it runs"
    if not all(agree(found, own, objective.tolerance) for found, own in zip(stacked, alone, strict=True)):
        return "stacked gradients of the model are not those of one training at a time"
    try:
        with seeded(objective.device, np.random.default_rng(0)), without_advice():
            losses_of_each(objective, places, packed, collate)  # with dropout, if there is any
    except _CANNOT as error:
        return _said(error)
    finally:
        objective.begin()
    return ""


def _said(error: Exception) -> str:
    return f"the model cannot be mapped over stacked tensors ({type(error).__name__}: {error!s:.200})"


def _gradients(
    objective: Objective, places: Sequence[Placed], packed: Sequence[Items], collate: Collate
) -> list[dict[str, Tensor]]:
    """The gradients of each training's mean loss by name, and its losses under ""."""
    with without_advice():
        losses = losses_of_each(objective, places, packed, collate)
        leaves = [leaf for place in places for leaf in place.moving.values()]
        total = torch.stack([own.mean() for own in losses]).sum()
        found = iter(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
    return [
        {name: next(found) for name in place.moving} | {"": own.detach()}
        for place, own in zip(places, losses, strict=True)
    ]


@contextmanager
def without_advice() -> Iterator[None]:
    """Without torch's note that an operation is mapped over a stack one by one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


_CANNOT = (SecureFedError, RuntimeError, ValueError, TypeError, LookupError)
