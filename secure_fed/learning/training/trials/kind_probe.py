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
    """Makes examples of kinds: made up, or else of the public ones (`Objective.public`).

    A trial on private examples would make one client's data decide how every client's gradients are computed, and so move bits
    that no noise covers.
    """

    objective: Objective
    kinds: Kinds
    placed: Placed

    def of(self, kind: Hashable, pattern: Any, count: int) -> KindProbe | None:
        """`count` examples of the kind; None if they can neither be made up nor found. pattern: an example, for its columns."""
        made = made_up(self.kinds, kind, self.objective.model, pattern, count)
        if made is None or not self._takes(self.kinds.collate, made):
            made = [item for item in self.objective.public[:_LOOKED_AT] if self.kinds(item) == kind]
        return self.own(kind, made, count) if made else None

    def own(self, kind: Hashable, items: Sequence[Any], count: int) -> KindProbe:
        """`count` examples made from `items`, which are of the kind: for a check that can only refuse."""
        probe = varied(items, count)
        # All of them are padded to one width: two show whether the model has positions for it.
        return KindProbe(probe, not isinstance(kind, Padded) or self._takes(self.kinds.together(kind), probe[:2]))

    def _takes(self, collate: Collate, probe: Sequence[Any]) -> bool:
        try:
            with torch.no_grad(), seeded(self.objective.device, np.random.default_rng(0)):
                found = losses(self.objective, collate, self.placed, probe)
        except _CANNOT:
            return False
        return bool(found.isfinite().all())


def nobodys(objective: Objective, collate: Collate, placed: Placed, pattern: Any) -> list[Any]:
    """Three examples of the pattern's kind, made up if possible, or else public ones of any kind; [] if there are none."""
    kinds = Kinds.of(objective, collate)
    probe = Probing(objective, kinds, placed).of(kinds(pattern), pattern, 3)
    return probe.items if probe else list(objective.public[:_LOOKED_AT])


_CANNOT = (ModelError, MethodError, DataError, RuntimeError, ValueError, TypeError, LookupError)
_LOOKED_AT = 512
