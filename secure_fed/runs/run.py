"""One run of an assembled federation: its rounds, each charged, saved, recorded and reported, resumed after any stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privacy.errors import BudgetExhausted
from secure_fed.activity import Activity, activity
from secure_fed.errors import RunDirectoryError
from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.training.local import scheduled_lr
from secure_fed.learning.training.trial_results import PASS_SIZES
from secure_fed.methods.method import State, fits
from secure_fed.rounds import engine
from secure_fed.rounds.client import Registered, existing
from secure_fed.rounds.engine import Keeper, KeepsNothing, Schedule
from secure_fed.rounds.sums import Record
from secure_fed.rounds.transport import PROBING, Progress, Told, Transport
from secure_fed.runs import guarantee, published
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.budget import RunBudget, Subject, cost_in_words, opened, require_room
from secure_fed.runs.directory import ATTENDANCE, CONFIG, FACTS, made_private, private_part, read_facts, require_unused
from secure_fed.runs.evaluation import best, evaluated, require_measured, stalled
from secure_fed.runs.hopeless import probe, require_worth
from secure_fed.runs.noise_key import erase, opened_noise
from secure_fed.runs.recording import Recorder
from secure_fed.runs.result import now, origin, summary, versions
from secure_fed.runs.store import (
    Releases,
    RunStore,
    kept_by,
    read_best,
    read_personal,
    read_records,
    require_same_start,
)

if TYPE_CHECKING:
    from privacy.plan import Plan

Notify = Callable[..., None]  # called with an event's name and its arguments


@dataclass(frozen=True)
class Result:
    """The outcome of a run: `summary` is `result.json`, `state` the state after the last round: tensors, round, memory.

    records: the rounds; withheld: the values that a private run leaves out of `summary`. Both are for the owner of the data.
    best: the state at the best evaluation, with `evaluation.keep_best`. public_records: the public part of the rounds,
    as in `metrics.jsonl`. plan: the releases and cost of a private run.
    """

    summary: dict[str, Any]
    records: list[Record]
    state: State
    run_dir: Path | None
    withheld: dict[str, Any] = field(default_factory=dict)
    best: State | None = None
    public_records: list[Record] = field(default_factory=list)
    plan: Plan | None = None

    @property
    def whole(self) -> dict[str, Any]:
        """The summary with its withheld part."""
        return published.together(self.summary, self.withheld)


def run(assembly: Assembly, run_dir: Path | None, *, resume: bool, notify: Notify) -> Result:
    """Run all remaining rounds, saving everything in the run directory if there is one.

    Killed at any instant and run again with `resume`, a run without privacy ends in the same tensors as if it had not been; a
    private run continues from its last release.
    Refused in this order: what the directory, its run and the ledger refuse at once, then noise that leaves nothing to learn
    where a shared ledger would pay, then what trials of the model show, and all of it before budget is reserved or anything is
    written.
    notify: called with `"on_promise", sentences` and `"on_probe", figures` before the trials of a private run,
    `"on_run_begin", config, run_dir` after them, `"on_progress", progress` within a round,
    `"on_round_end", record, state` once the round is saved, `"on_published", record` with its public part at the same time, or
    in a private run at the end, and `"on_end", result` at the end.
    """
    recorder = Recorder.of(assembly.config, run_dir, assembly.server.names)
    if run_dir is None and resume:
        raise RunDirectoryError("resume needs a run directory: set out")
    if run_dir is not None and not resume:
        require_unused(run_dir)
    privacy, subject = assembly.config.privacy, Subject.of(assembly.config, assembly.problem)
    plan = assembly.protection.plan
    if run_dir is not None:
        require_same_start(run_dir, assembly.config, facts_of(assembly), _admits(assembly))
    if plan:
        plan = require_room(privacy, plan, run_dir, subject)
        notify("on_promise", guarantee.promised(assembly, plan, cost_in_words(privacy, plan, run_dir)))
    noise_alone = _probed(assembly, run_dir, notify)
    assembly.require_by_trials()
    assembly.objective.forget_parameters()
    notify("on_run_begin", assembly.config, run_dir)
    with ExitStack() as stack:
        store = stack.enter_context(closing(RunStore(run_dir))) if run_dir else None
        state, records = _start(assembly, store, noise_alone)
        every = assembly.charges_every_release
        budget = stack.enter_context(opened(privacy, plan, run_dir, subject, charged_here=every)) if plan else None
        if plan and run_dir:
            stack.enter_context(assembly.objective.kept.beside(made_private(run_dir) / PASS_SIZES))
        assembly.charges.budget = budget
        stack.callback(assembly.charges.close)
        begun = budget.begun if budget and budget.plan.exposures else 0  # read once: reading a ledger notes its head
        config = assembly.config
        over = stalled(records, config.evaluation.patience, config.data.task)
        if budget and budget.plan.exposures and not over:
            following = max(state.round, begun)  # the state alone knows of rounds lost before their charge
            stack.enter_context(opened_noise(assembly.protection, run_dir, following, budget.covers))
        if assembly.attendance is not None:
            assembly.attendance.begin(private_part(run_dir) / ATTENDANCE if run_dir else None, begun=begun > 0)
            stack.callback(assembly.attendance.end)
        public = read_records(run_dir) if run_dir else []
        running = _Run(assembly, recorder, store, budget, notify, state, records, public, noise_alone)
        ended_early = running.to_its_end()
        return running.finished(ended_early)


@dataclass
class _Run:
    """A run in progress. measured: names of its evaluations' values. best: the state of the best evaluation, if it is kept."""

    assembly: Assembly
    recorder: Recorder
    store: RunStore | None
    budget: RunBudget | None
    notify: Notify
    state: State
    records: list[Record]
    public_records: list[Record]
    noise_alone: dict[str, Any] | None
    measured: set[str] = field(default_factory=set)
    best: State | None = None
    telling: Told | None = None

    def to_its_end(self) -> str:
        """Run the remaining rounds. Returns the reason if the run ended early, else ""."""
        assembly, config = self.assembly, self.assembly.config
        rounds, training = config.federation.rounds, config.training
        schedule = Schedule(rounds, lambda round_: scheduled_lr(training, round_, rounds), config.evaluation.every)
        why = stalled(self.records, config.evaluation.patience, config.data.task)
        if why and self.state.round < rounds:
            return why
        self._begin_masks()
        if assembly.watch:
            assembly.watch.begin()
        self.recorder.begin(self.state)
        with activity("") as now, activity("preparing the round") as within:
            return self._rounds(schedule, now, within)

    def _rounds(self, schedule: Schedule, now: Activity, within: Activity) -> str:
        """now: says the round; within: says how far it is."""
        assembly = self.assembly
        patience, task = assembly.config.evaluation.patience, assembly.config.data.task
        server = self.recorder.beside(assembly.server)
        transport = self._told(self.recorder.around(assembly.transport), schedule.rounds, now, within)
        keeper: Keeper = Releases(self.store.path, assembly.clients) if self.store and self.budget else KeepsNothing()
        try:
            for following, record in engine.run(self.state, server, transport, schedule, self._evaluate, keeper):
                self._end_of_round(following, record)
                if (why := stalled(self.records, patience, task)) and following.round < schedule.rounds:
                    return why
        except BudgetExhausted as error:
            if not self.records:
                raise
            if not schedule.evaluates(self.state.round) and best(self.records[-1:], task) is None:
                self._evaluate_late()
            tail = assembly.server.tail
            missing = "; so this is no mean of several models (federation.average_last)" if tail.count > 1 else ""
            return f"the budget was spent after {self.state.round} of {schedule.rounds} rounds: {error}{missing}"
        return ""

    def _end_of_round(self, state: State, record: Record) -> None:
        """Save a round, then send its notifications. Where clients train by a function, the rate of [training] is nobody's."""
        lr = record["lr"]
        if self.assembly.local is not None:
            record["lr"] = None
        if self.assembly.watch:
            record |= self.assembly.watch.entries(self.state, state, record)
        self.state = state
        self.records.append(record)
        self._keep_best()
        self.recorder.end_of_round(state, lr)
        public, withheld = self._cut(record)
        self.public_records.append(public)
        if self.store:
            self.store.save(state, kept_by(self.assembly.clients), public, withheld)
        if isinstance(self.assembly.clients, Registered):
            self.assembly.clients.let_go()
        self.notify("on_round_end", record, state)
        if not self._private:
            self.notify("on_published", public)

    def _evaluate_late(self) -> None:
        """Evaluate the last finished round, whose record is saved already."""
        self.records[-1] = self.records[-1] | self._evaluate(self.state)
        self._keep_best()
        public, withheld = self._cut(self.records[-1])
        self.public_records[-1] = public
        if self.store:
            self.store.amend(public, withheld)

    def _keep_best(self) -> None:
        """Save the state of the finished round, before its checkpoint, if its evaluation is the best."""
        if not self.assembly.config.evaluation.keep_best:
            return
        found = best(self.records, self.assembly.config.data.task)
        if found and found["round"] == self.state.round:
            self.best = self.state
            if self.store:
                self.store.keep_best(self.state)

    def finished(self, ended_early: str) -> Result:
        """The result, saved and announced."""
        run_dir = self.store.path if self.store else None
        with activity("working out the result"):
            whole = summary(
                self.assembly, self.state, self.records, run_dir, self.budget, ended_early, self.noise_alone
            )
        shown, withheld = published.of_result(whole) if self._private else (whole, {})
        kept = self.best or (found.state if run_dir and (found := read_best(run_dir)) else None)
        plan = self.assembly.protection.plan
        result = Result(shown, self.records, self.state, run_dir, withheld, kept, self.public_records, plan)
        if self.store:
            self.store.finish(shown, withheld, now())
            erase(self.store.path)
        for public in self.public_records if self._private else ():
            self.notify("on_published", public)
        self.notify("on_end", result)
        return result

    @property
    def _private(self) -> bool:
        return self.assembly.protection.plan is not None

    def _begin_masks(self) -> None:
        """Clients that add the noise of sums add it for the reserved sums still to come. Recorded wrong dealers stay out."""
        if self.assembly.masks is None:
            return
        left = None
        if self.budget is not None and self.assembly.protection.shares is not None:
            left = self.budget.plan.releases - self.budget.plan.passes * self.state.round
        self.assembly.masks.begin(left, engine.dealt_wrong(self.records, self.assembly.server.names))

    def _told(self, transport: Transport, rounds: int, now: Activity, within: Activity) -> Told:
        """The transport, wrapped so that displays and callbacks learn of its exchanges."""

        def tell(progress: Progress) -> None:
            now.says(f"round {progress.round + 1} of {rounds}")
            within.says(str(progress), anew=progress.done == 0)
            self.notify("on_progress", progress)

        self.telling = Told(transport, tell, counted=not self.assembly.protection.hides_cohort)
        self.assembly.ways.told = self.telling.ahead
        return self.telling

    def _evaluate(self, state: State) -> Record:
        if self.telling:
            self.telling.testing(state.round - 1)
        found = evaluated(self.assembly, state)
        require_measured(found, self.assembly.config)
        self.measured |= set(found)
        return found

    def _cut(self, record: Record) -> tuple[Record, Record]:
        """The public and the withheld part of a round's record."""
        if not self._private:
            return record, {}
        declared = is_declared(self.assembly.problem.facts["test"]["from"])
        return published.of_round(record, self.measured, declared=declared)


