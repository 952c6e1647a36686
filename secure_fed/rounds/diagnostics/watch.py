"""The diagnostics of a run: computed from every client's training, and from consecutive global states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secure_fed.config import EvaluationConfig, RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.data.encode import batches
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.learning.tasks.task import Batch, Collate, Loss
from secure_fed.learning.training.objective import Objective, to_device
from secure_fed.methods.method import Method, State
from secure_fed.rounds.diagnostics.aggregation import AggregationError
from secure_fed.rounds.diagnostics.compared import Weights
from secure_fed.rounds.diagnostics.local import Discrepancy, Drift, Local
from secure_fed.rounds.diagnostics.similarity import features
from secure_fed.rounds.diagnostics.targets import transfer_seconds
from secure_fed.rounds.diagnostics.variation import Variation
from secure_fed.tensors.tensors import Tensors

_PROBE = 256


@dataclass(frozen=True)
class Watch:
    """Collects diagnostics over a round.

    It carries nothing from one round to the next, so an interrupted run resumes with the same numbers.
    """

    settings: EvaluationConfig
    local: Mapping[str, Local]
    variation: Variation | None = None

    def see(self, before: Tensors, after: Tensors, weight: float) -> None:
        """Take a client's tensors before and after training. Tensors that are not finite are left out, as in the round."""
        if after.is_finite():
            for one in self.local.values():
                one.see(before, after, weight)

    def begin(self) -> None:
        """Forget an interrupted round."""
        for one in self.local.values():
            one.collected()

    def entries(self, before: State, after: State, record: Mapping[str, Any]) -> dict[str, Any]:
        """Entries for the round's record. Undefined numbers are None."""
        found = {name: numbers for name, one in self.local.items() if (numbers := one.collected())}
        if self.variation is not None:
            found["variation"] = self.variation.between(before, after)
        entries: dict[str, Any] = {
            name: {key: _plain(value) for key, value in own.items()} for name, own in found.items()
        }
        if self.settings.bandwidth is not None:
            entries["transfer_seconds"] = transfer_seconds(record, self.settings.bandwidth)
        if clash := sorted(set(entries) & set(record)):
            message = f"metrics gives {clash[0]!r}, which is a diagnostic's name too; call it something else"
            raise ConfigError(message).about("metrics", clash[0], "a name of its own")
        return entries


def watch(
    config: RunConfig,
    method: Method,
    initial: Tensors,
    objective: Objective,
    collate: Collate,
    loss: Loss,
    test: Sequence[Any],
) -> Watch | None:
    """The diagnostics that `config` requests; None if it requests none."""
    settings = config.evaluation
    if not settings.diagnostics and settings.bandwidth is None:
        return None
    weights, chosen = Weights(method, initial), settings.diagnostics
    local: dict[str, Local] = {}
    if "discrepancy" in chosen:
        local["discrepancy"] = Discrepancy(weights)
    if "drift" in chosen:
        local["drift"] = Drift(_Probe(objective, collate, loss, test, settings.batch_size))
    if "aggregation_error" in chosen:
        if not pairs(initial):
            raise ConfigError(
                "evaluation.diagnostics = 'aggregation_error' compares products of LoRA's factors A and B, and "
                f"method.name = {config.method.name!r} trains none; leave it out"
            ).about("evaluation.diagnostics", "aggregation_error", "a method of LoRA's factors")
        local["aggregation_error"] = AggregationError(pairs(initial))
    return Watch(settings, local, Variation(weights) if "variation" in chosen else None)


@dataclass(frozen=True)
class _Probe:
    """The features of 256 test examples, spread evenly over the test set, or of all of a smaller one."""

    objective: Objective
    collate: Collate
    loss: Loss
    test: Sequence[Any]
    batch_size: int

    def __call__(self, tensors: Tensors) -> Tensor:
        return features(self.objective.load(tensors), self.loss, self._batches())

    def _batches(self) -> Iterator[Batch]:
        test = self.test
        chosen = torch.linspace(0, len(test) - 1, min(_PROBE, len(test))).long().tolist()
        for batch in batches([test[index] for index in chosen], self.batch_size, self.collate, None):
            yield to_device(batch.inputs, self.objective.device)


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
