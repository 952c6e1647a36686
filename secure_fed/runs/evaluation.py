"""Metrics of a federation's global state: on the test set, and of each client on its own examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from secure_fed.errors import ConfigError
from secure_fed.learning.evaluation import evaluate
from secure_fed.methods.method import State
from secure_fed.rounds.diagnostics.targets import require_accuracy
from secure_fed.rounds.record import Record
from secure_fed.runs.assembly import Assembly
from secure_fed.tensors.tensors import Tensors


def evaluated(assembly: Assembly, state: State) -> Record:
    """Metrics of a state on the test set and, with `evaluation.per_client`, of each client's model on its own examples."""
    settings, problem, objective = assembly.config.evaluation, assembly.problem, assembly.objective

    def measure(tensors: Tensors, examples: Sequence[Any]) -> dict[str, float]:
        model = objective.load(tensors)
        return evaluate(model, examples, problem.collate, problem.metrics, settings.batch_size, objective.device)

    record: Record = dict(measure(state.tensors, problem.test))
    if settings.target_accuracy is not None:
        require_accuracy(record, settings.target_accuracy)
    if settings.per_client:
        with_any = [client for client in assembly.clients if len(client.examples)]  # holding out may leave none
        own = [measure(state.tensors | client.personal, client.examples) for client in with_any]
        record["clients_accuracy"] = across_clients(own, "accuracy")
    return record


def across_clients(metrics: Sequence[Mapping[str, float]], name: str) -> dict[str, float]:
    """A metric's mean over clients, and its mean over the tenth of them that is served worst (at least one)."""
    if not all(name in own for own in metrics):
        raise ConfigError(
            f"evaluation.per_client compares clients by {name!r}, which metrics does not give; let it, or leave the setting out"
        ).about("evaluation.per_client", True, f"metrics with {name!r}")
    ordered = np.sort([own[name] for own in metrics])
    worst = ordered[: max(1, len(ordered) // 10)]
    return {"mean": float(ordered.mean()), "worst_decile": float(worst.mean())}
