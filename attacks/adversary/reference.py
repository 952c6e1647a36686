"""One reference federation: the run's, with other members. It releases nothing and charges nothing.

A round is computed twice. `noted` stops at each client's training and returns the training jobs. `round` computes the whole
round, with the results of these jobs or with clients that train on request. Both draw the same cohort, order and coins, because
these come from seeds; `noted` does not change the clients.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from privacy.distributed import DistributedGaussian
from privacy.entropy import SeededEntropy, Stream
from privacy.mechanisms import Gaussian, Named
from secure_fed.errors import UsageError
from secure_fed.learning.training.local import Job, Train, Trained
from secure_fed.learning.training.local_function import trainer_of
from secure_fed.learning.training.objective import Objective
from secure_fed.methods.method import State
from secure_fed.rounds.canary_clients import canary_setups
from secure_fed.rounds.charges import charges_nothing
from secure_fed.rounds.client import Client
from secure_fed.rounds.client_setup import ClientSetup
from secure_fed.rounds.cohort import cohort_sampler, vacancies
from secure_fed.rounds.engine import run_round
from secure_fed.rounds.masked.wiring import in_process
from secure_fed.rounds.noise.placement import SUM
from secure_fed.rounds.phantoms.clients import phantom_clients, phantom_examples
from secure_fed.rounds.protection import Protection
from secure_fed.rounds.server import Server
from secure_fed.rounds.summing import OpenSum
from secure_fed.rounds.transport import Reply, Request, Transport
from secure_fed.runs.assembly import Assembly
from secure_fed.tensors.sums import PlainSum


@dataclass
class Reference:
    """A reference adapter in training; `state` is its current global state."""

    assembly: Assembly
    server: Server
    clients: list[Client]
    desk: Desk
    state: State

    @classmethod
    def of(cls, assembly: Assembly, inside: NDArray[np.bool_], seed: int) -> Reference:
        """A reference whose members are the units `inside`; noise and secret coins come from `seed`."""
        desk, data, phantoms = Desk(trainer_of(assembly.local)), assembly.pools["data"], assembly.pools["phantoms"]
        of_data = assembly.audit_pool.of == "data"
        dealt = data.split(inside if of_data else data.members)
        beside = phantoms.members if of_data else inside
        if not dealt.names:
            raise UsageError("the coins of a reference leave no client to train; lower evaluation.audit_fraction")
        protection = _protection(assembly.protection, seed)
        setup = _setup(assembly, protection, desk)
        canaries = canary_setups(assembly.config, data, setup)
        setups = {name: replace(own, train=desk.beside(own.train)) for name, own in canaries.items()}
        groups: Sequence[Sequence[str] | None] = dealt.groups or [None] * len(dealt.names)
        named = enumerate(zip(dealt.names, dealt.train, groups, strict=True))
        examples = phantom_examples(phantoms, beside)
        clients: list[Client] = [
            Client(index, name, own, setups.get(name, setup), group, examples.get(name, ()))
            for index, (name, own, group) in named
        ]
        units = phantoms.units if assembly.phantoms else ()
        nobody = phantom_clients(assembly.config, units, beside, len(clients), setup, around=desk.beside)
        clients += nobody
        names = [*dealt.names, *(one.name for one in nobody)]
        skips = assembly.config.federation.nonfinite == "skip"
        server = replace(
            assembly.server,
            names=names,
            sampler=cohort_sampler(assembly.config, len(dealt.names), vacancies(dealt.names, data.names)),
            scoring=None,
            protection=protection,
            charge=charges_nothing,
            summing=OpenSum(
                names, len(dealt.names), skips, partial(PlainSum, precise=protection.placement.server_noise)
            ),
        )
        return cls(assembly, server, clients, desk, assembly.initial)

    def noted(self, lr: float) -> list[Job]:
        """The jobs of the next round, in the order of its requests."""
        self.desk.clear()
        with suppress(_AskedError):
            run_round(self.state, self.server, _NoFurther(self._transport()), lr)
        return list(self.desk.noted)

    def round(self, lr: float, trained: Sequence[Trained] | None = None) -> None:
        """Compute the next round. trained: the results of the noted jobs; None: every client trains on request."""
        self.desk.lay_out(trained)
        self.state, _ = run_round(self.state, self.server, self._transport(), lr)

    def _transport(self) -> Transport:
        """A transport like the run's, new for every round: seed and round decide which clients drop out."""
        config = self.assembly.config
        capped = config.secure_aggregation.enabled and config.federation.weighting == "examples"
        most = float(config.secure_aggregation.most_examples) if capped else math.inf
        participants: Any = [_Participant(client, most) for client in self.clients]
        return in_process(config, participants, None)