def _probed(assembly: Assembly, run_dir: Path | None, notify: Notify) -> dict[str, Any] | None:
    """The figures of the probe, of a resumed run as it noted them. Refuses a new run that is not worth its price."""
    if assembly.protection.plan is None:
        return None
    if run_dir is not None and (run_dir / FACTS).exists() and (noted := read_facts(run_dir).get("noise_alone")):
        return dict(noted)
    notify("on_progress", Progress(0, PROBING))
    with activity(PROBING):
        found = probe(assembly)
    if found is None:
        return None
    figures = found.to_dict()
    notify("on_probe", figures)
    if run_dir is None or not (run_dir / CONFIG).exists():
        require_worth(figures, assembly.config, paid=bool(assembly.config.privacy.ledger))
    return figures


def _start(
    assembly: Assembly, store: RunStore | None, noise_alone: dict[str, Any] | None
) -> tuple[State, list[Record]]:
    """The state and the records to begin with: the checkpoint's or the initial ones, whatever this object ran before."""
    for client in existing(assembly.clients):
        client.kept = None
    if store is None:
        return assembly.initial, []
    noted = {"noise_alone": noise_alone} if noise_alone else {}
    store.begin(assembly.config, facts_of(assembly) | noted, _admits(assembly))
    store.save_membership(assembly.pools["data"])
    checkpoint, records = store.restore()
    if checkpoint is None:
        return assembly.initial, records
    personal = read_personal(store.path, checkpoint.state.round)
    for index, kept in personal.items():
        assembly.clients[index].kept = kept
    return checkpoint.state, records


def facts_of(assembly: Assembly) -> dict[str, Any]:
    """The facts that a run notes at its start, and by which a resumed run is recognised."""
    noted = {"model_digest": assembly.base_digest, "versions": versions(), "local": _name_of(assembly.local)}
    noted |= {"origin": origin()}
    return {**assembly.problem.facts, **guarantee.planned(assembly), **noted}


def _name_of(local: object) -> str | None:
    """The name of the user's function, by which a resumed run is recognised; its content is nobody's to compare."""
    return None if local is None else str(getattr(local, "__qualname__", type(local).__name__))


def _admits(assembly: Assembly) -> Callable[[State], bool]:
    """Whether a state can be one of this run."""
    return partial(fits, assembly.method, assembly.initial.tensors)
