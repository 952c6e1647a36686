"""The local trainings of many clients over one frozen base, in common passes.

Each training is the same as in `local.train`: the same batches in the same order, its own optimiser state, its own loss. In
step t the t-th batches of all clients are combined, and their examples are divided into passes (`packing`). Every
example's gradient is computed at its own client's tensors (`passes`). A client's gradients are added up in an order that
its own examples determine. One vectorised optimiser step updates all clients; a client without a batch left is left out.
Private steps (`step_gradients`) work in the same way, with noised sums of clipped gradients in place of means.

The results equal `train`'s up to rounding of sums in another order. With `public` shapes they are bit for bit a function of the
client's own job. With dropout, losses have the same distribution and other bits. A trial detects models that cannot be trained
in this way, and their clients are trained one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fed.activity import activity
from secure_fed.learning.data.audit_unit import Plain
from secure_fed.learning.training.common_passes.packing import Entry, Packing, Public, Room, Tight, Work
from secure_fed.learning.training.common_passes.parallel import Told, divided, results_of, spreads
from secure_fed.learning.training.common_passes.passes import Found, Places, Trial, found_in, tried
from secure_fed.learning.training.common_passes.step_gradients import Means, NoisedSums
from secure_fed.learning.training.local import Job, Placed, Trained, optimizer_of, seeded, stepped, train
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.trials import parameters_stay, remembers, require_uncoupled, short
from secure_fed.tensors.tensors import Tensors

_NOTHING = "no text can be made up for this collate function, and there is no public example to try the model on"
_CLIENTS = 1024
_MEMORY, _ELSEWHERE = 2**28, 2**32  # bytes


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
        """The trial of this kind, made at its first use on `short` examples.

        Without any there is a trial on one job's examples, or with `public` none, since one client's examples must not decide
        how all clients train.
        """
        first = alike[0]
        if first.kind in self.trials:
            return self.trials[first.kind]
        placed = [job.placed(objective.device) for job in (first, alike[-1])]
        own: Sequence[Any] = Plain(max((job.examples for job in alike), key=len))

        def found() -> tuple[int, ...]:
            with activity("checking whether clients can train in common passes"):
                examples = short(objective, first.collate, placed[0], own[0], 3) or ([] if public else own)
                trial, padded = Trial(_NOTHING), hasattr(first.collate, "padded_to")
                if len(examples):
                    trial = tried(objective, placed, examples, first.collate, every=public or not padded)
            self.trials[first.kind] = trial
            return (1 + trial.dropout, 1 + trial.copies, 1 + bool(trial.why_not))

        kept = objective.kept
        around = partial(objective.surroundings, first.collate, placed[0].tensors)
        dropout, copies, fails = kept.sizes(("common passes", first.kind, public, spreads(objective)), around, found)
        if first.kind not in self.trials:
            self.trials[first.kind] = Trial("as a trial found before" * (fails > 1), dropout > 1, copies > 1)
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


def whole_batches(objective: Objective, jobs: Sequence[Job]) -> bool:
    """Whether these jobs, whose clients nobody protects, are one client's and trained in passes of its whole batches.

    In a large model passes of few texts, without padding, take less time.
    """
    room = Room.of(objective.device, objective.model, 1, public=False)
    return len(jobs) == 1 and (room.mixes or not hasattr(jobs[0].collate, "padded_to"))


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
    first, private = jobs[0], jobs[0].private is not None
    if not first.steps:
        return [job.placed(objective.device).trained(math.nan) for job in jobs]
    if not public and not private and whole_batches(objective, jobs):
        return [train(objective, first)]
    if private:
        require_uncoupled(objective, first.collate, first.placed(objective.device), Plain(first.examples))
    trial = ways.of(objective, jobs, public=public or private)
    if trial.why_not:
        if not private:
            return [train(objective, job) for job in jobs]
        return [_on_one(objective, [job], lambda made: None, trial=trial, public=True)[0] for job in jobs]
    on_one = partial(_on_one, trial=trial, public=public or private)
    return divided([objective, *(objective.beside if trial.copies else ())], jobs, on_one, told)


def _on_one(objective: Objective, jobs: Sequence[Job], told: Told, *, trial: Trial, public: bool) -> list[Trained]:
    """Jobs of one kind on one device, as many at a time as its memory has room for."""
    first, done = jobs[0], list[Trained]()
    numbers = _numbers(first)
    most = clients_at_once(_held(first, numbers), objective.device)
    packing = packing_of(objective, first, first.placed(objective.device), trial, public=public)
    for start in range(0, len(jobs), most):
        cohort = _Cohort(objective, jobs[start : start + most], trial, packing)
        done += cohort.trained(partial(_told_after, told, start))
    return done


def packing_of(objective: Objective, job: Job, placed: Placed, trial: Trial, *, public: bool) -> Packing:
    """The division into passes for clients with jobs of this kind on one device. placed: the job's tensors, for comparisons."""
    device, numbers = objective.device, _numbers(job)
    # The most examples that a private step of one client has on average, by its settings alone: who else trains, and on how
    # many devices, must not move the bits of a client's steps.
    known = job.private is not None and not job.private.persons
    expected = float(job.settings.batch) if known else math.inf
    room = Room.of(device, objective.model, numbers, public=public, expected=expected)
    if job.settings.microbatch:
        room = replace(room, rows=job.settings.microbatch)
    if job.private is not None or (public and room.mixes):
        return Public(objective, job.collate, room, placed, alone=bool(trial.why_not))
    return Tight(job.collate, room, apart=public)


