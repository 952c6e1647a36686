"""The loader of a private loop: each batch is a Poisson sample of the examples, by secret coins.

Every epoch has the same number of batches whatever the coins show, so that a learning-rate schedule reveals nothing. Those of a
rehearsal come first. An empty draw is a step like any other: the loop gets one example as a placeholder, which is left out of
the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from privacy.entropy import Stream
from secure_fed.errors import DataError
from secure_fed.learning.user_objects import require_no_repeats
from secure_fed.own_loop.account import Terms
from secure_fed.own_loop.rehearsal import Part, Parts


@dataclass
class Batch:
    """One batch of the loader.

    rows: its number of examples. counted: whether they enter the step's sum; False for the placeholder of an empty draw.
    rehearsal: which batch of a rehearsal it is; it trains nothing. None for a batch of a step. forward: whether the
    model has seen the batch.
    """

    rows: int
    counted: bool = True
    rehearsal: Part | None = None
    forward: bool = False


class PoissonLoader:
    """Iterates over one epoch's batches: those of its rehearsal, and those of its steps.

    begin: called with each batch's `Batch` before the loop gets the batch. end: called after each batch of a
    rehearsal, also if the loop leaves it there. left: the number of steps left.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        terms: Terms,
        coins: Stream,
        begin: Callable[[Batch], None],
        end: Callable[[Batch], None],
        left: Callable[[], int],
    ) -> None:
        self._loader, self._terms, self._coins = loader, terms, coins
        self._begin, self._end, self._left, self._epochs = begin, end, left, count()
        self._parts = Parts(loader.dataset, terms.sampler.expected)  # type: ignore[arg-type]

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def batch_size(self) -> int:
        """The expected size of a batch, rounded."""
        return self._terms.batch_size

    def __len__(self) -> int:
        """The steps of a whole epoch; its rehearsal is not counted."""
        return self._terms.epoch

    @property
    def rehearsal_batches(self) -> int:
        """The number of an epoch's batches before those of its steps."""
        return len(self._parts)

    @property
    def all_batches(self) -> int:
        """The batches of whole epochs until the budget is spent, rehearsals included: the length of a schedule by batch."""
        return self._terms.count + -(-self._terms.count // len(self)) * self.rehearsal_batches

    def __iter__(self) -> Iterator[Any]:
        if self._left():
            for part in self._parts.of_epoch(next(self._epochs)):
                tried = Batch(len(part.indices), rehearsal=part)
                self._begin(tried)
                try:
                    yield self._loader.collate_fn([self.dataset[index] for index in part.indices])
                finally:
                    self._end(tried)
        draws = [self._terms.sampler.draw(self._coins.uniform) for _ in range(min(len(self), max(1, self._left())))]
        for drawn, batch in zip(draws, self._fetched([drawn or [0] for drawn in draws]), strict=True):
            self._begin(Batch(max(1, len(drawn)), counted=bool(drawn)))
            yield batch

    def _fetched(self, batches: list[list[int]]) -> DataLoader[Any]:
        """The batches of these indices, loaded with the settings of the user's loader."""
        own = self._loader
        return DataLoader(
            own.dataset,
            batch_sampler=batches,
            num_workers=own.num_workers,
            collate_fn=own.collate_fn,
            pin_memory=own.pin_memory,
            timeout=own.timeout,
            worker_init_fn=own.worker_init_fn,
            multiprocessing_context=own.multiprocessing_context,
            generator=own.generator,
            prefetch_factor=own.prefetch_factor,
        )


def require_samplable(loader: DataLoader[Any]) -> None:
    """DataError for a loader whose examples cannot be drawn by independent coins."""
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise DataError(
            "the loader's data set has no numbered examples to draw at random; give one with len() and indices"
        )
    if loader.batch_size is None or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise DataError(
            f"the loader draws by {type(loader.sampler).__name__} with batch_size = {loader.batch_size}, and a private loop "
            "draws every example with the same probability; give a loader with a batch_size and no sampler of its own"
        )
    drawn, examples = len(loader.sampler), len(loader.dataset)  # type: ignore[arg-type]
    if drawn != examples or getattr(loader.sampler, "replacement", False):
        raise DataError(
            f"the loader's sampler draws {drawn} examples of {examples}, or some twice, and a private "
            "loop draws from all of them; give a loader over a torch.utils.data.Subset of those that may train"
        )
    require_no_repeats(loader.dataset, "the loader's")
