"""Metrics of a global model on a test set, and of clients on their own examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from secure_fed.data.encode import batches
from secure_fed.errors import ConfigError
from secure_fed.training import Batch, Collate, to_device

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
