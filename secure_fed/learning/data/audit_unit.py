"""The units of an audit, and examples that stand for a random direction (`evaluation.canaries = "direction"`).

Only example-level training uses the direction of such an example. All other code reads the original example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unit:
    """One unit of the audit pool. name: "client-0007", or "client-0007/13" for the 14th example (or person) of that client."""

    name: str
    client: str
    examples: Sequence[Any]


@dataclass(frozen=True)
class Pointing:
    """An example whose gradient is replaced by a direction, drawn for `unit` under `seed`."""

    example: Any
    unit: str
    seed: int


def plain(item: Any) -> Any:
    """The example itself, without a direction."""
    return item.example if isinstance(item, Pointing) else item


def reading(collate: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """`collate` of the examples themselves."""
    return lambda items: collate([plain(item) for item in items])


@dataclass(frozen=True)
class Plain(Sequence[Any]):
    """A client's original examples; each is looked up on access.

    items: a sequence with a length and items by number; slices are not needed, since torch's data sets do not support them.
    chosen: the numbers of the chosen examples, if not all.
    """

    items: Sequence[Any]
    chosen: range | None = None

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        numbers = self._numbers[index]
        return Plain(self.items, numbers) if isinstance(numbers, range) else plain(self.items[numbers])

    @property
    def _numbers(self) -> range:
        return range(len(self.items)) if self.chosen is None else self.chosen
