"""Passes spread over the cores of a machine, and clients divided among its devices.

As many threads as torch may use compute whole passes, each on one core.

Small matrix products gain little from a second core, while two passes at a time are nearly twice as fast. A pass computes the
same bits on every thread, so neither the number of threads nor their timing changes a result.

Each device has a copy of the model and trains its share of the clients at the same time as the others. A client is trained on
one device only, so nothing but its tensors is copied. The devices are of one kind and compute passes of the same shapes, so a
client's result does not depend on its device. With dropout it does: masks are drawn for a pass, and the division of the clients
decides which of them share a pass.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeVar

import torch

from secure_fed.learning.training.local import Job, Trained
from secure_fed.learning.training.objective import Objective

Work = TypeVar("Work")
Result = TypeVar("Result")
Run = Callable[[Objective, Work], Result]
Told = Callable[[float], None]
Share = Callable[[Objective, Sequence[Job], Told], list[Trained]]


class Crew:
    """Threads, each with its own copy of the objective: replacing a parameter affects one thread alone."""

    def __init__(self, objective: Objective, threads: int) -> None:
        self._copies: SimpleQueue[Objective] = SimpleQueue()
        while len(objective.copies) < threads:
            objective.copies.append(copy_of(objective))
        for one in objective.copies[:threads]:
            self._copies.put(one)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "secure-fed", initializer=torch.set_num_threads, initargs=(1,))

    def results(self, run: Run[Work, Result], all_work: Iterable[Work]) -> Iterator[Result]:
        """run(objective, work) of each piece of work, in their order; few are computed ahead, which bounds the memory."""
        begun: deque[Future[Result]] = deque()
        try:
            for work in all_work:
                begun.append(self._pool.submit(self._one, run, work))
                if len(begun) > 2 * self._threads:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()

    def _one(self, run: Run[Work, Result], work: Work) -> Result:
        objective = self._copies.get()
        try:
            return run(objective, work)
        finally:
            self._copies.put(objective)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def results_of(objective: Objective, *, spread: bool) -> Iterator[Callable[..., Iterator[Any]]]:
    """`Crew.results` for passes of this objective, by threads or by this one. Within the block torch itself uses one thread.

    spread: whether passes may be computed at the same time. An accelerator computes one pass after the other.
    """
    threads = torch.get_num_threads()
    crew = Crew(objective, threads) if spread and _threads(objective) else None
    torch.set_num_threads(1)
    try:
        yield crew.results if crew else lambda run, all_work: (run(objective, work) for work in all_work)
    finally:
        if crew:
            crew.close()
        torch.set_num_threads(threads)


def spreads(objective: Objective) -> bool:
    """Whether passes of this objective are computed on copies of it: on several cores, or on several devices."""
    return _threads(objective) or bool(objective.beside)


def _threads(objective: Objective) -> bool:
    return objective.device.type == "cpu" and not objective.divided and torch.get_num_threads() > 1


def copy_of(objective: Objective) -> Objective:
    """A copy of the objective that shares the model's parameters and has its own modules and buffers."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in objective.model.parameters()}
    return copy.deepcopy(objective, shared | {id(objective.copies): [], id(objective.public): objective.public})


def copies_on(objective: Objective, devices: Sequence[torch.device]) -> list[Objective]:
    """The objective with a model of its own on each of these devices. They share the results of trials."""

    def placed(device: torch.device) -> Objective:
        model, loss = copy.deepcopy((objective.model, objective.loss))
        own = Objective(model.to(device), loss, device, longest=objective.longest)
        own.kept, own.public = objective.kept, objective.public
        return own

    return [placed(device) for device in devices]


def divided(objectives: Sequence[Objective], jobs: Sequence[Job], run: Share, told: Told) -> list[Trained]:
    """run(objective, jobs, told) for each objective's share of the jobs, all at once; results in the order of the jobs.

    told: called with the number of finished jobs of all objectives.
    """
    count = min(len(objectives), len(jobs))
    if count == 1:
        return run(objectives[0], jobs, told)
    made, lock = [0.0] * count, Lock()

    def of_share(number: int, part: float) -> None:
        with lock:
            made[number] = part
            told(sum(made))

    with ThreadPoolExecutor(count, "secure-fed-device") as pool:
        begun = [
            pool.submit(run, objective, jobs[number::count], partial(of_share, number))
            for number, objective in enumerate(objectives[:count])
        ]
        found: list[Iterator[Trained]] = [iter(future.result()) for future in begun]
    return [next(found[number % count]) for number in range(len(jobs))]
