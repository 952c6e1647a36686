"""One function, `assemble`, makes a federation that is ready to run.

    started      settled settings, the problem, and the method's tensors: the same for every party
    protect      the noise, the clip norm and the plan of a private run
    parties_of   clients, dummies and server, each with what it may know
    masks        around the clients, if secure aggregation is enabled

Every party is complete before its name exists in `assemble`, so no party can receive a half-made one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from privacy.entropy import Entropy
from privacy.mechanisms import Mechanism
from privacy.participation import Attendance, PublicOrder, Sampler
from secure_fed.activity import activity
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool.pool import AuditPool, dummies, hold_out
from secure_fed.learning.data.audit_unit import Plain
from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.models.architecture import positions_of, width_of
from secure_fed.learning.models.devices import device_of, find_devices
from secure_fed.learning.models.dropout_and_checkpointing import wanted
from secure_fed.learning.models.loading import digest_of, scores_tokens
from secure_fed.learning.problem import Problem
from secure_fed.learning.read_once import read_once
from secure_fed.learning.training.common_passes.parallel import copies_on
from secure_fed.learning.training.common_passes.trainings import Ways, clients_at_once
from secure_fed.learning.training.local import Train, train
from secure_fed.learning.training.local_function import LocalFunction, trainer_of
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.trial_results import user_file
from secure_fed.methods.method import LoraShaped, Method, RoundPlan, State, loss_of
from secure_fed.rounds.client import Client, ClientSetup, Registered, Together
from secure_fed.rounds.client_models import part, personal_names, require_ranks, require_shared_factors
from secure_fed.rounds.cohort import cohort_sampler, dummy_sampler, vacancies
from secure_fed.rounds.diagnostics import Watch, watch
from secure_fed.rounds.dummies import Dummy, DummyScores, canary_setups, dummy_clients, dummy_examples
from secure_fed.rounds.engine import Charges, charges_nothing
from secure_fed.rounds.local_function import require_function, require_trainable, require_undivided
from secure_fed.rounds.masked.wiring import Elsewhere, Masks, behind_masks, in_process
from secure_fed.rounds.open_settings import paced, reached, settled, unhurt
from secure_fed.rounds.protection import (
    Protection,
    own_mechanism,
    protect,
    require_by_trials,
    require_protectable,
    require_steady,
)
from secure_fed.rounds.request_checks import Acceptable
from secure_fed.rounds.server import Server, Turns, turns_of
from secure_fed.rounds.server_optimizer import ServerOptimizer, Tail
from secure_fed.rounds.sums import OpenSum, empty_sum
from secure_fed.rounds.transport import Transport
from secure_fed.tensors.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start is the same for every party, except for the examples in `problem`.

    config: with the local steps and the protection of clients settled. problem: without the units that an audit holds out,
    which are in `held_out`. base_digest: of the model before the method changed it. tensors: the initial tensors that the
    method adds to the model or trains in it; those in `personal` never leave their client. plan: of the first round. trained:
    the number of coordinates that a client trains and sends. sampler: of cohorts, without dummies.
    """

    config: RunConfig
    method: Method
    problem: Problem
    held_out: AuditPool
    base_digest: str
    tensors: Tensors
    personal: tuple[str, ...]
    plan: RoundPlan
    trained: int
    objective: Objective
    sampler: Sampler


@dataclass(frozen=True, kw_only=True)
class Parties:
    """All parties of a federation; as `parties_of` makes them, without secure aggregation.

    attendance: the clients' record of their turns, where a guarantee relies on how seldom they take part. setup: shared by all
    clients. dummies: clients without data, indexed after `clients`. server: sums in the open.
    """

    charges: Charges
    attendance: Attendance | None
    setup: ClientSetup
    clients: Sequence[Client]
    dummies: Sequence[Dummy]
    server: Server


