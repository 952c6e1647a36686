"""The parties of a federation before masks: its clients, its phantoms and its server, each with what it may know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from privacy.sampling import Attendance, PublicOrder, Sampler
from secure_fed.config import RunConfig
from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.learning.problem import Problem
from secure_fed.learning.training.cohort.trainings import clients_at_once
from secure_fed.learning.training.local import Train, train
from secure_fed.rounds.client import Client, ClientSetup, Joined, Registered
from secure_fed.rounds.cohort import phantom_sampler
from secure_fed.rounds.diagnostics import Watch
from secure_fed.rounds.engine import Charges, charges_nothing
from secure_fed.rounds.phantoms import Phantom, PhantomScores, canary_setups, phantom_clients, phantom_examples
from secure_fed.rounds.protection import Protection
from secure_fed.rounds.request_checks import Acceptable
from secure_fed.rounds.server import Server, Turns, turns_of
from secure_fed.rounds.server_optimizer import ServerOptimizer, Tail
from secure_fed.rounds.sums import OpenSum, empty_sum
from secure_fed.rounds.transport import Together
from secure_fed.runs.start import Start


@dataclass(frozen=True)
class Parties:
    """All parties of a federation without secure aggregation.

    setup: shared by all clients. phantoms: clients without data, indexed after `clients`. server: sums in the open.
    """

    charges: Charges
    attendance: Attendance | None
    setup: ClientSetup
    clients: Sequence[Client]
    phantoms: Sequence[Phantom]
    server: Server

    @property
    def everybody(self) -> Sequence[Client]:
        """The clients, then the phantoms."""
        if isinstance(self.clients, Registered):
            return Joined(self.clients, self.phantoms)
        return [*self.clients, *self.phantoms]


def parties_of(start: Start, protection: Protection, pool: AuditPool, watched: Watch | None, train: Train) -> Parties:
    """The parties over a start. pool: the phantoms, as units. watched: observes clients' training. train: local training."""
    config, problem, charges = start.config, start.problem, Charges()
    attendance = _attendance(config, protection, start.sampler)
    setup = replace(_setup(start, protection, charges, watched, attendance), train=train)
    clients = _clients(start, pool, setup)
    server = _server(config, problem, pool, start.sampler, charges, setup)
    turns = _turns(problem.names, pool, server, len(start.plan.passes))
    beside = _phantom_clients(config, pool, len(clients), setup, turns)
    server = replace(server, scoring=_scoring(config, pool, setup, turns))
    return Parties(charges, attendance, setup, clients, beside, server)


def trainer(config: RunConfig, setup: ClientSetup, numbers: int) -> tuple[Together | None, int]:
    """The trainer of common passes, if clients share any, and the number of clients at once. numbers: that each client trains.

    Clients that train by a function of the user's share none.

    Where memory decides, the number is at least two: a client that trains alone for lack of memory also uses passes of public
    shapes.
    """
    at_once = config.training.together or max(2, clients_at_once(numbers, setup.objective.device))
    together = Together(setup.objective, setup.protection.placement.private, setup.ways)
    return (together if at_once > 1 and setup.train is train else None), at_once


def _attendance(config: RunConfig, protection: Protection, sampler: Sampler) -> Attendance | None:
    """The clients' record of their turns, where a guarantee relies on how seldom they take part.

    Clients that account for their own releases, and rounds without privacy, may be repeated after an interruption.
    """
    if isinstance(sampler, PublicOrder) and protection.placement.charges_federation:
        return Attendance(sampler, rounds_paid(config, protection))
    return None


def rounds_paid(config: RunConfig, protection: Protection) -> int:
    """The rounds that the plan pays for: fewer than the configuration's if the federation is charged, and for fewer only."""
    plan = protection.plan
    if plan is None or not protection.placement.charges_federation:
        return config.federation.rounds
    return min(config.federation.rounds, plan.releases // plan.passes)


def _setup(
    start: Start, protection: Protection, charges: Charges, watched: Watch | None, attendance: Attendance | None
) -> ClientSetup:
    """The setup that all clients share. watched: observes clients' training, where no guarantee forbids it."""
    config, problem = start.config, start.problem
    return ClientSetup(
        objective=start.objective,
        method=start.method,
        protection=protection,
        training=config.training,
        collate=problem.collate,
        initial=start.tensors,
        rounds=config.federation.rounds,
        personal=start.personal,
        by_examples=config.federation.weighting == "examples",
        seed=config.federation.seed,
        group_examples=config.privacy.group_examples,
        allowance=charges.allowance,
        watch=watched.see if watched and watched.local else None,
        attendance=attendance,
        acceptable=Acceptable.of(config, start.method, start.tensors, start.personal),
        last=problem.last,
        ranks=config.method.ranks_by_name,
    )


def _clients(start: Start, pool: AuditPool, setup: ClientSetup) -> Sequence[Client]:
    """A client for each part of the data, with its own examples and its phantom examples."""
    problem, setups = start.problem, canary_setups(start.config, start.held_out, setup)
    beside = phantom_examples(pool, pool.members)

    def client(index: int) -> Client:
        name, groups = problem.names[index], problem.groups
        group = None if groups is None else groups[index]
        return Client(index, name, problem.train[index], setups.get(name, setup), group, beside.get(name, ()))

    if problem.lazy:
        return Registered(len(problem.train), client)
    return [client(index) for index in range(len(problem.train))]


def _phantom_clients(config: RunConfig, pool: AuditPool, first: int, setup: ClientSetup, turns: Turns) -> list[Phantom]:
    """The phantom clients, unless phantoms are examples; indexed from `first`."""
    return phantom_clients(config, pool.units, pool.members, first, setup, turns) if pool.kind == "client" else []


def _server(
    config: RunConfig, problem: Problem, pool: AuditPool, sampler: Sampler, charges: Charges, setup: ClientSetup
) -> Server:
    """The server without secure aggregation. It gets no example."""
    settings, protection = config.federation, setup.protection
    beside = [unit.name for unit in pool.units] if pool.kind == "client" else []
    names, empty = [*problem.names, *beside], empty_sum(settings, precise=protection.placement.server_noise)
    tail = Tail.of(settings)
    tail.require_steady(setup.method)
    return Server(
        method=setup.method,
        protection=protection,
        sampler=sampler,
        optimizer=ServerOptimizer.of(settings),
        names=names,
        personal=setup.personal,
        seed=settings.seed,
        charge=charges.charge if protection.placement.charges_federation else charges_nothing,
        summing=OpenSum(names, len(problem.names), settings.nonfinite == "skip", empty),
        tail=tail,
        phantoms=phantom_sampler(sampler, len(beside)),
    )


def _turns(names: Sequence[str], pool: AuditPool, server: Server, passes: int) -> Turns:
    """The rounds in which phantoms take part, as far as they are public."""
    if pool.kind == "client":
        return turns_of(server, range(len(names), len(names) + len(pool.units)), passes)
    index = {name: number for number, name in enumerate(names)} if pool.units else {}
    return turns_of(server, [index[unit.client] for unit in pool.units], passes)


def _scoring(config: RunConfig, pool: AuditPool, setup: ClientSetup, turns: Turns) -> PhantomScores | None:
    """The membership scores of phantoms, from the contribution that each would send as a member."""
    echoes = phantom_clients(config, pool.units, np.ones(len(pool.units), dtype=bool), 0, setup)
    known = not setup.protection.placement.step_noise
    return PhantomScores(echoes, turns, config.federation.seed, known) if echoes else None
