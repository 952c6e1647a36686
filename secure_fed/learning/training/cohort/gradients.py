"""The two ways to compute the gradients of a cohort's examples.

Common   in passes that clients share (`one_pass`), divided by a packing, spread over threads
InTurn   for one client alone, by the path that a trial chose for its model (`packs`)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from secure_fed.errors import ModelError
from secure_fed.learning.data.dealing import places_of
from secure_fed.learning.training.cohort.crew import Alone, Crew, crew_of
from secure_fed.learning.training.cohort.division import Entry, Packing, Passes
from secure_fed.learning.training.cohort.one_pass import Found, Pack, Places, found_in
from secure_fed.learning.training.cohort.packs import Packs
from secure_fed.learning.training.local import Job, Placed, seeded
from secure_fed.learning.training.objective import Objective


@dataclass
class Common:
    """Common passes. seeds: the source of their dropout seeds; None if the model has no dropout. spread: see `crew_of`."""

    objective: Objective
    places: Places
    packing: Packing
    seeds: np.random.Generator | None
    spread: bool

    @contextmanager
    def begun(self) -> Iterator[Passes]:
        self.objective.begin()
        with crew_of(self.objective, spread=self.spread) as crew:
            yield partial(self._passes, crew)

    def _passes(self, crew: Crew | Alone, entries: Sequence[Entry], rows: Sequence[int]) -> Iterator[Found]:
        def found(objective: Objective, pack: Pack) -> Found:
            of_clients = replace(pack, owners=[rows[owner] for owner in pack.owners])
            own = torch.tensor(pack.owners[: pack.count], device=objective.device)
            return replace(found_in(objective, self.places, of_clients), owners=own)

        yield from crew.results(found, map(self._seeded, self.packing.packs(entries)))

    def _seeded(self, pack: Pack) -> Pack:
        return pack if self.seeds is None else replace(pack, seed=int(self.seeds.integers(2**63)))


class InTurn:
    """Passes of one client, the first of `places`. Their losses are NaN."""

    def __init__(self, objective: Objective, places: Places, job: Job, placed: Placed) -> None:
        self._objective, self._places, self._job, self._placed = objective, places, job, placed
        self._packs = Packs.of(objective, job.collate, job.settings)

    @contextmanager
    def begun(self) -> Iterator[Passes]:
        self._objective.begin()
        with seeded(self._objective.device, self._job.rng):
            yield self._passes

    def _passes(self, entries: Sequence[Entry], rows: Sequence[int]) -> Iterator[Found]:
        moving = self._places.flat.parts(self._places.moving[:1])
        placed = replace(
            self._placed, moving={name: part[0].detach().requires_grad_() for name, part in moving.items()}
        )
        for of_kind in places_of(self._packs.kinds(item) for _, item in entries).values():
            for at in range(0, len(of_kind), self._packs.most):
                yield self._found(placed, [entries[i] for i in of_kind[at : at + self._packs.most]])

    def _found(self, placed: Placed, some: Sequence[Entry]) -> Found:
        """The gradients of some examples; ModelError for shapes that are not per example, which cannot be clipped."""
        found = self._packs(placed, [item for _, item in some])
        for name, tensor in placed.moving.items():
            if found[name].shape != (len(some), *tensor.shape):
                raise ModelError(
                    f"the per-example gradients of {name} have shape {tuple(found[name].shape)} for {len(some)} examples "
                    f"of shape {tuple(tensor.shape)}; keep this tensor frozen"
                )
        rows = self._places.flat.joined([found[name].detach() for name in placed.moving])
        return Found(torch.tensor([number for number, _ in some]), rows, rows.new_full((len(some),), math.nan))
