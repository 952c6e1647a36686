"""Passes of a model spread over the cores: as many threads as torch may use, each computing whole passes on one core.

Small matrix products gain little from a second core, while two passes at a time are nearly twice as fast. A pass computes the
same bits on every thread, so neither the number of threads nor their timing changes a result.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from secure_fed.learning.training.objective import Objective

Work = TypeVar("Work")
Result = TypeVar("Result")
Run = Callable[[Objective, Work], Result]


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


class Alone:
    """`Crew` of this thread."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def results(self, run: Run[Work, Result], all_work: Iterable[Work]) -> Iterator[Result]:
        for work in all_work:
            yield run(self._objective, work)


@contextmanager
def crew_of(objective: Objective, *, spread: bool = True) -> Iterator[Crew | Alone]:
    """The threads for passes of this objective. Within the block torch itself uses one thread.

    spread: whether passes may be computed at the same time. An accelerator computes one pass after the other.
    """
    threads = torch.get_num_threads()
    if objective.device.type != "cpu" or threads == 1 or not spread:
        torch.set_num_threads(1)
        try:
            yield Alone(objective)
        finally:
            torch.set_num_threads(threads)
        return
    crew = Crew(objective, threads)
    torch.set_num_threads(1)
    try:
        yield crew
    finally:
        crew.close()
        torch.set_num_threads(threads)


def copy_of(objective: Objective) -> Objective:
    """A copy of the objective that shares the model's parameters and has its own modules and buffers."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in objective.model.parameters()}
    return copy.deepcopy(objective, shared | {id(objective.copies): [], id(objective.public): objective.public})
