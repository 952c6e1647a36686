"""Metrics of a round's global model on the test set, and of clients on their own examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from secure_fed.errors import ConfigError
from secure_fed.learning.evaluation import evaluate
from secure_fed.rounds.diagnostics.targets import require_accuracy

if TYPE_CHECKING:
    from secure_fed.federation import Federation
    from secure_fed.methods.method import State
    from secure_fed.rounds.record import Record
    from secure_fed.tensors.tensors import Tensors


def across_clients(metrics: Sequence[Mapping[str, float]], name: str) -> dict[str, float]:
    """A metric's mean over clients, and its mean over the tenth of them that is served worst (at least one)."""
    if not all(name in own for own in metrics):
        raise ConfigError(
            f"evaluation.per_client compares clients by {name!r}, which metrics does not give; let it, or leave the setting out"
        )
    ordered = np.sort([own[name] for own in metrics])
    worst = ordered[: max(1, len(ordered) // 10)]
    return {"mean": float(ordered.mean()), "worst_decile": float(worst.mean())}


def evaluated(federation: Federation, state: State) -> Record:
    """What a round says of its state: metrics on the test set and, if asked for, of each client on its own examples."""
    settings, parts = federation.config.evaluation, federation.parts

    def measure(tensors: Tensors, examples: Sequence[Any]) -> dict[str, float]:
        model = federation.objective.load(tensors)
        return evaluate(model, examples, parts.collate, parts.metrics, settings.batch_size, federation.device)

    record: Record = dict(measure(state.tensors, parts.test))
    if settings.target_accuracy is not None:
        require_accuracy(record, settings.target_accuracy)
    if settings.per_client:
        with_any = [client for client in federation.clients if len(client.examples)]  # holding out may leave none
        own = [measure(state.tensors | client.personal, client.examples) for client in with_any]
        record["clients_accuracy"] = across_clients(own, "accuracy")
    return record
