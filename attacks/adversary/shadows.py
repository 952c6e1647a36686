"""Reference ("shadow") adapters: the same federated training with fresh coins over the audit pool.

A reference is the adapter that the run would have trained with other units of the pool as members (Shokri et al., 2017; Carlini
et al., 2022, arXiv 2112.03570, section IV-C): the same clients with the rest of their data, the same method, schedule, bounds
and noise, over the same base. Public randomness (without privacy, the order of examples and the cohorts) is the run's, because
an attacker knows `federation.seed`; secret randomness is drawn afresh for each reference. Noise comes from a seed: no reference
is ever released.

Coins. Every unit is a member of half of the references, drawn for each unit independently (the design of Carlini et al.). So
each reference has fair and independent coins, as the run has, and a unit has equally many "in" and "out" confidences. With an
odd number of references, a fair coin decides which side has one more. Equal examples share their coins, as in the run.

Differences from the run:
- There are no masks: contributions are summed without fixed-point rounding and without a limited range.
- Noise that clients would add in shares is added to the sum, with the standard deviation of all shares, those of dropped-out
  clients included.
- Nothing is charged and no ledger is opened. A client that has reached its limit of participations sits out, as in the run.
- Privacy is not accounted again: the noise is the run's, even where other members would have led to another plan.

References train in lockstep: the clients of all references that train in a round share passes over the base model (module
`cohort`). For that, a round of a reference is begun twice. `Reference.jobs` stops at the requests of the first pass and returns
the training job of each client, without a change to the clients; `Reference.round` computes the whole round with the results of
these jobs. Both draw the same cohort, order and coins, because all randomness comes from seeds. Where training steps have noise
(privacy for examples or persons), and where a function of the user's trains, every client trains by itself, on request.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from attacks.adversary.null import Bools, Floats
from privacy.distributed import DistributedGaussian
from privacy.entropy import SeededEntropy, Stream
from privacy.mechanisms import Gaussian, Named
from secure_fed.errors import UsageError
from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.learning.data.audit_unit import plain
from secure_fed.learning.data.encode import without_aside
from secure_fed.learning.data.fingerprint import content
from secure_fed.learning.training.common_passes.trainings import Ways, train_together
from secure_fed.learning.training.local import Job, Trained, scheduled_lr
from secure_fed.learning.training.local_function import trainer_of
from secure_fed.methods.method import State
from secure_fed.rounds.client import Client, ClientSetup
from secure_fed.rounds.cohort import cohort_sampler, vacancies
from secure_fed.rounds.dummies import canary_setups, dummy_clients, dummy_examples
from secure_fed.rounds.engine import charges_nothing, run_round
from secure_fed.rounds.masked.wiring import in_process
from secure_fed.rounds.placement import SUM
from secure_fed.rounds.protection import Protection
from secure_fed.rounds.server import Server
from secure_fed.rounds.sums import OpenSum
from secure_fed.rounds.transport import Reply, Request, Transport
from secure_fed.runs.assembly import Assembly
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Tensors

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class References:
    """Reference adapters of a federation.

    inside: (references, units), whether the unit was a member of the reference. states: the last global state of each
    reference. why_not_together: why some clients trained one after the other; empty if all shared passes.
    """

    inside: Bools
    states: list[Tensors]
    why_not_together: str = ""


@dataclass
class SharedReferences:
    """Reference adapters of one audit, trained on first use and then shared by all attacks and vantages.

    rounds: the rounds that the run completed, if it ended early.
    """

    assembly: Assembly
    seed: int = 0
    progress: Progress | None = None
    rounds: int | None = None
    _made: dict[int, References] = field(default_factory=dict)
    _read: dict[int, Floats] = field(default_factory=dict)

    def __call__(self, count: int) -> References:
        if count not in self._made:
            self._made[count] = references(self.assembly, count, self.seed, self.progress, rounds=self.rounds)
        return self._made[count]

    def confidences(self, count: int, of_one: Callable[[Tensors], Floats]) -> Floats:
        """(references, examples) `of_one` of each reference, computed once and shared by all cases."""
        if count not in self._read:
            self._read[count] = np.stack([of_one(state) for state in self(count).states])
        return self._read[count]


def references(
    assembly: Assembly, count: int, seed: int, progress: Progress | None = None, *, rounds: int | None = None
) -> References:
    """`count` references with fair coins, all from `seed`.

    progress: called with the rounds done, over all references, and their total. rounds: the run's, if it ended early.
    """
    if count < 2:
        raise UsageError(
            f"{count} references cannot have a unit inside of one and outside of another; request at least 2"
        )
    if not assembly.audit_pool.units:
        raise UsageError(f"there are no units to train on or leave out at random: {assembly.audit_pool.why}")
    inside = coins(count, lots(assembly.audit_pool), np.random.default_rng([seed, _COINS]))
    return trained(assembly, inside, seed, progress, rounds=rounds)


def coins(count: int, lots: Sequence[int], rng: np.random.Generator) -> Bools:
    """(count, units): every unit is a member of half of the references, drawn for each lot independently."""
    fair = np.stack([rng.permutation(count) < (count + rng.integers(2)) // 2 for _ in range(max(lots) + 1)], axis=1)
    return np.asarray(fair[:, np.asarray(lots)])


def lots(held: AuditPool) -> list[int]:
    """(units,) numbers from 0, equal exactly for equal examples, so that copies of a held-out example are held out too."""
    numbers: dict[bytes, int] = {}
    contents = [
        content(without_aside(plain(unit.examples[0])))
        if held.of == "data" and held.kind == "example"
        else unit.name.encode()
        for unit in held.units
    ]
    return [numbers.setdefault(one, len(numbers)) for one in contents]


def trained(
    assembly: Assembly,
    inside: Bools,
    seed: int,
    progress: Progress | None = None,
    *,
    common: bool = True,
    rounds: int | None = None,
) -> References:
    """A reference for each row of `inside`, trained in lockstep or, without `common`, each client by itself."""
    planned, done = assembly.config.federation.rounds, 0
    rounds = planned if rounds is None else rounds
    common = common and not assembly.protection.placement.step_noise and assembly.local is None
    states: list[Tensors] = []
    ways = Ways()
    together = 1
    if common:  # all trained tensors of a round are in memory at once
        plan = assembly.method.plan(assembly.initial)
        numbers_each = assembly.initial.tensors.select(plan.trainable).numel
        together = max(1, _HELD // max(1, math.ceil(numbers_each * assembly.sampler.expected)))
    for start in range(0, len(inside), together):
        numbers = range(start, min(start + together, len(inside)))
        made = [Reference.of(assembly, inside[number], _seed_of(seed, number)) for number in numbers]
        for round_ in range(rounds):
            _round(made, scheduled_lr(assembly.config.training, round_, planned), ways if common else None)
            done += len(made)
            if progress is not None:
                progress(done, rounds * len(inside))
        states += [one.state.tensors for one in made]
    why_not = ways.why_not if common else "references were to be trained one after the other"
    return References(inside, states, why_not)


def _round(made: Sequence[Reference], lr: float, ways: Ways | None) -> None:
    """Compute one round of each reference."""
    if ways is None:
        for one in made:
            one.round(lr)
        return
    noted = [one.jobs(lr) for one in made]
    jobs = [job for own in noted for job in own.values()]
    assembly = made[0].assembly
    public = assembly.protection.placement.private
    found = iter(train_together(assembly.objective, jobs, ways, public=public))
    for one, own in zip(made, noted, strict=True):
        one.round(lr, {client: next(found) for client in own})


def _seed_of(seed: int, number: int) -> int:
    """The seed of the noise and the secret coins of one reference."""
    return int.from_bytes(hashlib.sha256(f"reference {number} of {seed}".encode()).digest()[:8], "big")


_COINS = 1
_HELD = 1 << 26  # trained numbers, 256 MB


@dataclass
class Reference:
    """A reference adapter in training; `state` is its current global state."""

    assembly: Assembly
    server: Server
    clients: list[Client]
    state: State

    @classmethod
    def of(cls, assembly: Assembly, inside: Bools, seed: int) -> Reference:
        """A reference whose members are the units `inside`; noise and secret coins come from `seed`."""
        data, dummies = assembly.pools["data"], assembly.pools["dummies"]
        of_data = assembly.audit_pool.of == "data"
        dealt = data.split(inside if of_data else data.members)
        beside = dummies.members if of_data else inside
        if not dealt.names:
            raise UsageError("a reference adapter leaves out all clients at random; lower evaluation.audit_fraction")
        protection = _protection(assembly.protection, seed)
        setup = _setup(assembly, protection)
        setups = canary_setups(assembly.config, data, setup)
        persons: Sequence[Sequence[str] | None] = dealt.persons or [None] * len(dealt.names)
        named = enumerate(zip(dealt.names, dealt.train, persons, strict=True))
        examples = dummy_examples(dummies, beside)
        clients: list[Client] = [
            Client(index, name, own, setups.get(name, setup), whose, examples.get(name, ()))
            for index, (name, own, whose) in named
        ]
        units = dummies.units if assembly.dummies else ()
        nobody = dummy_clients(assembly.config, units, beside, len(clients), setup)
        names = [*dealt.names, *(one.name for one in nobody)]
        skips = assembly.config.federation.nonfinite == "skip"
        server = replace(
            assembly.server,
            names=names,
            sampler=cohort_sampler(assembly.config, len(dealt.names), vacancies(dealt.names, data.names)),
            scoring=None,
            protection=protection,
            charge=charges_nothing,
            summing=OpenSum(dealt.names, skips, partial(PlainSum, precise=protection.placement.server_noise)),
            dummies=nobody,
        )
        return cls(assembly, server, clients, assembly.initial)

    def jobs(self, lr: float) -> dict[int, Job]:
        """The jobs of the next round by the number of the client, in the order of its requests."""
        found: dict[int, Job] = {}
        asked: Any = [_Asked(client, found) for client in self.clients]
        with suppress(_AskedError):
            run_round(self.state, self.server, _NoFurther(in_process(self.assembly.config, asked, None)), lr)
        return found

    def round(self, lr: float, trained: Mapping[int, Trained] | None = None) -> None:
        """Compute the next round. trained: the results of its jobs; every other client trains on request.

        The transport is like the run's, new for every round: seed and round decide which clients drop out.
        """
        config, ready = self.assembly.config, dict(trained or {})
        capped = config.secure_aggregation.enabled and config.federation.weighting == "examples"
        most = float(config.secure_aggregation.most_examples) if capped else math.inf
        participants: Any = [_Participant(client, most, ready) for client in self.clients]
        self.state, _ = run_round(self.state, self.server, in_process(config, participants, None), lr)
        if ready:
            raise RuntimeError("the second computation of a reference's round used other clients than the first")


def _protection(real: Protection, seed: int) -> Protection:
    """The run's protection, with noise from a seed; clients' shares of noise are added to the sum instead."""
    seeded = replace(real, entropy=SeededEntropy(seed))
    if real.correlated is not None:
        seeded = replace(seeded, correlated=replace(real.correlated).open(seeded.entropy))
    if real.shares is None:
        return seeded
    shares = _AllShares(real.shares.noise_multiplier, real.shares, real.shares.contributors)
    return replace(seeded, placement=SUM, hidden=False, mechanism=shares)


def _setup(assembly: Assembly, protection: Protection) -> ClientSetup:
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
        person_examples=config.privacy.person_examples,
        allowance=_Allowance(math.inf if plan is None or plan.participations is None else plan.participations),
        train=trainer_of(assembly.local),
        last=assembly.problem.last,
        ranks=config.method.ranks_by_name,
    )


class _AskedError(Exception):
    """Every participant of the round was requested to train."""


@dataclass(frozen=True)
class _Asked:
    """A client that adds its job to `jobs`, and leaves the round."""

    client: Client
    jobs: dict[int, Job]

    def handle(self, request: Request) -> None:
        if (job := self.client.job(request)) is not None:
            self.jobs[self.client.index] = job


@dataclass(frozen=True)
class _Participant:
    """A client that takes the result of its job from `ready`. most: the largest weight that a masked sum allows."""

    client: Client
    most: float
    ready: dict[int, Trained]

    def handle(self, request: Request) -> Reply:
        if self.client.index in self.ready:
            self.client.train_ahead(request, self.ready.pop(self.client.index))
        reply = self.client.handle(request)
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
