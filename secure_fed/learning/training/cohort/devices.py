"""Clients divided among several devices, each of which has a copy of the model and trains its share at the same time.

A client is trained on one device only, so nothing but its tensors is copied. The devices are of one kind and compute passes of
the same shapes, so a client's result does not depend on its device. With dropout it does: masks are drawn for a pass, and the
division of the clients decides which of them share a pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock

import torch

from secure_fed.learning.training.local import Job, Trained
from secure_fed.learning.training.objective import Objective

Told = Callable[[float], None]
Run = Callable[[Objective, Sequence[Job], Told], list[Trained]]


def copies_on(objective: Objective, devices: Sequence[torch.device]) -> list[Objective]:
    """The objective with a model of its own on each of these devices. They share the results of trials."""

    def placed(device: torch.device) -> Objective:
        model, loss = copy.deepcopy((objective.model, objective.loss))
        own = Objective(model.to(device), loss, device, longest=objective.longest)
        own.ways, own.public = objective.ways, objective.public
        return own

    return [placed(device) for device in devices]


def divided(objectives: Sequence[Objective], jobs: Sequence[Job], run: Run, told: Told) -> list[Trained]:
    """run(objective, jobs, told) for each objective's share of the jobs, all at once; results in the order of the jobs.

    told: called with the number of finished jobs of all objectives.
    """
    count = min(len(objectives), len(jobs))
    if count == 1:
        return run(objectives[0], jobs, told)
    shares = _Shares(count, told)
    with ThreadPoolExecutor(count, "secure-fed-device") as pool:
        begun = [
            pool.submit(run, objective, jobs[number::count], partial(shares.made, number))
            for number, objective in enumerate(objectives[:count])
        ]
        found: list[Iterator[Trained]] = [iter(future.result()) for future in begun]
    return [next(found[number % count]) for number in range(len(jobs))]


class _Shares:
    """The progress of several shares, reported as one number."""

    def __init__(self, count: int, told: Told) -> None:
        self._made = [0.0] * count
        self._told = told
        self._lock = Lock()

    def made(self, number: int, made: float) -> None:
        with self._lock:
            self._made[number] = made
            self._told(sum(self._made))
