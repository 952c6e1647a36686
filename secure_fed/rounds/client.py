"""A client: it holds its examples, trains on them, and sends a bounded change.

`ClientSetup` is what all clients of one process share. `Together` trains a round's clients of one process before they answer.
`clipped` is the bound on what one client can change, before any noise. `Registered` makes the clients of a large federation
when they are drawn.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, overload

import numpy as np
import torch

from privacy.participation import Attendance
from secure_fed.config import TrainingConfig
from secure_fed.errors import ConfigError, DataError, MethodError
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.common_passes.trainings import Ways, train_together
from secure_fed.learning.training.local import Falling, Job, PrivateSteps, Train, Trained, planned_steps, train
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.trials import parameters_stay
from secure_fed.methods.method import Contextual, Method, RoundPlan, State
from secure_fed.rounds.client_models import part, whole
from secure_fed.rounds.protection import Protection
from secure_fed.rounds.request_checks import Acceptable
from secure_fed.rounds.transport import Reply, Request
from secure_fed.tensors.tensors import Layout, LayoutError, Tensors

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClientSetup:
    """The part of a client that all clients of one process share: the frozen base inside the objective, and the settings.

    initial: the state that `method.prepare` made, which every party can compute.
    personal: names of trained tensors that never leave their client. allowance: called with a client's name, a number of
    releases and the round; charges up to this number, as many as the client has left, durably, and returns the charged number.
    watch: receives the tensors before and after every training, and the client's weight; None where a guarantee forbids that.
    train: local training without noise in its steps, `local.train` or an equivalent. ways: the measured facts about common
    passes. attendance: the rounds that clients took part in, where a public order fixes their turns. acceptable: the bounds on
    requests. last: the names of the head's last layer. rounds: of the run. ranks: by the name of a client, the number of ranks
    that it trains, if it may not be all.
    """

    objective: Objective
    method: Method
    protection: Protection
    training: TrainingConfig
    collate: Collate
    initial: Tensors
    rounds: int
    personal: tuple[str, ...]
    by_examples: bool
    seed: int
    person_examples: int
    allowance: Callable[[str, int, int], int]
    watch: Callable[[Tensors, Tensors, float], None] | None = None
    train: Train = train
    ways: Ways = field(default_factory=Ways)
    attendance: Attendance | None = None
    acceptable: Acceptable | None = None
    last: tuple[str, ...] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)

    def job(
        self, before: Tensors, request: Request, examples: Sequence[Any], rng: np.random.Generator, name: str = ""
    ) -> Job:
        """The local training that a request asks for. name: of a client, which may train a part of the ranks."""
        falling = Falling(self.training, request.round, self.rounds)
        trainable, round_ = request.plan.trainable, request.round
        made = Job(before, trainable, examples, self.collate, self.training, request.lr, rng, round=round_)
        job = replace(made, last=self.last, falling=falling)
        if name not in self.ranks:
            return job
        return replace(job, before=part(before, self.ranks[name]), whole=Layout.of(before.select(trainable)))


@dataclass(eq=False, repr=False)
class Client:
    """A client of the federation.

    kept: its personal tensors, once it has trained; it keeps nothing else between rounds. persons: the person of each example,
    where privacy is for persons. dummies: examples that are nobody's data, drawn beside its own.
    """

    index: int
    name: str
    examples: Sequence[Any]
    _setup: ClientSetup
    persons: Sequence[Any] | None = None
    dummies: Sequence[Any] = ()
    kept: Tensors | None = field(default=None, init=False)
    _before: Tensors = field(default_factory=Tensors, init=False)
    _after: Tensors = field(default_factory=Tensors, init=False)
    _loss: float = field(default=math.nan, init=False)
    _takes_part: bool = field(default=True, init=False)
    _due: list[tuple[int, str]] = field(default_factory=list, init=False)
    _ahead: tuple[Request, Trained] | None = field(default=None, init=False)
    _planned: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self._setup.protection.placement.step_noise:
            self._planned = len(self.examples)

    @property
    def personal(self) -> Tensors:
        """The personal tensors; until the client trains, the tensors of the initial state."""
        return self._setup.initial.select(self._setup.personal) if self.kept is None else self.kept

    @cached_property
    def _context(self) -> Tensors:
        """Tensors that the method computes from this client's own data. They never leave it.

        All of a client's examples influence them, and through them the gradient of each example. Where examples are protected
        there must be none.
        """
        setup, method = self._setup, self._setup.method
        made = method.context(setup.initial, self.examples) if isinstance(method, Contextual) else Tensors()
        if made and setup.protection.placement.step_noise:
            raise ConfigError(
                f"{method.card.name} makes {next(iter(made))!r} of all of a client's examples, so that it cannot protect "
                f"privacy.unit = {setup.protection.unit!r}: set privacy.unit = 'client'"
            ).about("privacy.unit", setup.protection.unit, "'client'")
        return made

    def job(self, request: Request) -> Job | None:
        """The local training for this request, if it may be done outside this client; `train_ahead` takes its result.

        None for a request that `handle` refuses. Private steps are charged here: a job is one training, for one answer.
        """
        private = self._setup.protection.placement.step_noise
        if request.plan != self._plan(request.round) or request.pass_name != request.plan.passes[0]:
            return None
        if self._setup.train is not train and not private:
            return None
        if self._setup.acceptable is not None and self._setup.acceptable.fault(request):
            return None
        if self._setup.attendance is not None and not self._setup.attendance.admits(self.index, request.round):
            return None
        job = self._job(self._start(request), request)
        return self._charged(job, request) if private else job

    def like(self, examples: Sequence[Any], **setup: Any) -> Client:
        """A client with the same index and other examples, for simulations. setup: changes to its setup."""
        return Client(self.index, self.name, examples, replace(self._setup, **setup))

    def train_ahead(self, request: Request, trained: Trained) -> None:
        """Take the result of `job(request)`, for the answer to this request."""
        self._ahead = request, trained

    def handle(self, request: Request) -> Reply:
        """Answer one linear pass; the first pass of a round trains, the later ones contribute from its result."""
        setup = self._setup
        self._require_due(request)
        if request.pass_name == request.plan.passes[0]:
            self._train(request)
        contribution = setup.method.contribute(request.pass_name, self._before, self._after, request.means)
        if request.pass_name == request.plan.passes[-1]:
            self._before = self._after = Tensors()
        sent = self._bounded(contribution, request)
        if Layout.of(sent).digest != request.layout:
            state = State(setup.initial | request.tensors, round=request.round)
            own = setup.protection.layout(setup.method, state, request.pass_name, setup.personal)
            odd = Layout.of(sent).differing(own) or "their layouts of it differ"
            raise LayoutError(
                f"client {self.name} and the server disagree on the content of pass {request.pass_name!r}: {odd}"
            )
        return Reply(self.index, sent, self._weight if self._takes_part else 0.0, self._loss)

    @property
    def _weight(self) -> float:
        """The client's weight in a mean."""
        return float(len(self.examples)) if self._setup.by_examples else 1.0

    def _plan(self, round_: int) -> RoundPlan:
        return self._setup.method.plan(State(self._setup.initial, round=round_))

    def _require_due(self, request: Request) -> None:
        """Require the passes of a round in order, each once for one training, as charged.

        A repeated request would draw fresh noise without a charge.
        """
        plan = self._plan(request.round)
        if (request.plan.passes, request.plan.trainable) != (plan.passes, plan.trainable):
            raise MethodError(
                f"the request to client {self.name} has another plan of passes than {self._setup.method.card.name}"
            )
        if self._setup.acceptable is not None:
            self._setup.acceptable.require(request, self.name)
        if request.pass_name == plan.passes[0]:
            if self._setup.attendance is not None:  # refuses a round out of turn, and records the turn
                self._setup.attendance.enter(self.index, request.round)
            self._due = [(request.round, name) for name in plan.passes]
        if not self._due or self._due.pop(0) != (request.round, request.pass_name):
            raise MethodError(f"the request to client {self.name} for pass {request.pass_name!r:.40} is out of turn")

    def _bounded(self, contribution: Tensors, request: Request) -> Tensors:
        """The clipped contribution with the mechanism's counters, and with noise if the client adds it.

        A contribution for which no budget is left is zeros.
        """
        protection = self._setup.protection
        bounded = self._clipped(contribution, request.clip_norm)
        if protection.placement.own_noise and self._takes_part:
            stream = protection.entropy.stream("contribution", request.round, request.pass_name, self.index)
            return Tensors(protection.contribution_mechanism.noised(bounded.dense().parts(), request.clip_norm, stream))
        return bounded

    def _clipped(self, contribution: Tensors, clip_norm: float) -> Tensors:
        """The contribution with the mechanism's counters, before any noise.

        The counters are zero if the client sends nothing, or has no data: with and without its data the count then differs by
        at most 1/2, as the mechanism assumes.
        """
        protection = self._setup.protection
        bounded = clipped(contribution, clip_norm, protection, nothing=not self._takes_part)
        if self._takes_part and len(self.examples):
            return bounded
        return bounded | {name: torch.zeros(()) for name in protection.contribution_mechanism.counters}

    def _train(self, request: Request) -> None:
        setup = self._setup
        self._before = self._start(request)
        trained = self._trained(request)
        after = whole(trained.after, self._before)
        latest = self.personal | after
        # Copies, since other clients have views of the same tensors.
        own = Tensors((name, latest.tensor(name).clone()) for name in setup.personal)
        if own.is_finite():  # tensors that diverged are not kept for the next round
            self.kept = own
        self._after = after.without(setup.personal)
        self._loss = math.nan if setup.protection.placement.private else trained.loss
        if setup.watch is not None:
            setup.watch(self._before, self._after, self._weight)

    def _start(self, request: Request) -> Tensors:
        """The tensors that training starts from."""
        return self._setup.initial | request.tensors | self.personal | self._context

    def _job(self, start: Tensors, request: Request) -> Job:
        return self._setup.job(start, request, self.examples, self._rng(request.round), self.name)

    def _charged(self, job: Job, request: Request) -> Job:
        """The job with private steps, as many as the client's budget has left.

        DataError if the number of examples is not the planned one: each would be drawn with another probability.
        """
        setup, protection = self._setup, self._setup.protection
        if len(self.examples) != self._planned:
            raise DataError(
                f"client {self.name} has {len(self.examples)} examples, and its noise was planned for {self._planned}: leave "
                "the data set as it is until the run has ended"
            ).about("train", len(self.examples), f"{self._planned} examples of {self.name}")
        units = len(set(self.persons)) if self.persons is not None else len(self.examples)
        count = setup.allowance(self.name, planned_steps(units, setup.training), request.round)
        self._takes_part = count > 0
        stream = protection.entropy.stream("gradients", request.round, self.index)
        steps = PrivateSteps(
            protection.mechanism, request.clip_norm, count, stream, self.persons, setup.person_examples, self.dummies
        )
        return replace(job, private=steps)

    def _taken(self, request: Request) -> Trained | None:
        """The result trained ahead, if it was for this request."""
        (asked, trained), self._ahead = self._ahead or (None, None), None
        if asked is None or asked.tensors is not request.tensors:
            return None
        return trained if _terms(asked) == _terms(request) else None

    def _trained(self, request: Request) -> Trained:
        """The result of local training, made now unless it was made ahead."""
        setup, protection = self._setup, self._setup.protection
        if protection.placement.own_noise:
            passes = len(request.plan.passes)
            self._takes_part = setup.allowance(self.name, passes, request.round) == passes
        if (taken := self._taken(request)) is not None:
            return taken
        job = self._job(self._before, request)
        if protection.placement.step_noise:
            return train_together(setup.objective, [self._charged(job, request)], setup.ways)[0]
        if not protection.placement.private:
            return setup.train(setup.objective, job)
        with parameters_stay(setup.objective, job.before.parts()):
            return setup.train(setup.objective, job)

    def _rng(self, round_: int) -> np.random.Generator:
        """The generator of order, dropout, and the choice of a person's examples: seeded without privacy, secret with it.

        These numbers are drawn in sequence, by the positions of clients and examples. If they were public, one unit more or
        less would change the numbers of all other units, and so the sum by more than one unit's share. Drawn in secret, the
        other units' numbers have the same distribution with this unit and without it.
        """
        protection = self._setup.protection
        if not protection.placement.private:
            return np.random.default_rng([self._setup.seed, round_, self.index])
        secret = protection.entropy.stream("training", round_, self.index)
        return np.random.default_rng((secret.uniform(8) * 2**32).astype(np.int64).tolist())