class Desk:
    """Replaces the clients' training function: it notes the job, or returns the job's known result, or trains at once."""

    def __init__(self, by: Train) -> None:
        self._by = by
        self.noted: list[Job] = []
        self._notes = False
        self._ready: deque[tuple[Job, Trained]] | None = None

    def clear(self) -> None:
        """From now on, note jobs."""
        self.noted, self._notes, self._ready = [], True, None

    def lay_out(self, trained: Sequence[Trained] | None) -> None:
        """From now on, return these results of the noted jobs; with None, train."""
        self._notes = False
        self._ready = None if trained is None else deque(zip(self.noted, trained, strict=True))
        self.noted = []

    def train(self, objective: Objective, job: Job) -> Trained:
        """Local training: noted, returned, or done."""
        if self._notes:
            self.noted.append(job)
            raise _NotedError
        if self._ready is None:
            return self._by(objective, job)
        noted, trained = self._ready.popleft()
        if noted.examples is not job.examples:
            raise RuntimeError("the second computation of a reference's round used other clients than the first")
        return trained

    def beside(self, train: Train) -> Train:
        """`train` for a client that does not learn from its examples: there is no job to note."""

        def requested(objective: Objective, job: Job) -> Trained:
            if self._notes:
                raise _NotedError
            return train(objective, job)

        return requested


class _NotedError(Exception):
    """A client's training job was noted; the client stops here."""


class _AskedError(Exception):
    """Every participant of the round was requested to train."""


@dataclass(frozen=True)
class _Participant:
    """A client that sends nothing where its job is only noted. most: the largest weight that a masked sum allows."""

    client: Client
    most: float

    def handle(self, request: Request) -> Reply | None:
        try:
            reply = self.client.handle(request)
        except _NotedError:
            return None
        return replace(reply, weight=min(reply.weight, self.most))


@dataclass(frozen=True)
class _NoFurther:
    """A transport that stops after one exchange."""

    inner: Transport

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        for _ in self.inner.exchange(requests):
            pass
        raise _AskedError


@dataclass(frozen=True)
class _AllShares(Gaussian):
    """Adds to a sum the noise of all clients' shares together."""

    shares: DistributedGaussian
    bring: int

    def noised(self, total: Named, clip_norm: float, stream: Stream) -> dict[str, Tensor]:
        dim = sum(tensor.numel() for tensor in total.values())
        return Gaussian(self.shares.std(1.0, dim, self.bring)).noised(total, clip_norm, stream)


@dataclass
class _Allowance:
    """Grants the requested count in at most `most` rounds for each client, and 0 in later rounds. A round counts once."""

    most: float
    rounds: dict[str, set[int]] = field(default_factory=dict)

    def __call__(self, who: str, wanted: int, round_: int) -> int:
        taken = self.rounds.setdefault(who, set())
        if round_ not in taken and len(taken) >= self.most:
            return 0
        taken.add(round_)
        return wanted


def _protection(real: Protection, seed: int) -> Protection:
    """The run's protection, with noise from a seed; clients' shares of noise are added to the sum instead."""
    seeded = replace(real, entropy=SeededEntropy(seed))
    if real.correlated is not None:
        seeded = replace(seeded, correlated=replace(real.correlated).open(seeded.entropy))
    if real.shares is None:
        return seeded
    shares = _AllShares(real.shares.noise_multiplier, real.shares, real.shares.contributors - real.beside)
    return replace(seeded, placement=SUM, hidden=False, mechanism=shares)


def _setup(assembly: Assembly, protection: Protection, desk: Desk) -> ClientSetup:
    config, plan = assembly.config, assembly.protection.plan
    return ClientSetup(
        objective=assembly.objective,
        method=assembly.method,
        protection=protection,
        training=config.training,
        collate=assembly.problem.collate,
        initial=assembly.initial.tensors,
        rounds=config.federation.rounds,
        personal=assembly.server.personal,
        by_examples=config.federation.weighting == "examples",
        seed=config.federation.seed,
        group_examples=config.privacy.group_examples,
        allowance=_Allowance(math.inf if plan is None or plan.participations is None else plan.participations),
        train=desk.train,
        last=assembly.problem.last,
        ranks=config.method.ranks_by_name,
    )
