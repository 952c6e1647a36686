"""Gradients of single examples: in one pass, one at a time by plain autograd, and the way that training chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secure_fed.learning.tasks.task import Batch, Collate
from secure_fed.learning.training.common_passes.passes import Pack, Places, found_in
from secure_fed.learning.training.local import Placed, losses
from secure_fed.learning.training.objective import CANNOT, Objective
from secure_fed.learning.training.trials import agree, moved_away, require_uncoupled, still

Gradients = Mapping[str, Tensor]
Path = Callable[[Objective, Collate, Placed, Sequence[Any]], Gradients]


def losses_at(objective: Objective, tensors: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """(B,) the losses of a batch at these tensors."""
    with objective.holding(tensors):
        return objective.losses(batch)


def together(objective: Objective, collate: Collate, placed: Placed, items: Sequence[Any]) -> Gradients:
    """All examples in one pass."""
    pack = Pack([0] * len(items), list(items), collate, len(items), each=True)
    return found_in(objective, Places.of([placed]), pack).gradients


def one_by_one(objective: Objective, collate: Collate, placed: Placed, items: Sequence[Any]) -> Gradients:
    """Each example in a batch of its own."""
    moving, each = list(placed.moving.values()), []
    for item in items:
        with objective.holding(placed.tensors):
            loss = losses(objective, collate, [item]).sum()
            each.append(torch.autograd.grad(loss, moving, allow_unused=True, materialize_grads=True))
    return {name: torch.stack(parts) for name, parts in zip(placed.moving, zip(*each, strict=True), strict=True)}


def path_for(objective: Objective, collate: Collate, placed: Placed, items: Sequence[Any]) -> Path:
    """`together` if it agrees with `one_by_one`, otherwise that. ModelError for coupled examples."""
    require_uncoupled(objective, collate, placed, items)
    away = moved_away(placed)
    with still(objective):
        try:
            quick = together(objective, collate, away, items)
        except CANNOT:
            return one_by_one
        slow = one_by_one(objective, collate, away, items)
    return together if agree(quick, slow, objective.tolerance) else one_by_one