@dataclass(frozen=True)
class Together:
    """`InProcess.prepare` that trains a round's clients of one process in common passes, before the clients answer.

    Only the arithmetic is shared. Each client alone receives its result, and does all further steps (clipping, noise, masks)
    itself. public: whether clients are protected; passes then have public shapes, so that one client's result does not depend
    on who else was drawn.
    """

    objective: Objective
    public: bool
    ways: Ways = field(default_factory=Ways)

    def __call__(self, some: Sequence[tuple[Any, Any]]) -> None:
        outside = [(one, request) for one, request in some if hasattr(one, "train_ahead")]  # may be trained outside it
        asked = [(participant, request, participant.job(request)) for participant, request in outside]
        theirs = [(participant, request, job) for participant, request, job in asked if job is not None]
        tried = len(self.ways.trials)
        found = train_together(self.objective, [job for _, _, job in theirs], self.ways, public=self.public)
        for trial in list(self.ways.trials.values())[tried:]:  # those made now
            if trial.why_not:
                _log.warning("clients train one after the other: %s", trial.why_not)
            else:
                _log.info("clients train in shared passes")
        for (participant, request, _), trained in zip(theirs, found, strict=True):
            participant.train_ahead(request, trained)


def clipped(contribution: Tensors, clip_norm: float, protection: Protection, *, nothing: bool) -> Tensors:
    """The contribution clipped in its mechanism's norm, with the mechanism's counters.

    nothing: send zeros, because no budget is left. Where contributions are clipped, one that is not finite becomes zeros, too.
    ConfigError for a mechanism whose `scale` does not keep to the clip norm.
    """
    mechanism = protection.contribution_mechanism
    if protection.placement.bounds_contribution:
        contribution = protection.measurable(contribution)
    norm = cache(partial(_norm, contribution, mechanism.order))
    factor = mechanism.scale(norm, clip_norm)
    if protection.given and factor != 0.0 and not abs(factor) * norm() <= clip_norm:  # a NaN fails too
        raise ConfigError(
            f"{type(mechanism).__name__}.scale makes contributions longer than the clip norm, which bounds what one client can "
            "change: return privacy.mechanisms.clip_factor(norm(), clip_norm), or less"
        ).about("mechanism", type(mechanism).__name__, "a scale that keeps contributions below the clip norm")
    if factor == 0.0 or nothing:
        contribution = Tensors((name, torch.zeros(shape)) for name, shape in Layout.of(contribution).entries)
    elif factor != 1.0:
        contribution = contribution * factor
    return contribution | mechanism.counted(norm, clip_norm)


