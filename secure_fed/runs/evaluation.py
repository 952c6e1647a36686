"""Evaluations of a run: metrics of its global state, the best of them, and when to stop waiting for a better one.

A state is measured on the test set, and with `evaluation.per_client` each client's model on the client's own examples. Where
tensors are personal, the shared model has their initial values, and its metrics say nothing: the test set's metrics are then
means over clients' own models. Not under privacy, where clients' own models are not released; and where clients are on machines
of their own, which alone have these models, nothing is measured.

Evaluations are compared by the task's headline metric (F1 of entities and of answers, else accuracy), or by loss in a run that
does not measure it. Choosing a model by a test set reveals something about that test set. So under privacy the test set must be
a declared one, not rows held out of the protected data (`assembly`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.evaluation import evaluate
from secure_fed.learning.tasks.headline import headline, shown
from secure_fed.methods.method import State
from secure_fed.rounds.diagnostics import require_headline
from secure_fed.rounds.sums import Record
from secure_fed.runs.assembly import Assembly
from secure_fed.tensors.tensors import Tensors

_CHOOSING = ("patience", "keep_best")  # settings of [evaluation]
_MOST = 10  # models of clients


def evaluated(assembly: Assembly, state: State) -> Record:
    """Metrics of a state on the test set, also of the answers that it writes (`evaluation.generate`).

    With `evaluation.per_client` also metrics of each client's model on its own examples. Clients are compared by the task's
    headline metric, recorded as `clients_accuracy` whatever it is.
    """
    settings, problem, objective = assembly.config.evaluation, assembly.problem, assembly.objective

    def tested(tensors: Tensors) -> dict[str, float]:
        written = problem.asked.measured(objective.load(tensors), problem.tokenizer) if problem.asked else {}
        return metrics_of(assembly, tensors, problem.test) | written

    task = assembly.config.data.task
    if assembly.config.method.personal and not assembly.everybody_here:
        return {}
    found = [tested(tensors) for tensors in _models(assembly, state)]
    record: Record = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    if settings.target_accuracy is not None:
        require_headline(record, settings.target_accuracy, task)
    if settings.per_client:
        with_any = [client for client in assembly.clients if len(client.examples)]  # holding out may leave none
        own = [metrics_of(assembly, state.tensors | client.personal, client.examples) for client in with_any]
        record["clients_accuracy"] = across_clients(own, headline(task))
    return record


def metrics_of(assembly: Assembly, tensors: Tensors, examples: Sequence[Any]) -> dict[str, float]:
    """The metrics of the model with these tensors on some examples."""
    problem, objective, size = assembly.problem, assembly.objective, assembly.config.evaluation.batch_size
    model = objective.load(tensors)
    with objective.reading:
        return evaluate(model, examples, problem.collate, problem.metrics, size, objective.device)


def _models(assembly: Assembly, state: State) -> list[Tensors]:
    """The shared model; where tensors are personal, the models of at most ten clients that trained, spread evenly over all."""
    own = []
    if assembly.config.method.personal and assembly.config.privacy.unit == "none":
        own = [client.personal for client in assembly.clients if client.kept is not None]
    chosen = own[:: -(-len(own) // _MOST)] if own else [Tensors()]
    return [state.tensors | personal for personal in chosen]


def across_clients(metrics: Sequence[Mapping[str, float]], name: str) -> dict[str, float]:
    """A metric's mean over clients, and its mean over the tenth of them that is served worst (at least one)."""
    if not all(name in own for own in metrics):
        raise ConfigError(
            f"evaluation.per_client compares clients by {name!r}, which metrics does not return: return it, or leave this out"
        ).about("evaluation.per_client", True, f"metrics with {name!r}")
    ordered = np.sort([own[name] for own in metrics])
    worst = ordered[: max(1, len(ordered) // 10)]
    return {"mean": float(ordered.mean()), "worst_decile": float(worst.mean())}


def require_measured(measured: Record, config: RunConfig) -> None:
    """ConfigError for an evaluation by which no model can be chosen, where one is to be chosen."""
    name = next((name for name in _CHOOSING if getattr(config.evaluation, name)), None)
    # After a run diverged its loss is NaN, which is no better than any number.
    if name and not {headline(config.data.task), "accuracy", "loss"} & set(measured):
        raise ConfigError(
            f"evaluation.{name} needs accuracy or loss, and the evaluation has neither: return one from metrics"
        ).about(f"evaluation.{name}", getattr(config.evaluation, name), "metrics with 'accuracy' or 'loss'")


def best(records: Sequence[Record], task: str) -> Record | None:
    """The record of the first of the best evaluations, None before there is one. task: see `headline`."""
    name = _compared(records, task)
    sign = -1 if name == "loss" else 1
    return max(_measured(records, name), key=lambda record: sign * float(record[name]), default=None)


def stalled(records: Sequence[Record], patience: int | None, task: str) -> str:
    """The reason to end the run: `patience` evaluations in a row were no better than the best before them; "" to go on."""
    found = best(records, task)
    if not patience or found is None:
        return ""
    name = _compared(records, task)
    if sum(record["round"] > found["round"] for record in _measured(records, name)) < patience:
        return ""
    reached = f"loss {found['loss']:.4g}" if name == "loss" else shown(name, found[name])
    return f"{patience} evaluations in a row were no better than the evaluation of round {found['round']}, {reached}"


def _compared(records: Sequence[Record], task: str) -> str:
    """The one number by which all evaluations of a run are compared: of the task's metrics and the loss, the first measured."""
    return next((name for name in (headline(task), "accuracy") if _measured(records, name)), "loss")


def _measured(records: Sequence[Record], name: str) -> list[Record]:
    """The records with a finite number of that name."""
    return [one for one in records if isinstance(one.get(name), int | float) and math.isfinite(one[name])]
