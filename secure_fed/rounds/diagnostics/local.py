"""Diagnostics of each client's trained tensors. Two of the three compare them with the tensors the client started from.

Papers leave open whether such a comparison uses the global model before the round or after it. Here it is the model before the
round, so nothing of a client must be kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from secure_fed.rounds.diagnostics.angles import of_wholes
from secure_fed.rounds.diagnostics.compared import Weights
from secure_fed.rounds.diagnostics.similarity import linear_cka
from secure_fed.tensors.tensors import Tensors


class Local(Protocol):
    """A diagnostic over the clients of a round, taken one by one."""

    def see(self, before: Tensors, after: Tensors, weight: float) -> None:
        """Take one client. before: all its tensors before training. after: the tensors that it trained. weight: in the mean."""

    def collected(self) -> dict[str, float]:
        """Numbers by name, over the clients since the last call; empty if there were none."""


@dataclass
class Discrepancy:
    """FedARA's magnitude and direction discrepancy (equations 5 and 6), each the mean over the clients of a round.

    Deviation: equation 5 prints the sum over clients, which would grow with the cohort.
    """

    weights: Weights
    _seen: list[tuple[float, float]] = field(default_factory=list)

    def see(self, before: Tensors, after: Tensors, weight: float) -> None:
        self._seen.append(of_wholes(self.weights.pairs(before, before | after, tuple(after))))

    def collected(self) -> dict[str, float]:
        seen, self._seen = self._seen, []
        if not seen:
            return {}
        magnitudes, directions = zip(*seen, strict=True)
        return {"magnitude": _mean(magnitudes), "direction": _mean(directions)}


@dataclass
class Drift:
    """C2A's drift: CKA between the model that a client received and the model that it trained, on the same held-out examples.

    features(tensors) -> (rows, p) of the model with these tensors. The received model is evaluated once where it is the same
    for all clients.
    """

    features: Callable[[Tensors], Tensor]
    _given: tuple[Tensors, Tensor] | None = None
    _seen: list[float] = field(default_factory=list)

    def see(self, before: Tensors, after: Tensors, weight: float) -> None:
        if self._given is None or not _same_objects(self._given[0], before):
            self._given = (before, self.features(before))
        self._seen.append(linear_cka(self._given[1], self.features(before | after)))

    def collected(self) -> dict[str, float]:
        seen, self._seen, self._given = self._seen, [], None
        return {"mean": _mean(seen), "worst": min(seen, default=math.nan)} if seen else {}


def _same_objects(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def _mean(values: Sequence[float]) -> float:
    """The mean; NaN if a value is NaN."""
    return math.fsum(values) / len(values)
