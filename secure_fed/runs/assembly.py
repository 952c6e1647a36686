"""One function, `assemble`, makes all parties of a federation and passes each the parts of others that it needs.

Every party is complete before its name exists there, so no party can receive a half-made one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from privacy.attendance import Attendance
from privacy.entropy import Entropy
from privacy.mechanisms import Mechanism
from privacy.public_order import PublicOrder
from privacy.sampling import Sampler
from secure_fed.config import RunConfig
from secure_fed.learning.audit_pool.phantoms import phantoms
from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.learning.problem import Problem
from secure_fed.learning.training.cohort import Ways, clients_at_once
from secure_fed.learning.training.objective import Objective
from secure_fed.methods.method import Method, State
from secure_fed.rounds.acceptable import Acceptable
from secure_fed.rounds.canary_clients import canary_setups
from secure_fed.rounds.charges import Charges, charges_nothing
from secure_fed.rounds.client import Client
from secure_fed.rounds.client_setup import ClientSetup
from secure_fed.rounds.cohort import phantom_sampler, with_phantoms
from secure_fed.rounds.diagnostics.watch import Watch, watch
from secure_fed.rounds.masked.wiring import Elsewhere, Masks, behind_masks, in_process
from secure_fed.rounds.phantom_clients import Phantom, phantom_clients, phantom_examples
from secure_fed.rounds.phantom_scores import PhantomScores
from secure_fed.rounds.protect import protect, require_protectable, require_steady
from secure_fed.rounds.protection import Protection
from secure_fed.rounds.registered import Joined, Registered
from secure_fed.rounds.server import Server
from secure_fed.rounds.server_optimizer import ServerOptimizer
from secure_fed.rounds.step_lengths import paced
from secure_fed.rounds.summing import OpenSum, empty_sum
from secure_fed.rounds.tail import Tail
from secure_fed.rounds.together import Together
from secure_fed.rounds.transport import Transport
from secure_fed.rounds.turns import Turns, turns_of
from secure_fed.rounds.way import reached
from secure_fed.runs.best import require_choosable
from secure_fed.runs.start import Start, started


@dataclass(frozen=True)
class Assembly:
    """A federation, put together and ready to run.

    problem: without the examples or clients that an audit holds out. pools: the units that an audit may test, some of which
    train: units held out of the "data", and "phantoms", which are nobody's data. initial: the state before the first round.
    base_digest: of the model before the method changed it. phantoms: clients without data, indexed after `clients`. masks: both
    sides of secure aggregation, if it is enabled. ways: how clients train in common passes.
    """

    config: RunConfig
    method: Method
    problem: Problem
    pools: Mapping[str, AuditPool]
    base_digest: str
    initial: State
    objective: Objective
    sampler: Sampler
    protection: Protection
    charges: Charges
    attendance: Attendance | None
    watch: Watch | None
    clients: Sequence[Client]
    phantoms: Sequence[Phantom]
    masks: Masks | None
    transport: Transport
    server: Server
    ways: Ways

    @property
    def audit_pool(self) -> AuditPool:
        """The units that an audit tests: held-out units of the data, if there are any; else phantoms, in a run that is private
        or that has them.
        """
        private = self.config.privacy.unit != "none" or bool(self.config.evaluation.phantoms)
        return self.pools["phantoms" if private and not self.pools["data"].units else "data"]


def assemble(
    config: RunConfig,
    method: Method,
    whole: Problem,
    entropy: Entropy | None = None,
    mechanism: Callable[[float], Mechanism] | None = None,
    elsewhere: Elsewhere | None = None,
) -> Assembly:
    """The federation of a configuration over a problem, `whole` with everybody's examples. Refuses impossible settings.

    mechanism: makes the user's own mechanism from a noise multiplier. elsewhere: for a federation whose clients are on separate
    machines; the problem then has this machine's examples.
    """
    require_choosable(config, whole.facts)
    start = started(config, method, whole, own=mechanism is not None)
    config, sampler, tensors, passes = start.config, start.sampler, start.tensors, len(start.plan.passes)
    names, units = start.problem.names, start.problem.units
    protection = protect(config, method.card, names, units, sampler, passes, entropy, start.trained, mechanism)
    pool = phantoms(config, protection.phantoms, names, units)
    problem = _with_phantoms_noted(start.problem, pool)
    initial = State(tensors, clip_norm=protection.clip_norm)
    config = _paced(start, protection, initial)
    require_steady(protection, method, initial, config.federation.rounds)
    require_protectable(
        protection, start.objective, problem.here, problem.collate, start.plan, tensors, config.training
    )
    watched = watch(config, method, tensors, start.objective, problem.collate, problem.loss, problem.test)
    charges, attendance = Charges(), _attendance(config, protection, sampler)
    setup = _setup(start, protection, charges, watched, attendance)
    clients = _clients(start, pool, setup)
    open_server = _open_server(config, problem, pool, sampler, charges, setup)
    turns = _turns(names, pool, open_server, passes)
    beside = _phantom_clients(config, pool, len(clients), setup, turns)
    everybody = Joined(clients, beside) if isinstance(clients, Registered) else [*clients, *beside]
    drawn = with_phantoms(sampler, len(beside))
    order = sampler if isinstance(sampler, PublicOrder) else None
    beside_sampler, device = open_server.phantoms, start.objective.device
    masks = behind_masks(
        config, protection, drawn, everybody, method, tensors, start.personal, device, order, beside_sampler, elsewhere
    )
    summing = masks.sums if masks else open_server.summing
    server = replace(open_server, summing=summing, scoring=_scoring(config, pool, setup, turns))
    _require_precise(masks, server, initial, config.federation.rounds)
    return Assembly(
        config=config,
        method=method,
        problem=problem,
        pools={"data": start.held_out, "phantoms": pool},
        base_digest=start.base_digest,
        initial=initial,
        objective=start.objective,
        sampler=sampler,
        protection=protection,
        charges=charges,
        attendance=attendance,
        watch=watched,
        clients=clients,
        phantoms=beside,
        masks=masks,
        transport=in_process(config, everybody, masks, *_training(config, setup, start.trained)),
        server=server,
        ways=setup.ways,
    )


def _paced(start: Start, protection: Protection, initial: State) -> RunConfig:
    """The configuration with a server learning rate that suits the noise, if it was left open."""
    numbers = reached(start.method, initial, start.personal)
    rounds = start.config.federation.rounds
    return paced(start.config, protection.noise_over_way(start.sampler.expected, numbers, rounds))


def _training(config: RunConfig, setup: ClientSetup, numbers: int) -> tuple[Together | None, int]:
    """The trainer of common passes, if clients share any, and the number of clients at once. numbers: that each client trains.

    Where memory decides, the number is at least two: a client that trains alone for lack of memory also uses passes of public
    shapes.
    """
    at_once = config.training.together or max(2, clients_at_once(numbers, setup.objective.device))
    together = Together(setup.objective, setup.protection.placement.private, setup.ways)
    return (together if at_once > 1 else None), at_once


def _with_phantoms_noted(problem: Problem, pool: AuditPool) -> Problem:
    """The problem with the number of phantoms in its facts: a resumed run must have the same number."""
    if not pool.units:
        return problem
    return replace(problem, facts={**problem.facts, "phantoms": {"units": len(pool.units), "digest": pool.digest}})


def _attendance(config: RunConfig, protection: Protection, sampler: Sampler) -> Attendance | None:
    """The clients' record of their turns, where a guarantee relies on how seldom they take part.

    Clients that account for their own releases, and rounds without privacy, may be repeated after an interruption.
    """
    if isinstance(sampler, PublicOrder) and protection.placement.charges_federation:
        return Attendance(sampler, config.federation.rounds)
    return None


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


def _open_server(
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


def _require_precise(masks: Masks | None, server: Server, initial: State, rounds: int) -> None:
    """Refuse masks whose integers are too coarse for the summed contributions."""
    if masks is not None:
        sizes = [server.layout(initial, pass_name).size for pass_name in server.plan(initial).passes]
        masks.require_precise(sizes, initial.clip_norm, rounds, server.sampler.expected)
