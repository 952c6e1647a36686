"""Examples of a kind, for trials of the passes in which a model computes the kind."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from secure_fed.errors import DataError, MethodError, ModelError
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.local import Placed, seeded
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.per_example import losses
from secure_fed.learning.training.trials.kinds import Kinds, Padded
from secure_fed.learning.training.trials.made_up import made_up, varied


@dataclass(frozen=True)
class KindProbe:
    """Examples of one kind. padded: whether the model takes them at the width of their kind."""

    items: list[Any]
    padded: bool


@dataclass(frozen=True)
class Probing:
    """Makes examples of kinds: made up, or the data's own where nothing can be made up. known: further data for trials."""

    objective: Objective
    kinds: Kinds
    placed: Placed
    known: Sequence[Any] = ()

    def of(self, kind: Hashable, items: Sequence[Any], count: int) -> KindProbe:
        """`count` examples of the kind. items: examples of the data that are of this kind."""
        alone, together = self.kinds.collate, self.kinds.together(kind)
        probe = made_up(self.kinds, kind, self.objective.model, items[0], count)
        if probe is None or not self._takes(alone, probe):
            probe = self._of_the_data(kind, items, count)
        # All of them are padded to one width: two show whether the model has positions for it.
        return KindProbe(probe, not isinstance(kind, Padded) or self._takes(together, probe[:2]))

    def _of_the_data(self, kind: Hashable, items: Sequence[Any], count: int) -> list[Any]:
        others = (item for item in self.known[:_LOOKED_AT] if self.kinds(item) == kind)
        own = list(items[:count]) if len(items) >= count else list(others)
        return varied(own or items, count)

    def _takes(self, collate: Collate, probe: Sequence[Any]) -> bool:
        try:
            with torch.no_grad(), seeded(self.objective.device, np.random.default_rng(0)):
                found = losses(self.objective, collate, self.placed, probe)
        except _CANNOT:
            return False
        return bool(found.isfinite().all())


def nobodys(objective: Objective, collate: Collate, placed: Placed, examples: Sequence[Any]) -> list[Any]:
    """Three examples, made up if possible, of the kind of the data's first example."""
    kinds, item = Kinds.of(objective, collate), examples[0]
    return Probing(objective, kinds, placed, examples).of(kinds(item), [item], 3).items


_CANNOT = (ModelError, MethodError, DataError, RuntimeError, ValueError, TypeError, LookupError)
_LOOKED_AT = 64
