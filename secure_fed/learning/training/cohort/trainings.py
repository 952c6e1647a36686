"""The local trainings of many clients over one frozen base, in common passes.

Each training is the same as in `local.train`: the same batches in the same order, its own optimiser state, its own loss. In
step t the t-th batches of all clients are combined, and their examples are divided into passes (`division`). Every
example's gradient is computed at its own client's tensors (`one_pass`). A client's gradients are added up in an order that
its own examples determine. One vectorised optimiser step updates all clients; a client without a batch left is left out.
Private steps (`dp_sgd`) work in the same way, with noised sums of clipped gradients in place of means.

The results equal `train`'s up to rounding of sums in another order. With `public` shapes they are bit for bit a function of the
client's own job. With dropout, losses have the same distribution and other bits. A trial detects models that cannot be trained
in this way, and their clients are trained one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fed.activity import activity
from secure_fed.learning.data.pointing import Plain
from secure_fed.learning.training.cohort.devices import Told, divided
from secure_fed.learning.training.cohort.division import Packing, Public, Room, Tight
from secure_fed.learning.training.cohort.dp_sgd import NoisedSums
from secure_fed.learning.training.cohort.gradients import Common, InTurn
from secure_fed.learning.training.cohort.means import Means
from secure_fed.learning.training.cohort.one_pass import Places, Trial, tried
from secure_fed.learning.training.local import Job, Trained, train
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.schedule import optimizer_of, stepped
from secure_fed.learning.training.trials.gradient_trial import parameters_stay
from secure_fed.learning.training.trials.kind_probe import nobodys
from secure_fed.learning.training.trials.uncoupled import Uncoupled
from secure_fed.tensors.tensors import Tensors


@dataclass
class Ways:
    """The results of trials: for each kind of job, whether its clients can train in common passes.

    told: called after every common step with the number of finished trainings, which may be fractional.
    """

    trials: dict[Hashable, Trial] = field(default_factory=dict)
    told: Told = lambda made: None

    @property
    def why_not(self) -> str:
        """A reason why some clients trained one after the other; empty if none did."""
        return next((trial.why_not for trial in self.trials.values() if trial.why_not), "")

    def of(self, objective: Objective, alike: Sequence[Job], *, public: bool) -> Trial:
        """The trial of this kind, made at its first use: on one job's examples, or with `public` on `nobodys`.

        Without any of these there is no trial, since one client's examples must not decide how all clients train.
        """
        first = alike[0]
        if first.kind not in self.trials:
            placed = [job.placed(objective.device) for job in (first, alike[-1])]
            examples: Sequence[Any] = Plain(max((job.examples for job in alike), key=len))
            if public:
                examples = nobodys(objective, first.collate, placed[0], examples[0])
            with activity("checking whether clients can train in common passes"):
                self.trials[first.kind] = (
                    tried(objective, placed, examples, first.collate) if len(examples) else Trial(_NOTHING)
                )
        return self.trials[first.kind]


def train_together(
    objective: Objective, jobs: Sequence[Job], ways: Ways | None = None, *, public: bool = False
) -> list[Trained]:
    """Train each job as `train` does, or privately, and return the results in the order of the jobs, which share one collate.

    `ways` keeps the results of trials for later calls. public: divide examples into passes of public shapes, as a guarantee for
    each client, or for each of its units, requires; then a single job has such passes too, and a trial depends on the model
    alone. Private jobs always have public shapes. Then ModelError if passes change a parameter: nothing is returned.
    """
    if any(job.collate is not jobs[0].collate for job in jobs):
        raise ValueError("jobs that are trained together must share one collate: their batches are collated together")
    ways = ways or Ways()
    done: dict[int, Trained] = {}
    protected = jobs[:1] if public else [job for job in jobs if job.private is not None][:1]
    with parameters_stay(objective, protected[0].before.parts()) if protected else nullcontext():
        for numbers in _alike(jobs):
            alike = [jobs[number] for number in numbers]
            told = partial(_told_after, ways.told, len(done))
            done.update(zip(numbers, _trained(objective, alike, ways, told, public=public), strict=True))
    return [done[number] for number in range(len(jobs))]


def clients_at_once(numbers: int, device: torch.device) -> int:
    """The number of clients that may be trained together, if each of them trains `numbers` numbers.

    A client needs four copies of these: tensors, gradient, and two for the optimiser.
    """
    return max(1, min(_CLIENTS, (_MEMORY if device.type == "cpu" else _ELSEWHERE) // (16 * max(1, numbers))))


def _alike(jobs: Sequence[Job]) -> list[list[int]]:
    """The indices of jobs, grouped by kind, most steps first; jobs without a step form groups of their own."""
    kinds: dict[Hashable, list[int]] = {}
    for number in sorted(range(len(jobs)), key=lambda number: -jobs[number].steps):
        job = jobs[number]
        kinds.setdefault((job.kind, job.settings, job.lr, job.falling, job.steps > 0), []).append(number)
    return list(kinds.values())


def _told_after(told: Told, before: float, made: float) -> None:
    told(before + made)


def _trained(objective: Objective, jobs: Sequence[Job], ways: Ways, told: Told, *, public: bool) -> list[Trained]:
    """Train jobs of one kind, which are ordered by steps, most first."""
    private = jobs[0].private is not None
    if not jobs[0].steps:
        return [job.placed(objective.device).trained(math.nan) for job in jobs]
    if len(jobs) == 1 and not public and not private:
        return [train(objective, jobs[0])]
    uncoupled = _required(objective, jobs) if private else None
    trial = ways.of(objective, jobs, public=public or private)
    if not trial.why_not:
        return _together(objective, jobs, trial, uncoupled, told, public=public or private)
    if private:
        return [_Cohort(objective, [job], trial, None).trained()[0] for job in jobs]
    return [train(objective, job) for job in jobs]


def _required(objective: Objective, jobs: Sequence[Job]) -> Uncoupled:
    """The requirement for private jobs, checked on some of the examples of each before anything is drawn."""
    first = jobs[0]
    uncoupled = Uncoupled.of(objective, first.collate, first.settings, Plain(first.examples))
    uncoupled.require_all(first.placed(objective.device), [Plain(job.examples)[:_LOOKED_AT] for job in jobs])
    return uncoupled


def _together(
    objective: Objective, jobs: Sequence[Job], trial: Trial, uncoupled: Uncoupled | None, told: Told, *, public: bool
) -> list[Trained]:
    """Jobs of one kind in common passes, divided among the available devices."""

    def on_one(own: Objective, jobs: Sequence[Job], told: Told) -> list[Trained]:
        required = replace(uncoupled, objective=own) if uncoupled else None
        return _on_one(own, jobs, trial, required, told, public=public)

    return divided([objective, *(objective.beside if trial.copies else ())], jobs, on_one, told)


def _on_one(
    objective: Objective, jobs: Sequence[Job], trial: Trial, uncoupled: Uncoupled | None, told: Told, *, public: bool
) -> list[Trained]:
    """Jobs of one kind on one device, as many at a time as its memory has room for."""
    first, done = jobs[0], list[Trained]()
    numbers = sum(math.prod(first.before[name].shape) for name in first.trainable)
    most = clients_at_once(_held(first, numbers), objective.device)
    room = Room.of(objective.device, numbers, public=public, expected=_expected(first))
    if first.settings.microbatch:
        room = replace(room, rows=first.settings.microbatch)
    placed = first.placed(objective.device)
    packing: Packing = Tight(first.collate, room)
    if public:
        packing = Public(objective, first.collate, room, placed, uncoupled)
    for start in range(0, len(jobs), most):
        cohort = _Cohort(objective, jobs[start : start + most], trial, packing)
        done += cohort.trained(partial(_told_after, told, start))
    return done


def _expected(job: Job) -> float:
    """The most examples that a private step of one client has on average, by its settings alone; infinite if unknown.

    Who else trains, and on how many devices, must not move the bits of a client's steps.
    """
    return math.inf if job.private is None or job.private.groups else float(job.settings.batch)


def _held(job: Job, numbers: int) -> int:
    """The memory of a client, in numbers; private steps also need its sum, and gradients of unfinished groups."""
    if job.private is None:
        return numbers
    return numbers * (3 if job.private.groups is None else 3 + job.settings.batch) // 2


class _Cohort:
    """Trainings in progress. Row i of every matrix is the i-th job's; the first rows, which have the most steps, are active.

    packing: the division into common passes; None for a single private job, which has passes of its own.
    """

    def __init__(self, objective: Objective, jobs: Sequence[Job], trial: Trial, packing: Packing | None) -> None:
        self._jobs = jobs
        seeds = [int(job.rng.integers(2**63)) for job in jobs]  # `train` draws it first from each rng
        placed = [job.placed(objective.device) for job in jobs]
        self._places = places = Places.of(placed)
        dropout = np.random.default_rng(seeds) if trial.dropout else None
        self._ways: Common | InTurn = (
            InTurn(objective, places, jobs[0], placed[0])
            if packing is None
            else Common(objective, places, packing, dropout, trial.copies)
        )
        private = jobs[0].private is not None
        self._steps = NoisedSums(jobs, places.flat, objective.device) if private else Means(jobs, places)
        self._start = places.moving.clone() if jobs[0].settings.proximal else None
        self._moving = torch.nn.Parameter(places.moving)
        self._optimizer = optimizer_of([self._moving], jobs[0].settings, jobs[0].lr)

    def trained(self, told: Told = lambda made: None) -> list[Trained]:
        """Take all steps."""
        steps = self._jobs[0].steps
        with self._ways.begun() as passes:
            for step in range(steps):
                active = sum(job.steps > step for job in self._jobs)
                self._narrow(active)
                self._step(step, self._steps.gradients(passes, active))
                told(len(self._jobs) * (step + 1) / steps)
        parts = {name: part.cpu() for name, part in self._places.flat.parts(self._places.moving).items()}
        return [
            Trained(Tensors((name, part[row]) for name, part in parts.items()), loss)
            for row, loss in enumerate(self._steps.losses())
        ]

    def _step(self, step: int, gradient: Tensor) -> None:
        """Step along the gradients (S, P) of the first S clients, each at the rate of its own schedule."""
        gradient = gradient.to(self._moving.device)
        if self._start is not None:  # FedProx: the gradient of mu/2 ||w - w_before||^2
            mu = self._jobs[0].settings.proximal
            gradient += mu * (self._places.moving[: len(gradient)] - self._start[: len(gradient)])
        if (most := self._jobs[0].settings.max_grad_norm) is not None:
            gradient *= most / gradient.norm(dim=1, keepdim=True).clamp_min(most)
        self._moving.grad = gradient
        moving, shares = self._moving.data, [job.share(step) for job in self._jobs[: len(gradient)]]
        before = moving.clone() if min(shares) < 1 else moving
        parts = self._places.flat.parts(moving)
        stepped(self._optimizer, [parts[name] for name in self._jobs[0].scoring], self._jobs[0].settings.head_times)
        if before is not moving:
            moving.copy_(torch.lerp(before, moving, torch.tensor(shares).to(moving)[:, None]))

    def _narrow(self, active: int) -> None:
        """Leave out the clients that have made all their steps: their tensors do not change any more."""
        if active == len(self._moving):
            return
        self._moving.data = self._places.moving[:active]
        memory = self._optimizer.state[self._moving]
        for name, value in memory.items():
            if isinstance(value, Tensor) and value.ndim:
                memory[name] = value[:active]


_NOTHING = "no text can be made up for this collate function, and there is no public example to try the model on"
_CLIENTS = 1024
_LOOKED_AT = 64
_MEMORY, _ELSEWHERE = 2**28, 2**32  # bytes
