"""Phantoms: clients without data. A member's training ends along a random direction; a non-member sends zeros.

In all other respects a phantom is a client: it is drawn, its contribution is clipped by the same code, noised where clients
noise their contributions, and masked. Members and non-members differ in that contribution alone, which has length C or is zero,
as the neighbours of a guarantee for clients do. A phantom adds nothing to the counters of an adaptive clip norm, and keeps
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from secure_fed.config import RunConfig
from secure_fed.learning.audit_pool.canaries import length_beyond_clipping
from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.learning.data.audit_unit import Unit
from secure_fed.learning.training.canary_directions import trains_towards
from secure_fed.learning.training.local import Train
from secure_fed.rounds.client import Client
from secure_fed.rounds.client_setup import ClientSetup
from secure_fed.rounds.transport import Request
from secure_fed.rounds.turns import Turns
from secure_fed.tensors.tensors import Tensors


class Phantom(Client):
    """A client without data. member: whether its coin made it a member."""

    def __init__(self, index: int, name: str, setup: ClientSetup, *, member: bool) -> None:
        super().__init__(index, name, (), setup)
        self.member = member

    @property
    def personal(self) -> Tensors:
        return Tensors()

    @property
    def _context(self) -> Tensors:
        return Tensors()

    @property
    def _counts(self) -> float:
        return 1.0  # the server, which knows the phantoms, subtracts it

    def _clipped(self, contribution: Tensors, clip_norm: float) -> Tensors:
        bounded = super()._clipped(contribution, clip_norm)
        counters = self._setup.protection.contribution_mechanism.counters
        nothing = counters if self.member else list(bounded)
        return bounded | {name: torch.zeros(bounded[name].shape) for name in nothing}

    def pulls(self, request: Request) -> Tensors:
        """Its contribution to a pass, without counters, noise and charge. The passes of a round must come in order."""
        if request.pass_name == request.plan.passes[0]:
            self._takes_part = True
            setup = self._setup
            self._before = setup.initial | request.tensors
            rng = np.random.default_rng(0)  # training along a direction does not use it
            trained = setup.train(setup.objective, setup.job(self._before, request, (), rng))
            self._after = trained.after.without(setup.personal)
        contribution = self._setup.method.contribute(request.pass_name, self._before, self._after, request.means)
        counters = self._setup.protection.contribution_mechanism.counters
        return self._clipped(contribution, request.clip_norm).without(counters)


def phantom_clients(
    config: RunConfig,
    units: Sequence[Unit],
    members: Sequence[bool] | NDArray[np.bool_],
    first: int,
    setup: ClientSetup,
    turns: Turns | None = None,
    around: Callable[[Train], Train] = lambda train: train,
) -> list[Phantom]:
    """A client for each phantom, with indices from `first`.

    turns: the rounds in which each takes part; without them, as `setup` allows. around: wraps their training function.
    """
    far, seed = length_beyond_clipping(config), config.federation.seed
    found = []
    for number, (unit, member) in enumerate(zip(units, members, strict=bool(units))):
        allowance = setup.allowance if turns is None else partial(turns.allowance, number)
        towards = around(trains_towards(unit.name, seed, far))
        own = replace(setup, train=towards, watch=None, allowance=allowance, attendance=None)
        found.append(Phantom(first + number, unit.name, own, member=bool(member)))
    return found


def phantom_examples(phantoms: AuditPool, members: NDArray[np.bool_]) -> dict[str, list[Any]]:
    """The member phantom examples of each client, by its name. The gradient of a non-member is zero."""
    found: dict[str, list[Any]] = {}
    for unit, member in zip(phantoms.units, members, strict=True):
        if member and phantoms.kind != "client":
            found.setdefault(unit.client, []).extend(unit.examples)
    return found