def _norm(contribution: Tensors, order: float) -> float:
    """The norm over all tensors together, in float64."""
    if order == 2:
        return contribution.norm()
    flat = Layout.of(contribution).flatten(contribution, torch.float64)
    return float(torch.linalg.vector_norm(flat, order))


class Registered(Sequence[Client]):
    """The registered clients, of which only the needed ones exist as objects.

    A client is made by `make(index)` at its first access. It stays the same object until `let_go`, which keeps only clients
    with personal tensors: nothing else of a client outlives its round.
    """

    def __init__(self, count: int, make: Callable[[int], Client]) -> None:
        self._count = count
        self._make = make
        self._made: dict[int, Client] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Client: ...
    @overload
    def __getitem__(self, index: slice) -> list[Client]: ...
    def __getitem__(self, index: int | slice) -> Client | list[Client]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        number = range(self._count)[index]
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]

    @property
    def made(self) -> list[Client]:
        """The clients that exist, by their index."""
        return [self._made[index] for index in sorted(self._made)]

    def let_go(self) -> None:
        """Forget the clients that keep nothing between rounds."""
        self._made = {index: client for index, client in self._made.items() if client.kept}


def existing(clients: Sequence[Client]) -> Iterable[Client]:
    """The clients that may keep anything: all that exist."""
    return clients.made if isinstance(clients, Registered) else clients


def _terms(request: Request) -> tuple[object, ...]:
    return request.round, request.plan, request.lr, request.clip_norm
