"""The local trainings of many clients over one frozen base, in common passes.

Each is by itself what `local.train` makes of it: the same batches in the same order, its own optimiser state, its own loss. In
step t the t-th batches of all clients are put together, and their examples are divided into passes (`cohort_packs`). Every
example's gradient is taken at its own client's tensors (`cohort_pass`). A client's gradients are added up in an order that its
own examples decide. One vectorised optimiser step moves all clients, and a client without a batch left sits out.

The results are those of `train` up to the rounding of sums in another order. With `public` shapes they are, to the bit, a
function of the client's own job. With dropout losses follow the same law, and bits differ. A model that cannot be trained so
is found out beforehand, and its trainings are made one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fed.learning.training.cohort_packs import Packing, Public, Room, Tight
from secure_fed.learning.training.cohort_pass import Found, Pack, Places, Trial, found_in, tried
from secure_fed.learning.training.crew import Alone, Crew, crew_of
from secure_fed.learning.training.local import Job, Objective, Placed, Trained, train
from secure_fed.learning.training.schedule import optimizer_of, planned_steps
from secure_fed.tensors.tensors import Tensors


@dataclass
class Ways:
    """The kinds of trainings that may share passes, as far as that has been tried out."""

    trials: dict[Hashable, Trial] = field(default_factory=dict)

    @property
    def why_not(self) -> str:
        """A reason why not all shared passes, if there is one."""
        return next((trial.why_not for trial in self.trials.values() if trial.why_not), "")

    def of(self, objective: Objective, alike: Sequence[Job]) -> Trial:
        """What a trial of this kind found: on examples of one of the jobs, the first time."""
        first = alike[0]
        if first.kind not in self.trials:
            placed = [job.placed(objective.device) for job in (first, alike[-1])]
            examples = max((job.examples for job in alike), key=len)
            self.trials[first.kind] = tried(objective, placed, examples, first.collate)
        return self.trials[first.kind]


def train_together(
    objective: Objective, jobs: Sequence[Job], ways: Ways | None = None, *, public: bool = False
) -> list[Trained]:
    """Train each job as `train` does, and return the results in the order of the jobs, which share one collate.

    `ways` learns which kinds can share passes, for the next call too. public: divide examples into passes of public shapes, as
    a guarantee for each client needs it; a job by itself takes such passes too, and a trial goes by the model alone.
    """
    if any(job.collate is not jobs[0].collate for job in jobs):
        raise ValueError("jobs that are trained together must share one collate: their batches are collated together")
    ways = ways or Ways()
    done: dict[int, Trained] = {}
    for numbers in _alike(jobs):
        alike = [jobs[number] for number in numbers]
        nothing_to_share = not any(len(job.examples) for job in alike) or (len(alike) == 1 and not public)
        if nothing_to_share or (trial := ways.of(objective, alike)).why_not:
            trained = [train(objective, job) for job in alike]
        else:
            trained = _together(objective, alike, trial, public=public)
        done.update(zip(numbers, trained, strict=True))
    return [done[number] for number in range(len(jobs))]


def clients_at_once(numbers: int, device: torch.device) -> int:
    """The clients that may be trained together, by the numbers that each of them moves.

    A client takes four copies of these: tensors, gradient, and two of the optimiser's.
    """
    return max(1, min(_CLIENTS, (_MEMORY if device.type == "cpu" else _ELSEWHERE) // (16 * max(1, numbers))))


def _alike(jobs: Sequence[Job]) -> list[list[int]]:
    """The numbers of the jobs of each kind and number of steps together, those with the most steps first."""
    kinds: dict[Hashable, list[int]] = {}
    steps = [planned_steps(len(job.examples), job.settings) for job in jobs]
    for number in sorted(range(len(jobs)), key=lambda number: -steps[number]):
        job = jobs[number]
        kinds.setdefault((job.kind, job.settings, job.lr), []).append(number)
    return list(kinds.values())


def _together(objective: Objective, jobs: Sequence[Job], trial: Trial, *, public: bool) -> list[Trained]:
    """Jobs of one kind, those with the most steps first, as many at a time as memory has room for."""
    first, done = jobs[0], list[Trained]()
    numbers = sum(math.prod(first.before[name].shape) for name in first.trainable)
    room, most = Room.of(objective.device, numbers), clients_at_once(numbers, objective.device)

    def packing(placed: Placed) -> Packing:
        return Public(objective, first.collate, room, placed, first.examples) if public else Tight(first.collate, room)

    for start in range(0, len(jobs), most):
        done += _Cohort(objective, jobs[start : start + most], packing, trial).trained()
    return done


class _Cohort:
    """Trainings under way. Row i of every matrix is the i-th job's; the first rows, which have the most steps, are active."""

    def __init__(
        self, objective: Objective, jobs: Sequence[Job], packing: Callable[[Placed], Packing], trial: Trial
    ) -> None:
        self._objective, self._jobs = objective, jobs
        seeds = [int(job.rng.integers(2**63)) for job in jobs]  # what `train` takes first of each rng
        self._seeds = np.random.default_rng(seeds) if trial.dropout else None
        self._spread = trial.copies
        self._ahead = [(batch.inputs for batch in job.batches(list)) for job in jobs]
        placed = [job.placed(objective.device) for job in jobs]
        self._packing = packing(placed[0])
        self._places = Places.of(placed)
        self._start = self._places.moving.clone() if jobs[0].settings.proximal else None
        self._moving = torch.nn.Parameter(self._places.moving)
        self._gradient = torch.zeros_like(self._places.moving)
        self._optimizer = optimizer_of([self._moving], jobs[0].settings, jobs[0].lr)
        self._losses: list[tuple[Tensor, Tensor]] = []

    def trained(self) -> list[Trained]:
        """Take all steps."""
        steps = [planned_steps(len(job.examples), job.settings) for job in self._jobs]
        self._objective.begin()
        with crew_of(self._objective, spread=self._spread) as crew:
            for step in range(steps[0]):
                active = sum(its > step for its in steps)
                self._narrow(active)
                self._step(crew, [next(self._ahead[row]) for row in range(active)])
        return self._results()

    def _step(self, crew: Crew | Alone, batches: Sequence[Sequence[Any]]) -> None:
        """One step of the clients that have a batch, one batch each."""
        gradient = self._gradient[: len(batches)].zero_()
        share = torch.tensor([1 / len(batch) for batch in batches], device=gradient.device)
        entries = [(row, item) for row, batch in enumerate(batches) for item in batch]
        for found in crew.results(self._found, map(self._seeded, self._packing.packs(entries))):
            add_in_order(gradient, found.owners, found.gradients * share[found.owners, None])
            self._losses.append((found.owners, found.losses))
        if self._start is not None:  # FedProx: the gradient of mu/2 ||w - w_before||^2
            mu = self._jobs[0].settings.proximal
            gradient += mu * (self._places.moving[: len(batches)] - self._start[: len(batches)])
        self._moving.grad = gradient
        self._optimizer.step()

    def _seeded(self, pack: Pack) -> Pack:
        return pack if self._seeds is None else replace(pack, seed=int(self._seeds.integers(2**63)))

    def _found(self, objective: Objective, pack: Pack) -> Found:
        return found_in(objective, self._places, pack)

    def _narrow(self, active: int) -> None:
        """Leave out the clients that have made all their steps: nothing of theirs moves any more."""
        if active == len(self._moving):
            return
        self._moving.data = self._places.moving[:active]
        memory = self._optimizer.state[self._moving]
        for name, value in memory.items():
            if isinstance(value, Tensor) and value.ndim:
                memory[name] = value[:active]

    def _results(self) -> list[Trained]:
        total, seen = np.zeros(len(self._jobs)), np.zeros(len(self._jobs))
        for owners, losses in self._losses:
            np.add.at(total, owners.cpu().numpy(), losses.cpu().numpy())
            np.add.at(seen, owners.cpu().numpy(), 1)
        parts = {name: part.cpu() for name, part in self._places.flat.parts(self._places.moving).items()}
        return [
            Trained(
                Tensors((name, part[row]) for name, part in parts.items()),
                float(total[row] / seen[row]) if seen[row] else math.nan,
            )
            for row in range(len(self._jobs))
        ]


def add_in_order(total: Tensor, owners: Tensor, rows: Tensor) -> None:
    """Add each row (P,) to its owner's of `total` (S, P), the rows of one owner in their order, so that bits are its own.

    On an accelerator an addition of rows with one owner has no fixed order, so rows with different owners are added at a time.
    """
    if total.device.type == "cpu":
        total.index_add_(0, owners, rows)
        return
    turns: dict[int, list[int]] = {}
    taken: dict[int, int] = {}
    for at, owner in enumerate(owners.tolist()):
        taken[owner] = taken.get(owner, -1) + 1
        turns.setdefault(taken[owner], []).append(at)
    for turn in turns.values():
        these = torch.tensor(turn, device=total.device)
        total[owners[these]] += rows[these]


_CLIENTS = 1024
_MEMORY, _ELSEWHERE = 2**28, 2**32  # bytes