@dataclass(frozen=True, kw_only=True)
class Assembly(Start, Parties):
    """A federation, put together and ready to run.

    pools: the units that an audit may test, some of which train: units held out of the "data", and "dummies", which are
    nobody's data. initial: the state before the first round. masks: both sides of secure aggregation, if it is enabled; the
    server then sums behind them. ways: how clients train in common passes. usual_rate: the server's learning rate without
    regard to the noise. everybody_here: whether all clients are in this process. local: the function by which they train, if it
    is the user's.
    """

    pools: Mapping[str, AuditPool]
    initial: State
    protection: Protection
    watch: Watch | None
    masks: Masks | None
    transport: Transport
    ways: Ways
    usual_rate: float
    everybody_here: bool
    local: LocalFunction | None

    @property
    def audit_pool(self) -> AuditPool:
        """The units that an audit tests: held-out units of the data, if there are any; else dummies, in a run that is private
        or that has them.
        """
        private = self.config.privacy.unit != "none" or bool(self.config.evaluation.dummies)
        return self.pools["dummies" if private and not self.pools["data"].units else "data"]

    @property
    def charges_every_release(self) -> bool:
        """Whether this process charges each release of the run before it is made; else other machines make some of them."""
        return self.everybody_here or self.protection.placement.charges_federation

    def require_by_trials(self) -> None:
        """Refuse, by trials on examples, a model or a loss for which the guarantee would not hold.

        Trials take time. So they come after everything that can be refused at once, and before budget is reserved: a run that
        a trial refuses has spent nothing. A function of the user's is not tried: each of its calls is checked.
        """
        if self.local is not None:
            return
        problem, plan, whole = self.problem, self.method.plan(self.initial), self.initial.tensors
        ranks = sorted(set(self.config.method.ranks_by_name.values()))
        if self.protection.placement.private:
            self.objective.kept.files = [file for file in [user_file()] if file is not None]
        for tensors in [part(whole, rank) for rank in ranks] or [whole]:
            require_by_trials(self.protection, self.objective, problem.here, problem.collate, plan, tensors)


def assemble(
    config: RunConfig,
    method: Method,
    whole: Problem,
    entropy: Entropy | None = None,
    mechanism: Callable[[float], Mechanism] | None = None,
    elsewhere: Elsewhere | None = None,
    *,
    masked: bool = True,
    local: LocalFunction | None = None,
) -> Assembly:
    """The federation of a configuration over a problem, `whole` with everybody's examples. Refuses impossible settings, except
    what only trials can show (`Assembly.require_by_trials`).

    mechanism: makes the user's own mechanism from a noise multiplier; by default that of `privacy.mechanism`. elsewhere:
    for a federation whose clients are on separate machines; the problem then has this machine's examples. masked: False leaves
    out the masks of secure aggregation, for a plan of the noise alone. local: the function by which the clients here train, in
    place of the steps of [training].
    """
    _require_choosable(config, whole.facts)
    mechanism = mechanism or own_mechanism(config)
    if local is not None:
        require_function(local)
        require_trainable(config, method)
        require_undivided(config, whole.model)
    steps = local is None or elsewhere is not None  # other machines have steps on whose rate all parties agree
    start, protection, pool, usual_rate = _protected(config, method, whole, entropy, mechanism, steps=steps)
    config, initial = start.config, State(start.tensors, clip_norm=protection.clip_norm)
    watched = watch(config, method, start.tensors, start.objective, start.problem)
    parties = parties_of(start, protection, pool, watched, trainer_of(local))
    masks = behind_masks(config, start.sampler, parties.clients, parties.setup, elsewhere) if masked else None
    if masks is not None:
        server = replace(parties.server, summing=masks.sums)
        sizes = [server.layout(initial, pass_name).size for pass_name in server.plan(initial).passes]
        masks.require_precise(sizes, protection.clip_norm, config.federation.rounds, server.sampler.expected)
        parties = replace(parties, server=server)
    return Assembly(
        **vars(start),
        **vars(parties),
        pools={"data": start.held_out, "dummies": pool},
        initial=initial,
        protection=protection,
        watch=watched,
        masks=masks,
        transport=in_process(config, parties.clients, masks, *_trainer(config, parties.setup, start.trained)),
        ways=parties.setup.ways,
        usual_rate=usual_rate,
        everybody_here=elsewhere is None,
        local=local,
    )


def _require_choosable(config: RunConfig, facts: Mapping[str, Any]) -> None:
    """ConfigError where the best of several models may not be chosen, or cannot be kept."""
    chosen = next((name for name in ("patience", "keep_best") if getattr(config.evaluation, name)), None)
    if chosen is None:
        return
    setting, value = f"evaluation.{chosen}", getattr(config.evaluation, chosen)
    if config.privacy.unit != "none" and not is_declared(facts["test"]["from"]):
        raise ConfigError(
            f"{setting} chooses by the test rows, which were held out of the protected rows, so the choice would reveal "
            "them: set data.test to rows that need no protection"
        ).about(setting, value, "a declared test set")
    if config.evaluation.keep_best and config.method.personal:
        raise ConfigError(
            "evaluation.keep_best keeps the shared model, and method.personal leaves part of it at the clients: leave one of "
            "them out"
        ).about("evaluation.keep_best", True, "no method.personal")


