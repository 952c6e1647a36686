"""Per-example gradients in passes whose shape is public, so that an example's gradient does not depend on who else was drawn.

Guarantee: what `Packs` gives for an example is a function of that example, of the model and of public numbers, whatever the
other examples are, how many and in which order, to the bit. A pass holds examples of one kind (`kinds`), and as many as one of
the sizes that the trial of that kind found to agree to the bit (`gradient_trial.tried`); a pass with too few is filled up with
copies, whose gradients are dropped. Where no two examples can share a pass so, each has one of its own. Dropout masks are
independent from row to row and drawn in secret, so they follow the same law whoever is there.

This is as good as the trial: it holds for arithmetic that goes by shapes and not by values, as that of matrix products does,
and it is tried on examples that are made up (`made_up`), or are the data's own where nothing can be made up.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from secure_fed.config import TrainingConfig
from secure_fed.learning.data.dealing import places_of
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.gradient_trial import tried
from secure_fed.learning.training.kind_probe import Probing
from secure_fed.learning.training.kinds import Kinds
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.per_example import Gradients, Path, one_by_one
from secure_fed.learning.training.uncoupled import most_at_once


@dataclass(frozen=True)
class Way:
    """The path that gradients of one kind of examples take, and the sizes of its passes, ascending."""

    path: Path
    sizes: tuple[int, ...]

    def rows(self, count: int) -> int:
        """The size of the pass of so many examples, which the largest size holds."""
        return next(size for size in self.sizes if size >= count)


@dataclass(frozen=True)
class Packs:
    """Gradients of any examples. most: how many a pass holds at most. known: examples to try a kind on beside those at hand."""

    objective: Objective
    kinds: Kinds
    most: int
    known: Sequence[Any] = ()

    @classmethod
    def of(
        cls, objective: Objective, collate: Collate, settings: TrainingConfig | None = None, known: Sequence[Any] = ()
    ) -> Packs:
        return cls(
            objective,
            Kinds.of(objective, collate),
            most_at_once(objective.device, settings),
            known,
        )

    def __call__(self, placed: Placed, items: Sequence[Any]) -> Gradients:
        """{name: (B, *shape)} in the order of `items`."""
        places: list[int] = []
        found: list[Gradients] = []
        for kind, of_kind in places_of(self.kinds(items[i]) for i in range(len(items))).items():
            way = self.way(kind, placed, [items[i] for i in of_kind])
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

    def way(self, kind: Hashable, placed: Placed, items: Sequence[Any]) -> Way:
        """The way that is right for a kind and the tensors that move, tried out the first time. items: some of the kind."""
        key = (placed.shapes, kind, self.most)
        try:
            way: Way = self.objective.ways[key]
        except KeyError:
            way = self.objective.ways[key] = self._tried(kind, placed, items)
        return way

    def _tried(self, kind: Hashable, placed: Placed, items: Sequence[Any]) -> Way:
        probe = Probing(self.objective, self.kinds, placed, self.known).of(kind, items, self.most)
        if not probe.padded:
            return Way(one_by_one, (1,))  # a width for which the model has no positions
        return Way(*tried(self.objective, self.kinds.collate, self.kinds.together(kind), placed, probe.items))
