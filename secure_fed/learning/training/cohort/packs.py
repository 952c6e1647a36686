"""Per-example gradients in passes of public shapes, so that an example's gradient does not depend on other drawn examples.

Guarantee: the gradient that `Packs` gives for an example is bit for bit a function of that example, the model and public
numbers, whatever the other examples, their number and their order. A pass has examples of one kind (`kinds`), and one of the
sizes that the trial of that kind found to agree to the bit (`gradient_trial.tried`); a pass with too few examples is filled up
with copies, whose gradients are dropped. If no two examples can share a pass in this way, each has its own. Dropout masks are
independent from row to row and drawn in secret, so their distribution does not depend on the other examples.

The guarantee is as good as the trial: it holds for arithmetic that depends on shapes and not on values, such as matrix
products. The trial uses made-up examples (`made_up`), or public ones where nothing can be made up; without any, each example
is computed alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from secure_fed.config import TrainingConfig
from secure_fed.learning.data.dealing import places_of
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.per_example import Gradients, Path, one_by_one
from secure_fed.learning.training.trials.gradient_trial import tried
from secure_fed.learning.training.trials.kind_probe import Probing
from secure_fed.learning.training.trials.kinds import Kinds
from secure_fed.learning.training.trials.uncoupled import most_at_once


@dataclass(frozen=True)
class Way:
    """The path for gradients of one kind of examples, and the sizes of its passes, ascending."""

    path: Path
    sizes: tuple[int, ...]

    def rows(self, count: int) -> int:
        """The smallest size for `count` examples; the largest size is at least `count`."""
        return next(size for size in self.sizes if size >= count)


@dataclass(frozen=True)
class Packs:
    """Gradients of any examples. most: the most examples in a pass."""

    objective: Objective
    kinds: Kinds
    most: int

    @classmethod
    def of(cls, objective: Objective, collate: Collate, settings: TrainingConfig | None = None) -> Packs:
        return cls(objective, Kinds.of(objective, collate), most_at_once(objective.device, settings))

    def __call__(self, placed: Placed, items: Sequence[Any]) -> Gradients:
        """{name: (B, *shape)} in the order of `items`."""
        places: list[int] = []
        found: list[Gradients] = []
        for kind, of_kind in places_of(self.kinds(items[i]) for i in range(len(items))).items():
            way = self.way(kind, placed, items[of_kind[0]])
            most = way.sizes[-1]
            for at in range(0, len(of_kind), most):
                places += of_kind[at : at + most]
                found.append(self._pass(way, kind, placed, [items[i] for i in of_kind[at : at + most]]))
        if len(found) == 1 and places == sorted(places):
            return found[0]
        back = torch.tensor(places).argsort()
        return {
            name: torch.cat([one[name] for one in found])[back.to(tensor.device)]
            for name, tensor in placed.moving.items()
        }

    def _pass(self, way: Way, kind: Hashable, placed: Placed, items: list[Any]) -> Gradients:
        if way.path is one_by_one:
            return one_by_one(self.objective, self.kinds.collate, placed, items)
        filled = [*items, *items[:1] * (way.rows(len(items)) - len(items))]
        found = way.path(self.objective, self.kinds.together(kind), placed, filled)
        return {
            name: gradient[: len(items)] if len(gradient) == len(filled) else gradient
            for name, gradient in found.items()
        }

    def way(self, kind: Hashable, placed: Placed, pattern: Any) -> Way:
        """The way for a kind and the moving tensors, from a trial at its first use. pattern: an example of the kind."""
        key = (placed.shapes, kind, self.most)
        try:
            way: Way = self.objective.ways[key]
        except KeyError:
            way = self.objective.ways[key] = self._tried(kind, placed, pattern)
        return way

    def _tried(self, kind: Hashable, placed: Placed, pattern: Any) -> Way:
        probe = Probing(self.objective, self.kinds, placed).of(kind, pattern, self.most)
        if probe is None or not probe.padded:
            return Way(one_by_one, (1,))  # nothing to try, or a width for which the model has no positions
        return Way(*tried(self.objective, self.kinds.collate, self.kinds.together(kind), placed, probe.items))
