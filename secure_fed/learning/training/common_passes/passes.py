"""The gradients of examples of many clients in one pass, each at its own client's tensors.

Parameters are passed as `EachOwn`, so the frozen layers are computed for all examples at once. The losses do not depend on each
other: the gradient of their sum at the tensors of example i is its own gradient. A row of a pass is

    each        one example: its own gradient, for clipping, or for a sum in an order that no other example moves
    otherwise   one client: the sum of the gradients of its examples, which are not kept one by one

With one row no `EachOwn` is needed: the pass is plain autograd, right for every model. A model can break passes of more rows,
by a layer that reads its parameters in a way without a rule, by coupling the examples of a batch, or by drawing random numbers
beyond dropout. So the model is tried first (`tried`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fed.learning.models.adapters.per_example import EachOwn, SmallProductsApart
from secure_fed.learning.models.dropout_and_checkpointing import OwnDropout
from secure_fed.learning.tasks.next_tokens import rows_together
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.common_passes.parallel import copy_of, spreads
from secure_fed.learning.training.local import Placed, losses, seeded
from secure_fed.learning.training.objective import CANNOT, Objective
from secure_fed.learning.training.trials import agree, moved_away, same_losses, still, varied

_TOGETHER = 64


@dataclass(frozen=True)
class Flat:
    """Named tensors one after the other in a row of `width` numbers; unused numbers at its end stay zero.

    The width is a multiple of 64: vectorised arithmetic then treats every row of a matrix alike. shapes: of the tensors, by
    name.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def width(self) -> int:
        return -(-sum(map(math.prod, self.shapes.values())) // _TOGETHER) * _TOGETHER

    def rows(self, tensors: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """(S, width) of S clients' tensors."""
        first = next(iter(tensors[0].values()))
        found = first.new_zeros(len(tensors), self.width, requires_grad=False)
        for own, row in zip(tensors, found, strict=True):
            for name, part in self.parts(row[None]).items():
                part[0] = own[name].detach()
        return found

    def parts(self, rows: Tensor) -> dict[str, Tensor]:
        """{name: (B, *shape)}, views of the rows (B, width)."""
        found, at = {}, 0
        for name, shape in self.shapes.items():
            count = math.prod(shape)
            found[name] = rows[:, at : at + count].view(len(rows), *shape)
            at += count
        return found


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

    owners: the row in `Places` of each example's client. count: the number of first examples that are no copies. each: whether
    every example is a row of the pass; then small products are computed separately for each, so that their bits depend on it
    alone. seed: of dropout; None if the model has no dropout.
    """

    owners: list[int]
    items: list[Any]
    collate: Collate
    count: int
    each: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class Found:
    """The results of a pass: the gradients (R, *shape) of its rows by name, their owners, and its examples' losses (B,)."""

    owners: list[int]
    gradients: Mapping[str, Tensor]
    losses: Tensor


def found_in(objective: Objective, places: Places, pack: Pack) -> Found:
    """Compute one pass."""
    rows = list(pack.owners) if pack.each else list(dict.fromkeys(pack.owners))
    moving, plain = places.flat.parts(places.moving), len(rows) == 1
    at = torch.tensor(rows, device=objective.device)
    leaves = {name: part[at].requires_grad_() for name, part in moving.items()}
    own = {name: part[at] for name, part in places.own.items()}
    if plain:
        leaves = {name: part[0].detach().requires_grad_() for name, part in leaves.items()}
        named = {name: part[0] for name, part in own.items()} | leaves
    else:
        of = None if pack.each else torch.tensor([rows.index(owner) for owner in pack.owners], device=objective.device)
        named = {name: EachOwn.of(_spread(part, of)) for name, part in (own | leaves).items()}
    with _modes(objective, pack), objective.holding({**places.shared, **named}):
        found = losses(objective, pack.collate, pack.items)
        torch.autograd.backward(found.sum())
    count = pack.count if pack.each else len(rows)
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    gradients = {name: (one[None] if plain else one)[:count] for name, one in gradients.items()}
    return Found(rows[:count], gradients, found.detach()[: pack.count])


def _spread(rows: Tensor, of: Tensor | None) -> Tensor:
    """(B, *shape) the value of each example's client, from rows (R, *shape)."""
    if of is None:
        return rows
    if rows.is_cuda:  # where torch adds up the gradients of an index in their order, and `index_add_` does not
        return rows[of]
    spread: Tensor = _Spread.apply(rows, of)  # type: ignore[no-untyped-call]
    return spread


class _Spread(torch.autograd.Function):
    """rows[of]; its backward pass adds up the gradients of each row in their order. It can be repeated (checkpointing)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, of: Tensor) -> Tensor:
        ctx.of, ctx.rows = of, rows.shape
        return rows[of]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.rows).index_add_(0, ctx.of, gradient), None


@contextmanager
def _modes(objective: Objective, pack: Pack) -> Iterator[None]:
    with ExitStack() as stack:
        if not pack.each:  # of one client, or of clients that nobody protects
            stack.enter_context(rows_together())
        elif len(pack.items) > 1:
            stack.enter_context(SmallProductsApart(len(pack.items)))
        if pack.seed is not None:
            stack.enter_context(OwnDropout(pack.seed, objective.device))
        yield


@dataclass(frozen=True)
class Trial:
    """The outcome of a trial.

    why_not: why examples cannot share passes; "" if a pass gives each example its own loss and gradient. dropout: whether the
    model has dropout. copies: whether passes can run at the same time, if they could here (`parallel.spreads`), because a copy
    of the objective computes the same: in the copy, a `forward` that was assigned to an object from outside may still use the
    first model.
    """

    why_not: str = ""
    dropout: bool = False
    copies: bool = True


def tried(
    objective: Objective, placed: Sequence[Placed], examples: Sequence[Any], collate: Collate, *, every: bool = True
) -> Trial:
    """Test on up to three examples whether trainings with these tensors can share a pass.

    every: compare each example with a pass of its own; else one of them, with one client's tensors in another client's pass,
    where nobody is protected. The objective is left in training mode, with its buffers restored.
    """
    objective.begin()  # an evaluation may have left it in evaluation mode, without dropout
    objective.note_parameters()
    probe = [examples[0], examples[len(examples) // 2], examples[-1]] if len(examples) > 2 else varied(examples, 3)
    away = [moved_away(place, number) for number, place in enumerate(placed)]
    places = Places.of(away)
    pack = Pack([number % len(away) for number in range(len(probe))], probe, collate, len(probe), each=True)
    try:
        with still(objective) as without:
            drawn = torch.get_rng_state()
            together = found_in(objective, places, pack)
            if not torch.equal(torch.get_rng_state(), drawn):
                return Trial("the model draws random numbers beyond dropout")
            for number in range(len(probe)) if every else [1]:
                own = found_alone(objective, away[pack.owners[number]], probe[number], collate)
                row = {name: one[number, None] for name, one in together.gradients.items()}
                if not same_losses(together.losses[number, None], own.losses, objective.tolerance) or not agree(
                    row, own.gradients, objective.tolerance
                ):
                    return Trial("gradients of several clients in one pass are not those of one client at a time")
            if found := objective.changed_buffers():
                return Trial(f"buffer {found[0]} of the model changes as it runs")
            if found := objective.changed_parameters():
                return Trial(f"parameter {found[0]} of the model changes as it runs")
        with seeded(objective.device, np.random.default_rng(0)):
            drawn = torch.get_rng_state()
            if without.seen:
                pack = replace(pack, seed=0)
                together = found_in(objective, places, pack)
            copies = spreads(objective)
            if copies:
                others = found_in(copy_of(objective), places, pack).gradients
                copies = all(torch.equal(one, others[name]) for name, one in together.gradients.items())
            if not torch.equal(drawn, torch.get_rng_state()):
                return Trial("the model draws random numbers beyond dropout")
        return Trial(dropout=without.seen, copies=copies)
    except CANNOT as error:
        return Trial(
            f"the model cannot take tensors of several clients in one pass ({type(error).__name__}: {error!s:.200})"
        )
    finally:
        objective.begin()


def found_alone(objective: Objective, placed: Placed, item: Any, collate: Collate) -> Found:
    """One example in a batch of its own, by plain autograd: right by definition, for every model."""
    return found_in(objective, Places.of([placed]), Pack([0], [item], collate, 1))