def _protected(
    config: RunConfig,
    method: Method,
    whole: Problem,
    entropy: Entropy | None,
    mechanism: Callable[[float], Mechanism] | None,
    *,
    steps: bool,
) -> tuple[Start, Protection, AuditPool, float]:
    """The start, its protection, the dummies, and the server's rate without noise; the start's server steps suit the noise.

    Refuses what cannot be protected. steps: see `settled`.
    """
    start = started(config, method, whole, own=mechanism is not None, steps=steps)
    config, problem, plan = start.config, start.problem, start.plan
    names, units, passes = problem.names, problem.units, len(plan.passes)
    protection = protect(config, method.card, names, units, start.sampler, passes, entropy, start.trained, mechanism)
    pool = dummies(config, protection.dummies, names, units)
    initial = State(start.tensors, clip_norm=protection.clip_norm)
    usual_rate = unhurt(config).federation.server_rate
    rounds, numbers = config.federation.rounds, reached(method, initial, start.personal)
    config = paced(config, protection.noise_over_way(start.sampler.expected, numbers, rounds))
    if pool.units:  # a resumed run must have the same dummies
        noted = {"dummies": {"units": len(pool.units), "digest": pool.digest}}
        problem = replace(problem, facts={**problem.facts, **noted})
    start = replace(start, config=config, problem=problem)
    require_steady(protection, method, initial, rounds)
    require_protectable(protection, start.objective, plan)
    return start, protection, pool, usual_rate


def started(config: RunConfig, method: Method, whole: Problem, *, own: bool, steps: bool = True) -> Start:
    """The start over a problem, whose model the method changes. whole: with everybody's examples. own, steps: see `settled`."""
    require_ranks(config, whole.names)
    held_out, problem = hold_out(config, whole)
    if problem.fixed and not isinstance(method, LoraShaped):
        # A head that never trains is exported beside LoRA factors alone, and a method without an adapter would train nothing.
        raise ConfigError(
            f"model.train_head is false, and {config.method.name} trains no LoRA adapter; choose a method that does, such as "
            "'federa'"
        ).about("model.train_head", False, "a method on LoRA")
    with activity(f"preparing the tensors of {config.method.name}"):
        base_digest = digest_of(problem.model, (*problem.head, *problem.fixed))  # before the method changes any of it
        tensors = method.prepare(problem.model, problem.head, config.federation.seed)
    if problem.asked is not None:
        problem.asked.room(problem.model)
    personal = personal_names(method, tensors, config.method.personal, config.federation.rounds)
    require_shared_factors(config, tensors, personal)
    plan = method.plan(State(tensors))
    width = width_of(getattr(problem.model, "config", None))
    scoring = any(name in problem.last for name in plan.trainable)
    here = whole.sizes is None and not whole.lazy  # else numbers of examples are unknown, or known after reading all
    config = settled(
        config,
        len(whole.names),
        method,
        State(tensors),
        own=own,
        width=width,
        sizes=[len(own) for own in whole.train] if here else None,
        personal=personal,
        scoring=scoring,
        decoder=scores_tokens(problem.model),
        steps=steps,
    )
    return Start(
        config=config,
        method=method,
        problem=problem,
        held_out=held_out,
        base_digest=base_digest,
        tensors=tensors,
        personal=personal,
        plan=plan,
        trained=tensors.select(plan.trainable).without(personal).numel,
        objective=_objective(config, problem, method, tensors),
        sampler=cohort_sampler(config, len(problem.names), vacancies(problem.names, whole.names)),
    )


def _objective(config: RunConfig, problem: Problem, method: Method, tensors: Tensors) -> Objective:
    """The loss of the method's model, on the model's device, with copies on the configuration's other devices.

    Of a model on the meta device, which only has shapes: as if it were on the configuration's first device.
    """
    device, others = device_of(problem.model), find_devices(config.model.device)
    if device.type == "meta":
        device, others = others[0], others[:1]
    longest = None if problem.tokenizer is None else config.model.max_length  # texts passed by the user are not cut
    training, model = config.training, problem.model
    at_once = 1 if config.privacy.unit in ("example", "person") else training.microbatch or training.batch
    tokens = None if longest is None else at_once * min(longest, positions_of(model) or longest)
    checkpointing = wanted(training.checkpointing, model, tokens, device)
    objective = Objective(model, loss_of(method, problem.loss), device, longest=longest, checkpointing=checkpointing)
    if is_declared(problem.facts["test"]["from"]):  # else its rows are the clients' own
        objective.public = Plain(problem.test)
    objective.beside = copies_on(objective, others[1:])
    if problem.tokenizer is not None:  # a model passed directly is its owner's, with texts of any form
        for one in (objective, *objective.beside):
            read_once(one, list(tensors), config.training.microbatch)
    return objective