def _numbers(job: Job) -> int:
    """The numbers that one client trains."""
    return sum(math.prod(job.before[name].shape) for name in job.trainable)


def _held(job: Job, numbers: int) -> int:
    """The memory of a client, in numbers; private steps also need its sum, and gradients of unfinished persons."""
    if job.private is None:
        return numbers
    return numbers * (3 if job.private.persons is None else 3 + job.settings.batch) // 2


class _Cohort:
    """Trainings in progress. Row i of every matrix is the i-th job's; the first rows, which have the most steps, are active.

    packing: the division into passes.
    """

    def __init__(self, objective: Objective, jobs: Sequence[Job], trial: Trial, packing: Packing) -> None:
        self._objective, self._jobs, self._trial, self._packing = objective, jobs, trial, packing
        seeds = [int(job.rng.integers(2**63)) for job in jobs]  # `train` draws it first from each rng
        self._places = places = Places.of([job.placed(objective.device) for job in jobs])
        self._dropout = np.random.default_rng(seeds) if trial.dropout else None
        private = jobs[0].private is not None
        self._steps = NoisedSums(jobs, places.flat, objective.device) if private else Means(jobs, places)
        self._start = places.moving.clone() if jobs[0].settings.proximal else None
        self._moving = torch.nn.Parameter(places.moving)
        self._optimizer = optimizer_of([self._moving], jobs[0].settings, jobs[0].lr)

    def trained(self, told: Told = lambda made: None) -> list[Trained]:
        """Take all steps."""
        steps, objective = self._jobs[0].steps, self._objective
        objective.begin()
        alone = seeded(objective.device, self._jobs[0].rng) if self._trial.why_not else nullcontext()
        with alone, results_of(objective, spread=self._trial.copies and not self._trial.why_not) as results:
            for step in range(steps):
                active = sum(job.steps > step for job in self._jobs)
                self._narrow(active)
                self._step(step, self._steps.gradients(partial(self._passes, results), active))
                told(len(self._jobs) * (step + 1) / steps)
        models = (objective, *objective.copies) if self._jobs[0].private is not None else ()
        if changed := [name for one in models for name in one.changed_buffers()]:
            raise remembers(f"buffer {changed[0]}")
        parts = {name: part.cpu() for name, part in self._places.flat.parts(self._places.moving).items()}
        return [
            Trained(Tensors((name, part[row]) for name, part in parts.items()), loss)
            for row, loss in enumerate(self._steps.losses())
        ]

    def _passes(
        self, results: Callable[..., Iterator[Any]], entries: Sequence[Entry], clients: Sequence[int]
    ) -> Iterator[tuple[Found, list[int]]]:
        """The gradients of the entries, pass by pass, and the owners of each pass's examples."""

        def found(objective: Objective, work: Work) -> tuple[Found, list[int]]:
            return found_in(objective, self._places, work[0]), work[1]

        packs: Iterator[Work] = self._packing.packs(entries, clients)
        if (dropout := self._dropout) is not None:
            packs = ((replace(part, seed=int(dropout.integers(2**63))), owners) for part, owners in packs)
        yield from results(found, packs)

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
