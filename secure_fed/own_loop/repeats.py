"""Refusal of data sets that have an example several times, as oversampling of a rare class makes them.

Removing an example would remove all its copies, and so move a step's sum by as many clip norms. Copies that are rows of their
own, or that another kind of data set makes, are not seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from secure_fed.errors import DataError


def require_no_repeats(data: Any) -> None:
    """DataError if Subset or ConcatDataset put an example of the data set inside them into it more than once."""
    if not isinstance(data, Subset | ConcatDataset):
        return
    seen: set[Hashable] = set()
    for example in _inside(data, range(len(data))):
        if example in seen:
            raise DataError(
                f"the loader's {type(data).__name__} has example {example[1]} of a data set more than once, and removing that "
                "example would move a step by more than clip_norm; leave out repeated indices, and multiply the loss of rare "
                "examples by a weight instead"
            )
        seen.add(example)


def _inside(data: Any, indices: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """(data set, index) of the examples at these indices, by the data set inside Subset and ConcatDataset."""
    if isinstance(data, Subset):
        own = data.indices.tolist() if hasattr(data.indices, "tolist") else data.indices
        yield from _inside(data.dataset, (own[index] for index in indices))
    elif isinstance(data, ConcatDataset):
        for index in indices:
            place = _from_the_start(index, data)
            part = bisect_right(data.cumulative_sizes, place)
            before = data.cumulative_sizes[part - 1] if part else 0
            yield from _inside(data.datasets[part], [place - before])
    else:
        for index in indices:
            yield id(data), _from_the_start(index, data)


def _from_the_start(index: Any, data: Any) -> Any:
    """The index as a whole number from 0, if it is a number: numbers below 0 count from the end."""
    if not hasattr(index, "__index__"):
        return index
    return int(index) + len(data) if index < 0 else int(index)