def parties_of(start: Start, protection: Protection, pool: AuditPool, watched: Watch | None, train: Train) -> Parties:
    """The parties over a start. pool: the dummies, as units. watched: observes clients' training. train: local training."""
    config, problem, charges = start.config, start.problem, Charges()
    attendance = None
    # Clients that account for their own releases, and rounds without privacy, may be repeated after an interruption.
    if isinstance(start.sampler, PublicOrder) and protection.placement.charges_federation:
        attendance = Attendance(start.sampler, rounds_paid(config, protection))
    setup = replace(_setup(start, protection, charges, watched, attendance), train=train)
    clients, passes = _clients(start, pool, setup), len(start.plan.passes)
    server = _server(start, pool, charges, setup)
    beside: list[Dummy] = []
    if pool.kind == "client":
        turns = turns_of(server, range(len(problem.names), len(problem.names) + len(pool.units)), passes)
        beside = dummy_clients(config, pool.units, pool.members, len(clients), setup, turns)
    else:
        index = {name: number for number, name in enumerate(problem.names)} if pool.units else {}
        turns = turns_of(server, [index[unit.client] for unit in pool.units], passes)
    server = replace(server, dummies=beside, scoring=_scoring(config, pool, setup, turns))
    return Parties(charges=charges, attendance=attendance, setup=setup, clients=clients, dummies=beside, server=server)


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
    adapts = protection.given and type(protection.mechanism).adapted is not Mechanism.adapted
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
        person_examples=config.privacy.person_examples,
        allowance=charges.allowance,
        watch=watched.see if watched and watched.local else None,
        attendance=attendance,
        acceptable=Acceptable.of(config, start.method, start.tensors, start.personal, adapts=adapts),
        last=problem.last,
        ranks=config.method.ranks_by_name,
    )


def _clients(start: Start, pool: AuditPool, setup: ClientSetup) -> Sequence[Client]:
    """A client for each part of the data, with its own examples and its dummy examples."""
    problem, setups = start.problem, canary_setups(start.config, start.held_out, setup)
    beside = dummy_examples(pool, pool.members)

    def client(index: int) -> Client:
        name, persons = problem.names[index], problem.persons
        own = None if persons is None else persons[index]
        return Client(index, name, problem.train[index], setups.get(name, setup), own, beside.get(name, ()))

    if problem.lazy:
        return Registered(len(problem.train), client)
    return [client(index) for index in range(len(problem.train))]


def _server(start: Start, pool: AuditPool, charges: Charges, setup: ClientSetup) -> Server:
    """The server without secure aggregation. It gets no example."""
    settings, protection, names = start.config.federation, setup.protection, start.problem.names
    tail, sampler = Tail.of(settings), start.sampler
    beside = [unit.name for unit in pool.units] if pool.kind == "client" else []
    empty = empty_sum(settings, precise=protection.placement.server_noise)
    tail.require_steady(setup.method)
    return Server(
        method=setup.method,
        protection=protection,
        sampler=sampler,
        optimizer=ServerOptimizer.of(settings),
        names=[*names, *beside],
        personal=setup.personal,
        seed=settings.seed,
        charge=charges.charge if protection.placement.charges_federation else charges_nothing,
        summing=OpenSum(names, settings.nonfinite == "skip", empty),
        tail=tail,
        dummy_sampler=dummy_sampler(sampler, len(beside)),
    )


def _scoring(config: RunConfig, pool: AuditPool, setup: ClientSetup, turns: Turns) -> DummyScores | None:
    """The membership scores of dummies, from the contribution that each would send as a member."""
    echoes = dummy_clients(config, pool.units, np.ones(len(pool.units), dtype=bool), 0, setup)
    known = not setup.protection.placement.step_noise
    return DummyScores(echoes, turns, config.federation.seed, known) if echoes else None


def _trainer(config: RunConfig, setup: ClientSetup, numbers: int) -> tuple[Together | None, int]:
    """The trainer of common passes, if clients share any, and the number of clients at once. numbers: that each client trains.

    Clients that train by a function of the user's share none.

    Where memory decides, the number is at least two: a client that trains alone for lack of memory also uses passes of public
    shapes.
    """
    at_once = config.training.together or max(2, clients_at_once(numbers, setup.objective.device))
    together = Together(setup.objective, setup.protection.placement.private, setup.ways)
    return (together if at_once > 1 and setup.train is train else None), at_once
