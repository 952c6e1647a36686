"""Refusal of models and losses that couple the examples of a batch, or that keep statistics of past examples.

A trial checks this on examples of every kind (`kinds`), in batches as large as `most`; once for each kind and the moving
tensors. The examples are made up or public if possible, or else the data's own: this trial can only refuse to train.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from secure_fed.activity import activity
from secure_fed.config import TrainingConfig
from secure_fed.learning.data.dealing import places_of
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.trials.gradient_trial import parameters_stay, require_uncoupled
from secure_fed.learning.training.trials.kind_probe import Probing
from secure_fed.learning.training.trials.kinds import Kinds


@dataclass(frozen=True)
class Uncoupled:
    """The requirement that each example's loss depends on that example alone. known: examples of the data for trials."""

    objective: Objective
    kinds: Kinds
    most: int
    known: Sequence[Any] = ()

    @classmethod
    def of(cls, objective: Objective, collate: Collate, settings: TrainingConfig, known: Sequence[Any]) -> Uncoupled:
        return cls(
            objective,
            Kinds.of(objective, collate),
            most_at_once(objective.device, settings),
            known,
        )

    def require_all(self, placed: Placed, clients: Sequence[Sequence[Any]]) -> None:
        """ModelError if examples of the clients are coupled, before any release of theirs.

        If kinds depend on lengths, all of them are checked; otherwise the kinds of some of the largest client's examples, and
        other kinds at their first use.
        """
        if not self.kinds.by_length:
            clients = [max(clients, key=len)[:_LOOKED_AT]]
        found: dict[Hashable, list[Any]] = {}  # some examples of each kind, of the first client that has any
        for items in clients:
            for kind, of_kind in places_of(self.kinds(items[i]) for i in range(len(items))).items():
                if kind not in found:
                    found[kind] = [items[i] for i in of_kind[: self.most]]
        untried = {kind: items for kind, items in found.items() if self._key(kind, placed) not in self.objective.ways}
        with activity("checking that each example's gradient is its own", len(untried)) as now:
            for kind, items in untried.items():
                now.step()
                self.require(kind, placed, items)

    def require(self, kind: Hashable, placed: Placed, items: Sequence[Any]) -> None:
        """The same for one kind. items: examples of the kind."""
        key = self._key(kind, placed)
        if key in self.objective.ways:
            return
        with parameters_stay(self.objective, placed.held | placed.moving):
            probing = Probing(self.objective, self.kinds, placed)
            probe = probing.of(kind, items[0], self.most) or probing.own(kind, self._own(kind, items), self.most)
            if probe.padded:  # else each is computed alone
                require_uncoupled(self.objective, self.kinds.collate, self.kinds.together(kind), placed, probe.items)
        self.objective.ways[key] = True

    def _key(self, kind: Hashable, placed: Placed) -> Hashable:
        return "uncoupled", placed.shapes, kind, self.most

    def _own(self, kind: Hashable, items: Sequence[Any]) -> Sequence[Any]:
        if len(items) >= self.most:
            return items
        return [item for item in self.known[:_LOOKED_AT] if self.kinds(item) == kind] or items


def most_at_once(device: torch.device, settings: TrainingConfig | None = None) -> int:
    """The most examples in one pass: `training.microbatch`, or the device's default."""
    return (settings.microbatch if settings else None) or _MOST.get(device.type, _ELSEWHERE)


_MOST = {"cpu": 8}  # on a CPU, larger passes take no less time per example
_ELSEWHERE = 32
_LOOKED_AT = 64
