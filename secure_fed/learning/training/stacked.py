"""Many local trainings over one frozen base, several in one pass.

Each is by itself what `training.train` makes of it: the same batches in the same order, its own optimiser, its own loss. Only
the model is run for several at a time (`stacked_pass.py`). The gradient flows back to each one's leaves, and each one's
optimiser takes its step: nothing of a training that sits a pass out moves, whatever its optimiser remembers. So trainings need
not be in step, those whose next batches are alike in size share a pass, and little is spent on padding.

The results are those of `train` up to the rounding of sums in another order. With dropout losses follow the same law, and bits
differ, since a pass draws for all that are in it. A model that does not bear stacking is found out beforehand, and its
trainings are made one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from secure_fed.learning.training.local import Job, Objective, Placed, Trained, proximity, seeded, train
from secure_fed.learning.training.stacked_pass import Items, losses_of_each, why_not, without_advice


@dataclass
class Ways:
    """The kinds of trainings that may share passes, as far as that has been tried out.

    found: by kind, why trainings are made one after the other; "" where they are stacked.
    """

    found: dict[Hashable, str] = field(default_factory=dict)

    @property
    def why_not(self) -> str:
        """A reason why not all were stacked, if there is one."""
        return next(filter(None, self.found.values()), "")

    def stacks(self, objective: Objective, alike: Sequence[Job]) -> bool:
        """Whether these jobs of one kind may share passes: tried out on the first one's examples, the first time."""
        first = alike[0]
        if first.kind not in self.found:
            places = [job.placed(objective.device) for job in (first, alike[1], first)]
            self.found[first.kind] = why_not(objective, places, first.examples, first.collate)
        return not self.found[first.kind]


def train_stacked(objective: Objective, jobs: Sequence[Job], ways: Ways | None = None) -> list[Trained]:
    """Train each job as `train` does, and return the results in the order of the jobs, which share one collate.

    `ways` learns which kinds can be stacked, for the next call too.
    """
    if any(job.collate is not jobs[0].collate for job in jobs):
        raise ValueError("jobs that are stacked must share one collate: their batches are collated together")
    ways = ways or Ways()
    done: dict[int, Trained] = {}
    for numbers in _alike(jobs):
        alike = [jobs[number] for number in numbers]
        if len(alike) > 1 and ways.stacks(objective, alike):
            trained = _together(objective, alike)
        else:
            trained = [train(objective, job) for job in alike]
        done.update(zip(numbers, trained, strict=True))
    return [done[number] for number in range(len(jobs))]


def _alike(jobs: Sequence[Job]) -> list[list[int]]:
    """The numbers of the jobs of each kind, those with the most examples first."""
    kinds: dict[Hashable, list[int]] = {}
    for number in sorted(range(len(jobs)), key=lambda number: -len(jobs[number].examples)):
        kinds.setdefault(jobs[number].kind, []).append(number)
    return list(kinds.values())


@dataclass
class _Run:
    """A training under way. items: its next batch, None at the end."""

    job: Job
    placed: Placed
    optimizer: torch.optim.Optimizer
    ahead: Iterator[Items]
    items: Items | None = None
    losses: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, objective: Objective, job: Job) -> _Run:
        placed = job.placed(objective.device)
        ahead = (batch.inputs for batch in job.batches(list))
        return cls(job, placed, job.optimizer(placed), ahead, next(ahead, None))

    @property
    def size(self) -> tuple[int, int]:
        """The next batch's number of examples, and of tokens of the longest, where those are known."""
        items = self.items or []
        known = all(isinstance(item, Mapping) and "input_ids" in item for item in items)
        return len(items), max(len(item["input_ids"]) for item in items) if known and items else 0

    def trained(self) -> Trained:
        return self.placed.trained(float(torch.cat(self.losses).mean()) if self.losses else math.nan)


def _together(objective: Objective, jobs: Sequence[Job]) -> list[Trained]:
    """Jobs of one kind, some begun at a time."""
    done: list[Trained] = []
    for start in range(0, len(jobs), _BEGUN):
        begun = jobs[start : start + _BEGUN]
        seeds = [int(job.rng.integers(2**63)) for job in begun]  # what `train` takes first of each rng
        runs = [_Run.of(objective, job) for job in begun]
        objective.begin()
        with seeded(objective.device, np.random.default_rng(seeds)), without_advice():
            while left := [run for run in runs if run.items is not None]:
                _step(objective, _pack(left, objective.device))
        done += [run.trained() for run in runs]
    return done


def _pack(runs: Sequence[_Run], device: torch.device) -> list[_Run]:
    """The runs whose next batches are the largest, as many as fit a pass."""
    by_size = sorted(runs, key=lambda run: run.size, reverse=True)
    most = ON_CPU if device.type == "cpu" else _ELSEWHERE
    return by_size[: max(1, most // by_size[0].size[0])]


def _step(objective: Objective, pack: Sequence[_Run]) -> None:
    """Take one step of each run."""
    found = losses_of_each(
        objective, [run.placed for run in pack], [run.items or [] for run in pack], pack[0].job.collate
    )
    total = torch.zeros((), device=objective.device)
    for run, losses in zip(pack, found, strict=True):
        run.optimizer.zero_grad()
        run.losses.append(losses.detach())
        total = total + (losses.mean() + proximity(run.placed, run.job.settings.proximal))
    total.backward()
    for run in pack:
        run.optimizer.step()
        run.items = next(run.ahead, None)


# Examples in a pass at most, of all trainings together. A CPU gains next to nothing by more (benchmarks/stacked_shadows.py);
# elsewhere it is memory that has to be bounded.
ON_CPU, _ELSEWHERE = 16, 256
_BEGUN = 64  # trainings under way at a time: many, to find batches that are alike, and not all, for each remembers a few copies
