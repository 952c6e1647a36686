"""The front door in Python: a configuration, or a model and data of your own, in; a trained adapter out.

from secure_fed import Federation, RunConfig
result = Federation(RunConfig.load("run.toml")).run("runs/first")
result = Federation(model=my_model, train=[clinic_a, clinic_b], test=held_out).run()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from privacy.entropy import Entropy
from privacy.mechanisms import Mechanism
from secure_fed.config import RunConfig, with_absolute_paths
from secure_fed.config.own_files import pinned
from secure_fed.errors import ConfigError
from secure_fed.export.export import write_federation
from secure_fed.learning.data.chats import template_of
from secure_fed.learning.models.devices import idle_gpu
from secure_fed.learning.problem import configured
from secure_fed.learning.tasks.task import Collate, Loss, Metrics
from secure_fed.learning.training.local_function import LocalFunction
from secure_fed.learning.user_objects import given
from secure_fed.methods import build
from secure_fed.methods.auto import decided
from secure_fed.methods.method import State
from secure_fed.report.result import Result
from secure_fed.rounds.local_function import require_function, require_read, require_trainable
from secure_fed.runs import guarantee, recording
from secure_fed.runs.assembly import assemble
from secure_fed.runs.dry_run import hidden_cohort_traffic
from secure_fed.runs.run import run

_EVENTS = ("on_promise", "on_probe", "on_run_begin", "on_progress", "on_round_end", "on_published", "on_end")


class Federation:
    """Clients, a server and a transport between them, ready to run.

    model, train, test: objects of yours; `train` is a list with one data set per client, a data set being anything with a
    length and items. Without them the configuration says what to load. A `train` of 10,000 clients or more that is no list or
    tuple is indexed only when a client is drawn; then no examples are held out for an audit.

    collate(items) -> batch; loss(model, batch) -> (B,) losses; metrics(model, batches) -> {"accuracy": ...}. By default items
    with `input_ids` and `labels` are padded and classified.

    non_members: examples of the same kind as the clients' that no client trains on, for a membership figure that is for the
    owner of the data alone.

    Some modules train in full: of a transformers model of yours, those outside its base model, and its pooler, which a
    checkpoint often lacks, but none of a language model, whose output layer was pre-trained with it; and of any module, those
    that `method.modules_to_save` names.

    callbacks: objects with any of `on_promise(sentences)`, `on_probe(figures)`, `on_run_begin(config, run_dir)`,
    `on_progress(progress)`, `on_round_end(record, state)`, `on_published(record)` and `on_end(result)`. The promise is the
    guarantee of a private run, its noise and its cost, before trials of the model and before budget is reserved; a probe's
    figures say how far its noise alone takes the loss (`noise_alone` of the result). A published record is a round's line in
    `metrics.jsonl`. It is published when the round ends; a private run publishes its records when the run ends, since times
    reveal how many clients trained.

    entropy: the source of noise and secret coins, by default the operating system. Any other has to say itself that it is not
    private, as `SeededEntropy` does for tests, and the result of its run says so.

    mechanism: a privacy mechanism of yours, as a function of its noise multiplier, in place of a file that `privacy.mechanism`
    names (docs/adding_a_mechanism.md).

    local(model, examples, round) -> loss or None: trains the model in place on a client's examples, in round 1, 2, ..., instead
    of the steps of [training]; any trainer will do, such as TRL's (docs/own_loops.md).

    `assembly` holds its parties and their terms.
    """

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
        non_members: Sequence[Any] | None = None,
        callbacks: Sequence[Any] = (),
        entropy: Entropy | None = None,
        mechanism: Callable[[float], Mechanism] | None = None,
        local: LocalFunction | None = None,
    ) -> None:
        if not isinstance(config, RunConfig | None):
            message = f"config is a {type(config).__name__}; make a RunConfig, with RunConfig.from_dict or .load"
            raise ConfigError(message).about("config", config, "a RunConfig")
        if not isinstance(callbacks, list | tuple):
            message = f"callbacks is a {type(callbacks).__name__}; give a list of objects"
            raise ConfigError(message).about("callbacks", callbacks, "a list")
        if deaf := [one for one in callbacks if not any(hasattr(one, event) for event in _EVENTS)]:
            message = (
                f"a callback is a {type(deaf[0]).__name__} without any of {', '.join(_EVENTS)}; give it one of them"
            )
            raise ConfigError(message).about("callbacks", deaf[0], "one of these methods")
        self.config = pinned(with_absolute_paths(config or RunConfig()))
        if self.config.data.chat_template:  # the run keeps the template itself, since its file may change
            self.config = self.config.replace({("data", "chat_template"): template_of(self.config.data)})
        if mechanism is not None and self.config.privacy.mechanism:
            message = "mechanism is given, and privacy.mechanism names another: leave one of the two out"
            raise ConfigError(message).about("privacy.mechanism", self.config.privacy.mechanism, "unset")
        self.config, self._chosen = decided(self.config, model)
        method = build(self.config)  # first, so that a wrong name fails before anything is loaded
        if local is not None:
            require_function(local)
            require_trainable(self.config, method)
            require_read(self.config)
        own = (model, train, test, collate, loss, metrics, non_members)
        problem = configured(self.config) if all(part is None for part in own) else given(self.config, *own)
        if problem.ranks:  # a run has its ranks in its settings, whatever becomes of the column
            ranks = [f"{name}={rank}" for name, rank in problem.ranks.items()]
            self.config = self.config.replace({("method", "ranks"): ranks, ("method", "ranks_column"): ""})
        self.assembly = assemble(self.config, method, problem, entropy, mechanism, local=local)
        self.config = self.assembly.config
        self.callbacks = list(callbacks)
        self._result: Result | None = None
        self._running = Lock()
        initial = self.assembly.initial
        self._states = WeakValueDictionary(
            {id(initial): initial}
        )  # the initial and released ones, none of them kept alive

    @property
    def warnings(self) -> list[str]:
        """Sentences that the user should read before training starts."""
        found = (self.assembly.problem.warning, recording.warning(self.config))
        return [warning for warning in found if warning]

    @property
    def notes(self) -> list[str]:
        """Sentences on surprising behaviour of the run: held-out training data, clients that all send in every round, a GPU
        that is not used, or parameters that the user had frozen.
        """
        counted = self.assembly.protection.plan is None
        pool, tail = self.assembly.pools["data"], self.assembly.server.tail
        idle = "" if self.config.model.device_map else idle_gpu(self.config.model.device)
        found = (
            pool.held_out(counted=counted),
            tail.said,
            hidden_cohort_traffic(self.assembly),
            idle,
            *self._chosen,
            self.assembly.problem.note,
        )
        return [note for note in found if note]

    def run(self, out: str | Path | None = None, *, resume: bool = False) -> Result:
        """Run all remaining rounds, and keep everything in the directory `out` if it is given.

        A private run first refuses what the ledger and the directory do not admit, and then a model or a loss for which trials
        show that the guarantee would not hold; only then it reserves budget.

        A run that is killed at any instant can be continued with `resume`. Without privacy it then ends with the same tensors
        as an uninterrupted run; with privacy it continues from its last release.
        """
        if not self._running.acquire(blocking=False):  # two runs would share the account of one
            message = "run() was called while this federation runs: wait for its end, or make another federation"
            raise ConfigError(message).about("run", "running", "one run at a time")
        try:
            outcome = run(self.assembly, Path(out) if out is not None else None, resume=resume, notify=self._notify)
            return self._result or Result(**vars(outcome))
        finally:
            self._running.release()

    def load(self, state: State) -> nn.Module:
        """The adapted model, loaded with the tensors of this state."""
        return self.assembly.objective.load(state.tensors)

    def export(self, state: State, out_dir: str | Path, *, base_model: str = "", client: str | None = None) -> Path:
        """Write the adapter and the head of this state, for PEFT if it is a LoRA adapter and for `load_adapter` otherwise.

        Refuses a folder that is not empty, and in a private federation a state of another one, whose guarantee it can't know.

        base_model: the Hub id or folder from which others load your base model. client: the client whose personal tensors are
        written, if the state has personal tensors.
        """
        out = Path(out_dir)
        noise_alone = self._result.summary["noise_alone"] if self._result else None
        write_federation(
            self.assembly,
            state,
            out,
            base_model=base_model,
            client=client,
            statement=self._stated(state),
            noise_alone=noise_alone,
        )
        return out

    def _stated(self, state: State) -> str:
        """The guarantee of this federation's states: from its last run or, before any run, from its plan."""
        planned = guarantee.planned(self.assembly)
        if planned and self._states.get(id(state)) is not state:
            message = "state is of no run of this federation: export that of its result or of on_round_end"
            raise ConfigError(message).about("state", f"after round {state.round}", "a state of this federation")
        if self._result:
            return str(self._result.summary["privacy_statement"])
        return str(planned["privacy"]["text"]) if planned else ""

    def _notify(self, event: str, *news: Any) -> None:
        """Notify every callback of an event. The result is set first, so that `on_end` can export with its statement."""
        if event == "on_end":
            self._result = Result(**vars(news[0]))
            news = (self._result,)
        state = getattr(news[-1], "state", news[-1])  # of a result, or after a round
        if isinstance(state, State):
            self._states[id(state)] = state
        for callback in self.callbacks:
            if hasattr(callback, event):
                getattr(callback, event)(*news)
