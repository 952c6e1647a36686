"""The effect of one guarantee's noise on each method, by the number of entries it releases; for `secure-fed budget plan`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from privacy.errors import PrivacyError
from privacy.forecast import Possible, in_turn, least_cohort, pick
from secure_fed.config import DataConfig, ModelConfig, RunConfig
from secure_fed.errors import ConfigError, MethodError, ModelError
from secure_fed.learning import tasks
from secure_fed.learning.data.holdout import HELD_OUT
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.evaluation import confidence
from secure_fed.learning.models.loading import last_layer, load
from secure_fed.learning.problem import Problem
from secure_fed.methods.catalogue import on
from secure_fed.methods.counted import classes_of
from secure_fed.methods.method import Method, State
from secure_fed.rounds.open_settings import reached, unsteady
from secure_fed.runs.assembly import assemble
from secure_fed.runs.hopeless import probe

if TYPE_CHECKING:
    from privacy.forecast import Setting
    from privacy.plan import Target


@dataclass(frozen=True)
class Space:
    """The number of a method's noised entries, the best way to add noise, and its harm.

    longer_below: with smaller cohorts the noise is longer than the distance that the model can move. noise_alone: the figures
    of the probe (`runs.hopeless`); None without the model's weights.
    """

    method: str
    numbers: int
    noise: str
    correlation: str
    length: float
    longer_below: int | None
    noise_alone: dict[str, Any] | None = None


def spaces(
    model: str,
    pooling: str,
    setting: Setting,
    target: Target,
    possible: Possible,
    say: Callable[[str], None] = lambda what: None,
    task: str = "classification",
) -> Iterator[Space]:
    """A row for each method with client-level privacy that fits the model, least noise first.

    pooling, task: as `model.pooling` and `data.task`.
    """
    classes = classes_of(model, task, None)
    made = list(on(model, classes, pooling, task))
    problem = _problem(model, pooling, task, classes or 0, setting.clients)
    found = []
    for count, (name, method, state) in enumerate(made, 1):
        row = _space(name, method, state, setting, target, possible)
        if problem is not None:
            say(f"measuring what the noise alone does: {name}, {count} of {len(made)}")
            config = _config(row, model, pooling, task, setting, target, possible)
            row = replace(row, noise_alone=_alone(config, method, problem))
        found.append(row)
    yield from sorted(found, key=lambda row: (row.length, row.method))


def _space(name: str, method: Method, state: State, setting: Setting, target: Target, possible: Possible) -> Space:
    numbers, passes = reached(method, state), len(method.plan(state).passes)
    own, correlated = replace(setting, dim=numbers), passes == 1 and not unsteady(method, state, setting.rounds)
    way = pick(own, in_turn(own, target, replace(possible, correlated=correlated)))
    least = least_cohort(own, target, correlated=correlated)
    return Space(name, numbers, way.noise, way.correlation, way.share(own) or 0.0, least)


def _config(
    row: Space, model: str, pooling: str, task: str, setting: Setting, target: Target, possible: Possible
) -> RunConfig:
    """The settings of a run of this plan with the row's method, and the row's way to add noise."""
    name, _, sketches = row.method.partition(", ")
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": model, "max_length": _LENGTH, "pooling": pooling},
        "method": {"name": name} | ({"transport_form": "sketch"} if sketches else {}),
        "federation": {
            "clients": setting.clients,
            "cohort": setting.cohort,
            "rounds": setting.rounds,
            "sampling": "schedule",
        },
        "privacy": {"unit": "client", "delta": setting.delta, "noise": row.noise, "correlation": row.correlation},
        "evaluation": {"dummies": 0},
    }
    if task != "classification":
        tables["data"] = {"task": task, "train": "nobody.jsonl"}
    given = {"epsilon": target.epsilon, "noise_multiplier": target.noise_multiplier}
    tables["privacy"] |= {setting: value for setting, value in given.items() if value is not None}
    if row.noise == "distributed":
        tables["secure_aggregation"] = {"enabled": True}
    return RunConfig.from_dict(tables)


def _problem(model: str, pooling: str, task_name: str, classes: int, clients: int) -> Problem | None:
    """A problem of the task without data; None where the model has no weights here."""
    task = tasks.build(DataConfig(task=task_name, stride=_LENGTH // 4))
    labels = [str(label) for label in range(classes)]
    try:
        loaded = load(ModelConfig(name=model, max_length=_LENGTH, pooling=pooling), task, labels, seed=0)
    except (ModelError, ConfigError):
        return None
    names = [f"client {number}" for number in range(clients)]
    second = _SECOND.get(task_name)
    row = Rows((task.line("text"),), (task.unlabelled,), tuple(labels), None if second is None else (second,))
    nobody = task.encode(loaded.tokenizer, row, _LENGTH)
    return Problem(
        model=loaded.model,
        head=loaded.head,
        last=last_layer(loaded.model),
        train=[()] * clients,
        names=names,
        test=nobody,
        collate=task.collate(loaded.tokenizer),
        loss=task.loss(labels),
        metrics=task.metrics(labels),
        confidence=confidence(task_name, task.loss(labels)),
        tokenizer=loaded.tokenizer,
        facts={"task": task.title, "label_names": labels, "clients": names, "test": {"from": HELD_OUT["client"]}},
        sizes=[1] * clients,
    )


def _alone(config: RunConfig, method: Method, problem: Problem) -> dict[str, Any] | None:
    """The figures of the probe; None where the method cannot run with these settings."""
    own = replace(problem, model=copy.deepcopy(problem.model))
    try:
        found = probe(assemble(config, method, own, masked=False))
    except (ConfigError, MethodError, ModelError, PrivacyError):
        return None
    return None if found is None else found.to_dict()


_LENGTH = 32  # tokens of a made-up text
_SECOND: dict[str, Any] = {"question_answering": "text", "multiple_choice": ("text", "text")}  # beside the first text
