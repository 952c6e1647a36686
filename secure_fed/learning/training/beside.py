"""Clients divided among several devices, each of which has a copy of the model and trains its share at the same time.

A client is trained by one device alone, so nothing but its tensors travels. The devices are of one kind and take passes of the
same shapes, so a client's result does not go by the device that trained it. With dropout it does: masks are drawn for a pass,
and who shares one goes by how clients are divided.
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
    """The objective with a model of its own on each of these devices. What has been tried out counts for all of them."""

    def placed(device: torch.device) -> Objective:
        model, loss = copy.deepcopy((objective.model, objective.loss))
        own = Objective(model.to(device), loss, device, longest=objective.longest)
        own.ways = objective.ways
        return own

    return [placed(device) for device in devices]


def divided(objectives: Sequence[Objective], jobs: Sequence[Job], run: Run, told: Told) -> list[Trained]:
    """run(objective, jobs, told) of each objective's share of the jobs, all at once; results in the order of the jobs.

    told: how many of all jobs are done.
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
    """Progress of several shares, told as one."""

    def __init__(self, count: int, told: Told) -> None:
        self._made = [0.0] * count
        self._told = told
        self._lock = Lock()

    def made(self, number: int, made: float) -> None:
        with self._lock:
            self._made[number] = made
            self._told(sum(self._made))
