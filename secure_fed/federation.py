"""The front door in Python: a configuration, or a model and data of your own, in; a trained adapter out.

from secure_fed import Federation, RunConfig
result = Federation(RunConfig.load("run.toml")).run("runs/first")
result = Federation(model=my_model, train=[clinic_a, clinic_b], test=held_out).run()
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from privacy.entropy import Entropy
from privacy.errors import BudgetExhausted
from secure_fed.config import RunConfig
from secure_fed.config.absolute_paths import anchored
from secure_fed.errors import ConfigError, RunDirectoryError
from secure_fed.export.export import Adapted, write_adapter
from secure_fed.export.model_card import ModelCard, run_facts
from secure_fed.learning import tasks
from secure_fed.learning.audit_pool.phantoms import phantoms
from secure_fed.learning.audit_pool.pool import AuditPool, hold_out
from secure_fed.learning.data.encode import pad_id
from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.models.fingerprint import of_model
from secure_fed.learning.problem import configured, given
from secure_fed.learning.tasks.task import Collate, Loss, Metrics
from secure_fed.learning.training.local import Objective
from secure_fed.learning.training.schedule import scheduled_lr
from secure_fed.methods import build
from secure_fed.methods.method import State, fits, loss_of
from secure_fed.rounds import engine
from secure_fed.rounds.client import personal_names
from secure_fed.rounds.cohort import cohort_sampler, with_phantoms
from secure_fed.rounds.diagnostics.watch import watch
from secure_fed.rounds.engine import Keeper, KeepsNothing, Schedule
from secure_fed.rounds.masked.wiring import behind_masks, in_process
from secure_fed.rounds.personal import completed
from secure_fed.rounds.protection import protect, require_protectable
from secure_fed.rounds.record import Record
from secure_fed.rounds.transport import Transport
from secure_fed.runs import assembly as participants
from secure_fed.runs import guarantee, published, recording
from secure_fed.runs import result as outcome
from secure_fed.runs.budget import Purse, RunBudget, opened, require_room
from secure_fed.runs.budget_terms import Subject
from secure_fed.runs.evaluation import evaluated
from secure_fed.runs.recording import Recorder
from secure_fed.runs.releases import Releases, kept_by
from secure_fed.runs.store import RunStore, read_personal, require_unused


@dataclass(frozen=True)
class Result:
    """What a run ends with: `summary` is `result.json`, `state` the global tensors.

    records: the rounds; withheld: what a private run keeps from `summary`. Both are for those who hold the data.
    """

    summary: dict[str, Any]
    records: list[Record]
    state: State
    run_dir: Path | None
    withheld: dict[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> dict[str, Any]:
        """The summary with what is withheld of it."""
        return published.together(self.summary, self.withheld)


class Federation:
    """Clients, a server and a transport between them, ready to run.

    model, train, test: objects of yours; `train` is a list with one data set per client, a data set being anything with a
    length and items. Without them the configuration says what to load.
    collate(items) -> batch; loss(model, batch) -> (B,) losses; metrics(model, batches) -> {"accuracy": ...}. By default items
    with `input_ids` and `labels` are padded and classified.
    What trains in full of a transformers model of yours is what lies outside its base model, and its pooler, which a checkpoint
    often lacks; of any other module, what `method.modules_to_save` names.
    callbacks: objects with `on_round_end(record, state)` or `on_end(result)` or both.
    entropy: where noise and secret coins come from, the operating system if not given. With any other, nothing is private, and
    the result says so.
    """

    transport: Transport

    def __init__(
        self,
        config: RunConfig | None = None,
        *,
        model: nn.Module | None = None,
        train: Sequence[Sequence[Any]] | None = None,
        test: Sequence[Any] | None = None,
        collate: Collate | None = None,
        loss: Loss | None = None,
        metrics: Metrics | None = None,
        callbacks: Sequence[Any] = (),
        entropy: Entropy | None = None,
    ) -> None:
        if not isinstance(config, RunConfig | None):
            raise ConfigError(
                f"config is a {type(config).__name__}; make a RunConfig, with RunConfig.from_dict or .load"
            )
        self.config = anchored(config or RunConfig())
        self.method = build(self.config)  # first, so that a wrong name is said before anything is loaded
        own = (model, train, test, collate, loss, metrics)
        parts = configured(self.config) if all(part is None for part in own) else given(self.config, *own)
        self.pools: dict[str, AuditPool] = {}
        self.pools["data"], self.parts = hold_out(self.config, parts)
        self.callbacks = list(callbacks)
        # Before a method changes or trains any of it.
        self._base = of_model(self.parts.model, self.parts.head)
        initial = self.method.prepare(self.parts.model, self.parts.head, self.config.federation.seed)
        self.initial = State(initial)
        personal = personal_names(self.method, initial, self.config.method.personal, self.config.federation.rounds)
        self.device = next(self.parts.model.parameters()).device
        self.objective = Objective(self.parts.model, loss_of(self.method, self.parts.loss), self.device)
        names = self.parts.names
        self.sampler = cohort_sampler(self.config, len(names), len(parts.names) - len(names))
        passes = len(self.method.plan(self.initial).passes)
        trainable = self.initial.tensors.select(self.method.plan(self.initial).trainable).without(personal)
        self.protection = protect(
            self.config,
            self.method.card,
            self.parts.names,
            self.parts.units,
            self.sampler,
            passes,
            entropy,
            trainable.numel,
        )
        self.pools["phantoms"] = phantoms(self.config, self.protection.phantoms, names, self.parts.units)
        if self.pools["phantoms"].units:
            told = {"units": len(self.pools["phantoms"].units), "digest": self.pools["phantoms"].digest}
            self.parts = replace(self.parts, facts={**self.parts.facts, "phantoms": told})
        private = self.config.privacy.unit != "none" or bool(self.config.evaluation.phantoms)
        self.audited = "phantoms" if private and not self.pools["data"].units else "data"
        self.initial = replace(self.initial, clip_norm=self.protection.clip_norm)
        plan = self.method.plan(self.initial)
        require_protectable(
            self.protection, self.objective, self.parts.train, self.parts.collate, plan, initial, self.config.training
        )
        self.watch = watch(
            self.config, self.method, initial, self.objective, self.parts.collate, self.parts.loss, self.parts.test
        )
        self.purse = Purse()
        self._statement = ""
        self._measured: set[str] = set()
        bench = participants.workbench(self, personal)
        self.clients = participants.clients(self, bench)
        self.turns = participants.turns(self, lambda round_: self.server.draw(round_), passes)
        self.phantoms = participants.phantoms(self, bench)
        everybody = [*self.clients, *self.phantoms]
        asked = with_phantoms(self.sampler, len(self.phantoms))
        self.masks = behind_masks(
            self.config, self.protection, asked, everybody, self.method, initial, personal, self.device
        )
        self.transport = in_process(self.config, everybody, self.masks)
        self.server = participants.server(self, personal, bench)
        self._require_precise()

    @property
    def held(self) -> AuditPool:
        """The units that an audit asks about: those of the data where coins held some out, else phantoms."""
        return self.pools[self.audited]

    @held.setter
    def held(self, held: AuditPool) -> None:
        self.pools = {**self.pools, self.audited: held}

    @property
    def warnings(self) -> list[str]:
        """What the user should hear before training starts."""
        return [warning for warning in (self.parts.warning, recording.warning(self.config)) if warning]

    def run(self, out: str | Path | None = None, *, resume: bool = False) -> Result:
        """Run all rounds that are left, keeping everything in the directory `out` if one is given.

        Killed at any instant and run again with `resume`, it ends in the same tensors as if it had not been.
        """
        run_dir = Path(out) if out is not None else None
        recorder = Recorder.of(self.config, run_dir, self.server.names)
        if run_dir is None and resume:
            raise RunDirectoryError("resume needs the run directory to go on with: set out")
        if run_dir is not None and not resume:
            require_unused(run_dir)
        plan, subject = self.protection.plan, Subject.of(self.config, self.parts)
        if plan:
            plan = require_room(self.config.privacy, plan, run_dir, subject)
        with ExitStack() as stack:
            store = stack.enter_context(closing(RunStore(run_dir))) if run_dir else None
            state, records = self._start(store)
            budget = stack.enter_context(opened(self.config.privacy, plan, run_dir, subject)) if plan else None
            self.purse.budget = budget
            stack.callback(self.purse.close)
            self._begin_masks(state, budget)
            if self.watch:
                self.watch.begin()
            keeper: Keeper = Releases(store, self.clients) if store and budget else KeepsNothing()
            recorder.begin(state)
            server, transport = recorder.beside(self.server), recorder.around(self.transport)
            rounds = engine.run(state, server, transport, self._schedule(), self._evaluate, keeper)
            ended_early = ""
            try:
                for following, record in rounds:
                    if self.watch:
                        record |= self.watch.told(state, following, record)
                    state = following
                    records.append(record)
                    recorder.end_of_round(state, record["lr"])
                    if store:
                        store.save(state, kept_by(self.clients), *self._cut(record))
                    self._tell("on_round_end", record, state)
            except BudgetExhausted as error:
                if not records:
                    raise
                ended_early = (
                    f"the budget was spent after {state.round} of {self.config.federation.rounds} rounds: {error}"
                )
                if not self._schedule().evaluates(state.round):
                    records[-1] = records[-1] | self._evaluate(state)
            return self._finished(state, records, store, budget, ended_early)

    def _finished(
        self,
        state: State,
        records: list[Record],
        store: RunStore | None,
        budget: RunBudget | None,
        ended_early: str,
    ) -> Result:
        """What a run comes to, said and kept."""
        run_dir = store.path if store else None
        summary = outcome.summary(self, state, records, run_dir, budget, ended_early)
        self._statement = summary["privacy_statement"]
        shown, withheld = (summary, {}) if self.protection.plan is None else published.of_result(summary)
        result = Result(shown, records, state, run_dir, withheld)
        if store:
            store.finish(shown, withheld)
        self._tell("on_end", result)
        return result

    def load(self, state: State) -> nn.Module:
        """The adapted model with the tensors of this state in it."""
        return self.objective.load(state.tensors)

    def export(self, state: State, out_dir: str | Path, *, base_model: str = "", client: str | None = None) -> Path:
        """Write the adapter and the head of this state, for PEFT where it is a LoRA adapter and else for `load_adapter`.

        Refuses a folder that is not empty.

        base_model: where others load the base model of yours from, a Hub id or a folder. client: whose, where tensors are
        personal.
        """
        config, parts, out = self.config, self.parts, Path(out_dir)
        kept = {one.index: one.kept for one in self.clients if one.kept is not None}
        tensors = completed(state.tensors, config.method.personal, client, parts.names, kept)
        whole = replace(state, tensors=tensors)
        self.objective.load(tensors)
        labels, task, configured = (
            tuple(parts.facts["label_names"]),
            tasks.build(config.data),
            parts.tokenizer is not None,
        )
        card = ModelCard(
            config.method.name,
            base_model or (config.model.name if configured else ""),
            labels,
            run_facts(config, self.method.card, state.round, {}, client, self._stated()),
            pad_token_id=pad_id(parts.tokenizer) if configured else None,
            auto=task.auto,
            settings=task.model_settings(labels) if configured else None,
        )
        adapted = Adapted(
            config, self.method, parts.model, parts.head, self.initial.tensors, whole, card, parts.tokenizer
        )
        write_adapter(out, adapted)
        return out

    def _stated(self) -> str:
        """What protects a state of this federation: what its last run says, or before there is one, its plan."""
        if self._statement:
            return self._statement
        facts = self._planned()
        return str(facts["privacy"]["text"]) if facts else ""

    def _planned(self) -> dict[str, Any]:
        """What a run of this federation notes of its guarantee when it begins."""
        personal, tested = bool(self.server.personal), self.parts.facts["test"]["from"]
        return guarantee.planned(self.protection, self.sampler.rate, personal=personal, masks=self.masks, tested=tested)

    def _start(self, store: RunStore | None) -> tuple[State, list[Record]]:
        """Where to begin: at the checkpoint, or at the beginning, whatever this federation ran before."""
        for client in self.clients:
            client.kept = None
        if store is None:
            return self.initial, []
        facts = {
            **self.parts.facts,
            **self._planned(),
            "model_digest": self._base,
            "versions": outcome.versions(),
        }
        store.begin(self.config, facts)
        store.save_membership(self.pools["data"])
        checkpoint, records = store.restore()
        if checkpoint is None:
            return self.initial, records
        if not fits(self.method, self.initial.tensors, checkpoint.state):
            raise RunDirectoryError(
                f"{store.path} holds the state of another model; resume with the model it was begun with"
            )
        personal = read_personal(store.path, checkpoint.state.round)
        for client in self.clients:
            client.kept = personal.get(client.index)
        return checkpoint.state, records

    def _cut(self, record: Record) -> tuple[Record, Record]:
        """What may be shown of a round, and what is withheld."""
        if self.protection.plan is None:
            return record, {}
        return published.of_round(record, self._measured, declared=is_declared(self.parts.facts["test"]["from"]))

    def _require_precise(self) -> None:
        """Refuse masks whose words are too coarse for what is summed."""
        if self.masks:
            passes = self.server.plan(self.initial).passes
            sizes = [self.server.layout(self.initial, pass_name).size for pass_name in passes]
            rounds = self.config.federation.rounds
            self.masks.require_precise(sizes, self.initial.clip_norm, rounds, self.sampler.expected)

    def _begin_masks(self, state: State, budget: RunBudget | None) -> None:
        """Clients who bring the noise of sums bring it for those that are reserved and still to come."""
        if self.masks is None:
            return
        left = None
        if budget is not None and self.protection.shares is not None:
            left = budget.plan.releases - budget.plan.passes * state.round
        self.masks.begin(left)

    def _schedule(self) -> Schedule:
        rounds, training = self.config.federation.rounds, self.config.training
        return Schedule(rounds, lambda round_: scheduled_lr(training, round_, rounds), self.config.evaluation.every)

    def _evaluate(self, state: State) -> Record:
        found = evaluated(self, state)
        self._measured |= set(found)
        return found

    def _tell(self, event: str, *news: Any) -> None:
        for callback in self.callbacks:
            if hasattr(callback, event):
                getattr(callback, event)(*news)
