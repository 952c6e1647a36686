"""The clients and the server of a federation, each with what it needs of the rest and no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from secure_fed.rounds.canary_clients import canary_benches
from secure_fed.rounds.client import Client, Workbench
from secure_fed.rounds.cohort import phantom_sampler
from secure_fed.rounds.phantom_clients import Phantom, Turns, phantom_clients, phantom_examples
from secure_fed.rounds.phantom_scores import PhantomScores
from secure_fed.rounds.server import Server
from secure_fed.rounds.server_optimizer import ServerOptimizer
from secure_fed.rounds.summing import OpenSum
from secure_fed.runs.budget import charges_nothing
from secure_fed.tensors.sums import PlainSum

if TYPE_CHECKING:
    from secure_fed.federation import Federation


def workbench(federation: Federation, personal: tuple[str, ...]) -> Workbench:
    """What all clients share; personal: names of tensors that stay with them."""
    config, parts, watch = federation.config, federation.parts, federation.watch
    return Workbench(
        objective=federation.objective,
        method=federation.method,
        protection=federation.protection,
        training=config.training,
        collate=parts.collate,
        initial=federation.initial.tensors,
        personal=personal,
        by_examples=config.federation.weighting == "examples",
        seed=config.federation.seed,
        group_examples=config.privacy.group_examples,
        allowance=federation.purse.allowance,
        watch=watch.see if watch and watch.local else None,
    )


def clients(federation: Federation, bench: Workbench) -> list[Client]:
    """One for each part of the data, all on one bench, with the phantom examples that stand beside its own."""
    parts, phantoms = federation.parts, federation.pools["phantoms"]
    groups: Sequence[Sequence[str] | None] = parts.groups or [None] * len(parts.train)
    named = zip(parts.names, parts.train, groups, strict=True)
    benches = canary_benches(federation.config, federation.pools["data"], bench)
    beside = phantom_examples(phantoms, phantoms.members)
    return [
        Client(index, name, own, benches.get(name, bench), group, beside.get(name, ()))
        for index, (name, own, group) in enumerate(named)
    ]


def phantoms(federation: Federation, bench: Workbench) -> list[Phantom]:
    """The clients that are nobody, their indices after those of the clients."""
    pool = federation.pools["phantoms"]
    if pool.kind != "client":
        return []
    first = len(federation.parts.names)
    return phantom_clients(federation.config, pool.units, pool.members, first, bench, federation.turns)


def turns(federation: Federation, draw: Callable[[int], list[int]], passes: int) -> Turns:
    """Which turns phantoms take, as everybody knows it. draw: of the server."""
    protection, phantoms, names = federation.protection, federation.pools["phantoms"], federation.parts.names
    if phantoms.kind == "client":
        hosts: Sequence[int] = range(len(names), len(names) + len(phantoms.units))
    else:
        index = {name: number for number, name in enumerate(names)}
        hosts = [index[unit.client] for unit in phantoms.units]
    secret = protection.hides_cohort or protection.hidden
    plan = protection.plan
    most = math.inf if plan is None or plan.participations is None else plan.participations
    if protection.placement.own_noise and plan is not None:
        most = min(plan.limits.values()) // passes
    return Turns(federation.sampler.rate, hosts, None if secret else draw, most)


def server(federation: Federation, personal: tuple[str, ...], bench: Workbench) -> Server:
    """The one that sums; it is given no example, and of a masked sum no summand."""
    settings, protection, phantoms = federation.config.federation, federation.protection, federation.pools["phantoms"]
    echoes = phantom_clients(federation.config, phantoms.units, np.ones(len(phantoms.units), dtype=bool), 0, bench)
    known = not protection.placement.step_noise
    names = [*federation.parts.names, *(one.name for one in federation.phantoms)]
    empty = partial(PlainSum, precise=protection.placement.server_noise)
    in_the_open = OpenSum(names, len(federation.parts.names), settings.nonfinite == "skip", empty)
    return Server(
        method=federation.method,
        protection=protection,
        sampler=federation.sampler,
        optimizer=ServerOptimizer.of(settings),
        names=names,
        personal=personal,
        seed=settings.seed,
        charge=federation.purse.charge if protection.placement.charges_federation else charges_nothing,
        summing=federation.masks.sums if federation.masks else in_the_open,
        phantoms=phantom_sampler(federation.sampler, len(federation.phantoms)),
        scoring=PhantomScores(echoes, federation.turns, settings.seed, known) if echoes else None,
    )
