"""Metrics of a model over examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from secure_fed.activity import activity
from secure_fed.errors import ConfigError
from secure_fed.learning.data.encode import batches
from secure_fed.learning.tasks.next_tokens import rows_together
from secure_fed.learning.tasks.task import Collate, Metrics
from secure_fed.learning.training.objective import to_device


@torch.no_grad()
def evaluate(
    model: nn.Module, examples: Sequence[Any], collate: Collate, metrics: Metrics, batch_size: int, device: torch.device
) -> dict[str, float]:
    """The metrics of the model, in evaluation mode, over all examples, as plain numbers."""
    if model.training:  # `eval` visits every module, which is slow
        model.eval()
    read = batches(examples, batch_size, collate, None)
    with activity("evaluating in batches", -(-len(examples) // batch_size)) as now:

        def made() -> Iterator[Any]:
            for batch in read:
                now.step()
                yield to_device(batch.inputs, device)

        with rows_together():
            given: Any = metrics(model, made())
    try:
        return {str(name): float(value) for name, value in given.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"metrics must give a dict of names and numbers, and gave {given!r:.80}") from error
