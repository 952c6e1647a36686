"""One function, `assemble`, makes a federation that is ready to run.

Every party is complete before its name exists there, so no party can receive a half-made one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from privacy.entropy import Entropy
from privacy.mechanisms import Mechanism
from privacy.sampling import Attendance, PublicOrder, Sampler
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool.phantoms import phantoms
from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.models.kept import user_file
from secure_fed.learning.problem import Problem
from secure_fed.learning.training.cohort.trainings import Ways
from secure_fed.learning.training.local_function import LocalFunction, trainer_of
from secure_fed.learning.training.objective import Objective
from secure_fed.methods.method import Method, State
from secure_fed.rounds.charges import Charges
from secure_fed.rounds.client import Client
from secure_fed.rounds.cohort import with_phantoms
from secure_fed.rounds.diagnostics.watch import Watch, watch
from secure_fed.rounds.local_function import require_function, require_trainable, require_undivided
from secure_fed.rounds.masked.wiring import Elsewhere, Masks, allowed, behind_masks, in_process
from secure_fed.rounds.open_settings import reached
from secure_fed.rounds.phantoms.clients import Phantom
from secure_fed.rounds.protect import protect, require_by_trials, require_protectable, require_steady
from secure_fed.rounds.protection import Protection
from secure_fed.rounds.ranks import part
from secure_fed.rounds.server import Server
from secure_fed.rounds.step_lengths import paced, unhurt
from secure_fed.rounds.transport import Transport
from secure_fed.runs.parties import Parties, parties_of, trainer
from secure_fed.runs.start import Start, started


@dataclass(frozen=True)
class Assembly:
    """A federation, put together and ready to run.

    problem: without the examples or clients that an audit holds out. pools: the units that an audit may test, some of which
    train: units held out of the "data", and "phantoms", which are nobody's data. initial: the state before the first round.
    base_digest: of the model before the method changed it. phantoms: clients without data, indexed after `clients`. masks: both
    sides of secure aggregation, if it is enabled. ways: how clients train in common passes. usual_rate: the server's learning
    rate without regard to the noise. everybody_here: whether all clients are in this process. local: the function by which
    they train, if it is the user's.
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
    usual_rate: float
    everybody_here: bool
    local: LocalFunction | None

    @property
    def audit_pool(self) -> AuditPool:
        """The units that an audit tests: held-out units of the data, if there are any; else phantoms, in a run that is private
        or that has them.
        """
        private = self.config.privacy.unit != "none" or bool(self.config.evaluation.phantoms)
        return self.pools["phantoms" if private and not self.pools["data"].units else "data"]

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

    mechanism: makes the user's own mechanism from a noise multiplier. elsewhere: for a federation whose clients are on separate
    machines; the problem then has this machine's examples. masked: False leaves out the masks of secure aggregation, for a plan
    of the noise alone. local: the function by which the clients here train, in place of the steps of [training].
    """
    _require_choosable(config, whole.facts)
    if local is not None:
        require_function(local)
        require_trainable(config, method)
        require_undivided(config, whole.model)
    steps = local is None or elsewhere is not None  # other machines have steps on whose rate all parties agree
    start, protection, pool, usual_rate = _protected(config, method, whole, entropy, mechanism, steps=steps)
    config, problem, tensors, objective = start.config, start.problem, start.tensors, start.objective
    initial = State(tensors, clip_norm=protection.clip_norm)
    watched = watch(config, method, tensors, objective, problem.collate, problem.loss, problem.test)
    parties = parties_of(start, protection, pool, watched, trainer_of(local))
    masks = _masks(start, parties, elsewhere) if masked else None
    server = replace(parties.server, summing=masks.sums) if masks else parties.server
    _require_precise(masks, server, initial, config.federation.rounds)
    return Assembly(
        config=config,
        method=method,
        problem=problem,
        pools={"data": start.held_out, "phantoms": pool},
        base_digest=start.base_digest,
        initial=initial,
        objective=objective,
        sampler=start.sampler,
        protection=protection,
        charges=parties.charges,
        attendance=parties.attendance,
        watch=watched,
        clients=parties.clients,
        phantoms=parties.phantoms,
        masks=masks,
        transport=in_process(config, parties.everybody, masks, *trainer(config, parties.setup, start.trained)),
        server=server,
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
    """The start, its protection, the phantoms, and the server's rate without noise; the start's server steps suit the noise.

    Refuses what cannot be protected. steps: see `settled`.
    """
    start = started(config, method, whole, own=mechanism is not None, steps=steps)
    config, problem, plan = start.config, start.problem, start.plan
    names, units, passes = problem.names, problem.units, len(plan.passes)
    bearable = partial(allowed, config, start.sampler, len(names))
    protection = protect(
        config, method.card, names, units, start.sampler, passes, entropy, start.trained, mechanism, bearable
    )
    pool = phantoms(config, protection.phantoms, names, units)
    initial = State(start.tensors, clip_norm=protection.clip_norm)
    usual_rate = unhurt(config).federation.server_rate
    start = replace(start, config=_paced(start, protection, initial), problem=_with_phantoms_noted(problem, pool))
    require_steady(protection, method, initial, config.federation.rounds)
    require_protectable(protection, start.objective, plan)
    return start, protection, pool, usual_rate


def _masks(start: Start, parties: Parties, elsewhere: Elsewhere | None) -> Masks | None:
    """The masks around the parties, if secure aggregation is enabled."""
    sampler, protection = start.sampler, parties.setup.protection
    return behind_masks(
        start.config,
        protection,
        with_phantoms(sampler, len(parties.phantoms)),
        parties.everybody,
        start.method,
        start.tensors,
        start.personal,
        start.objective.device,
        sampler if isinstance(sampler, PublicOrder) else None,
        parties.server.phantoms,
        elsewhere,
    )


def _paced(start: Start, protection: Protection, initial: State) -> RunConfig:
    """The configuration with a server learning rate that suits the noise, if it was left open."""
    numbers = reached(start.method, initial, start.personal)
    rounds = start.config.federation.rounds
    return paced(start.config, protection.noise_over_way(start.sampler.expected, numbers, rounds))


def _with_phantoms_noted(problem: Problem, pool: AuditPool) -> Problem:
    """The problem with the number of phantoms in its facts: a resumed run must have the same number."""
    if not pool.units:
        return problem
    return replace(problem, facts={**problem.facts, "phantoms": {"units": len(pool.units), "digest": pool.digest}})


def _require_precise(masks: Masks | None, server: Server, initial: State, rounds: int) -> None:
    """Refuse masks whose integers are too coarse for the summed contributions."""
    if masks is not None:
        sizes = [server.layout(initial, pass_name).size for pass_name in server.plan(initial).passes]
        masks.require_precise(sizes, initial.clip_norm, rounds, server.sampler.expected)
