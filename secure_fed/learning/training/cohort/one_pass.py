"""The gradients of examples of many clients in one pass, each at its own client's tensors.

Parameters are passed as `EachOwn`, so the frozen layers are computed for all examples at once. The losses do not depend on each
other: the gradient of their sum at example i's tensors is example i's own gradient.

A model can break this: by a layer that reads its parameters in a way that has no rule, by coupling the examples of a batch, by
drawing random numbers beyond dropout. So a trial checks the model first (`tried`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fed.errors import SecureFedError
from secure_fed.learning.models.adapters.own_tensors import EachOwn
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.cohort.crew import copy_of
from secure_fed.learning.training.cohort.flat import Flat
from secure_fed.learning.training.local import Placed, require_one_each, seeded
from secure_fed.learning.training.objective import Objective, to_device
from secure_fed.learning.training.own_dropout import OwnDropout
from secure_fed.learning.training.per_example import SmallProductsApart
from secure_fed.learning.training.per_example import losses as losses_of
from secure_fed.learning.training.trials.gradient_trial import agree, moved_away, probe_of, same_losses, still
from secure_fed.learning.training.trials.made_up import varied


@dataclass(frozen=True)
class Places:
    """The current tensors of S clients' trainings.

    flat: the layout of `moving`, (S, P). shared: held (frozen) tensors that all clients share. own: held tensors that differ
    between clients, {name: (S, *shape)}.
    """

    flat: Flat
    moving: Tensor
    shared: Mapping[str, Tensor]
    own: Mapping[str, Tensor]

    @classmethod
    def of(cls, placed: Sequence[Placed]) -> Places:
        first = placed[0]
        flat = Flat({name: tuple(tensor.shape) for name, tensor in first.moving.items()})
        same = {name: all(one.held[name] is tensor for one in placed) for name, tensor in first.held.items()}
        return cls(
            flat,
            flat.rows([one.moving for one in placed]),
            {name: tensor for name, tensor in first.held.items() if same[name]},
            {name: torch.stack([one.held[name] for one in placed]) for name in first.held if not same[name]},
        )


@dataclass(frozen=True)
class Pack:
    """The examples of one pass.

    owners: the row of each example's client. count: the number of first examples that are no copies. apart: whether small
    products are computed separately for each example, so that their bits depend on it alone. seed: of dropout; None if the
    model has no dropout.
    """

    owners: list[int]
    items: list[Any]
    collate: Collate
    count: int
    apart: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class Found:
    """The results of a pass: gradients (B, P) and losses (B,) of its examples, for the clients `owners` (B,)."""

    owners: Tensor
    gradients: Tensor
    losses: Tensor


def found_in(objective: Objective, places: Places, pack: Pack) -> Found:
    """Compute one pass."""
    owners = torch.tensor(pack.owners, device=objective.device)
    rows = places.moving[owners]
    leaves = {name: part.detach().requires_grad_() for name, part in places.flat.parts(rows).items()}
    own = {name: EachOwn.of(part[owners]) for name, part in places.own.items()}
    named = {**places.shared, **own, **{name: EachOwn.of(leaf) for name, leaf in leaves.items()}}
    with _modes(objective, pack):
        losses = objective.losses(named, to_device(pack.collate(pack.items), objective.device))
        require_one_each(losses, len(pack.items))
    gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    joined = places.flat.joined(gradients)
    return Found(owners[: pack.count], joined[: pack.count], losses.detach()[: pack.count])


@contextmanager
def _modes(objective: Objective, pack: Pack) -> Iterator[None]:
    apart = SmallProductsApart(len(pack.items)) if pack.apart else nullcontext()
    dropout = nullcontext() if pack.seed is None else OwnDropout(pack.seed, objective.device)
    with apart, dropout:
        yield


@dataclass(frozen=True)
class Trial:
    """The outcome of a trial.

    why_not: why trainings cannot share passes; "" if a pass gives each example its own loss and gradient. dropout: whether
    the model has dropout. copies: whether a copy of the objective computes the same, so that passes can run at the same time:
    in the copy, a `forward` that was assigned to an object from outside may still use the first model.
    """

    why_not: str = ""
    dropout: bool = False
    copies: bool = True


def tried(objective: Objective, placed: Sequence[Placed], examples: Sequence[Any], collate: Collate) -> Trial:
    """Test on some examples whether trainings with these tensors can share a pass.

    The examples have different lengths, and the tensors are moved away from a start where gradients may vanish. The objective
    is left in training mode, with its buffers restored.
    """
    objective.begin()  # an evaluation may have left it in evaluation mode, without dropout
    objective.note_parameters()
    probe = probe_of(examples if len(examples) > 1 else varied(examples, 3), collate)
    away = [moved_away(place, number) for number, place in enumerate(placed)]
    pack = Pack([number % len(away) for number in range(len(probe))], probe, collate, len(probe))
    try:
        reason = _compared(objective, away, pack)
        return Trial(reason) if reason else _with_dropout(objective, away, pack)
    except _CANNOT as error:
        return Trial(
            f"the model cannot take tensors of several clients in one pass ({type(error).__name__}: {error!s:.200})"
        )
    finally:
        objective.begin()


def _compared(objective: Objective, placed: Sequence[Placed], pack: Pack) -> str:
    """Why a shared pass and single examples give different results; "" if they agree."""
    with still(objective, lambda: losses_of(objective, pack.collate, placed[0], pack.items)) as draws:
        if draws:
            return "the model draws random numbers beyond dropout"
        together = _together(objective, placed, pack)
        alone = [
            _alone(objective, placed[owner], item, pack.collate)
            for owner, item in zip(pack.owners, pack.items, strict=True)
        ]
        if changed := objective.changed_buffers():
            return f"buffer {changed[0]} of the model changes as it runs"
        if changed := objective.changed_parameters():
            return f"parameter {changed[0]} of the model changes as it runs"
    found, own = _stacked(together), _stacked(alone)
    if not same_losses(found.pop(""), own.pop(""), objective.tolerance) or not agree(found, own, objective.tolerance):
        return "gradients of several clients in one pass are not those of one client at a time"
    return ""


def _with_dropout(objective: Objective, placed: Sequence[Placed], pack: Pack) -> Trial:
    """Whether training has dropout, whether a copy computes the same, and whether other random numbers are drawn."""
    with seeded(objective.device, np.random.default_rng(0)):
        first, second = (_together(objective, placed, replace(pack, seed=seed)) for seed in (0, 1))
        before = torch.get_rng_state()
        _together(objective, placed, replace(pack, seed=0))
        if not torch.equal(before, torch.get_rng_state()):
            return Trial("the model draws random numbers beyond dropout")
    dropout = not _same(first, second)
    copied = _together(copy_of(objective), placed, replace(pack, seed=0))
    return Trial(dropout=dropout, copies=_same(first, copied))


def _same(found: Sequence[Mapping[str, Tensor]], others: Sequence[Mapping[str, Tensor]]) -> bool:
    return all(torch.equal(one[name], other[name]) for one, other in zip(found, others, strict=True) for name in one)


def _stacked(each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in each]) for name in each[0]}


def _alone(objective: Objective, placed: Placed, item: Any, collate: Collate) -> dict[str, Tensor]:
    """The gradients of one example's loss by name, and its loss under ""."""
    losses = losses_of(objective, collate, placed, [item])
    leaves = list(placed.moving.values())
    found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
    return dict(zip(placed.moving, found, strict=True)) | {"": losses.detach()}


def _together(objective: Objective, placed: Sequence[Placed], pack: Pack) -> list[dict[str, Tensor]]:
    """The results of `_alone` for every example, in one pass."""
    places = Places.of(placed)
    found = found_in(objective, places, pack)
    parts = places.flat.parts(found.gradients)
    return [
        {name: part[number] for name, part in parts.items()} | {"": found.losses[number, None]}
        for number in range(pack.count)
    ]


_CANNOT = (SecureFedError, RuntimeError, ValueError, TypeError, LookupError)
