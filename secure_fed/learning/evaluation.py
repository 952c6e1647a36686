"""Metrics of a global model on a test set, and of clients on their own examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from secure_fed.errors import ConfigError
from secure_fed.learning.data.encode import batches
from secure_fed.learning.training.local import Batch, Collate, to_device
from secure_fed.rounds.diagnostics.targets import require_accuracy

if TYPE_CHECKING:
    from secure_fed.federation import Federation
    from secure_fed.methods.method import State
    from secure_fed.rounds.record import Record
    from secure_fed.tensors.tensors import Tensors

Metrics = Callable[[nn.Module, Iterable[Batch]], dict[str, float]]


@torch.no_grad()
def evaluate(
    model: nn.Module, examples: Sequence[Any], collate: Collate, metrics: Metrics, batch_size: int, device: torch.device
) -> dict[str, float]:
    """What `metrics` says of the model, in evaluation mode, over all examples, as plain numbers."""

    def on_device() -> Iterator[Batch]:
        for batch in batches(examples, batch_size, collate, None):
            yield to_device(batch.inputs, device)

    model.eval()
    given: Any = metrics(model, on_device())
    try:
        return {str(name): float(value) for name, value in given.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"metrics must give a dict of names and numbers, and gave {given!r:.80}") from error


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
