"""Items that hold more than a model reads, and their batches.

`aside` is what metrics and answers need to know of an example. `parts` are sequences that judging an example takes beside
the one it trains on: windows of a long text, or the choices of a question. They stay inside their example's item, because an
item is what privacy for an example protects, and a part alone is not an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from secure_fed.learning.data.encode import Collate, Item

ASIDE, PARTS = "aside", "parts"


@dataclass(frozen=True, slots=True)
class Aside:
    """Collates what a model reads, and puts beside it the asides, a list, and all parts, a batch of their own.

    `counts` says how many of the parts are each item's: (batch,).
    """

    plain: Collate

    def padded_to(self, width: int) -> Aside:
        """The same, of batches with at least so many tokens."""
        return Aside(self.plain.padded_to(width))

    def __call__(self, items: Sequence[Item]) -> dict[str, Any]:
        read = [{name: value for name, value in item.items() if name not in (ASIDE, PARTS)} for item in items]
        batch: dict[str, Any] = dict(self.plain(read))
        if ASIDE in items[0]:
            batch[ASIDE] = [item[ASIDE] for item in items]
        if PARTS in items[0]:
            batch[PARTS] = self.plain([part for item in items for part in item[PARTS]])
            batch["counts"] = torch.tensor([len(item[PARTS]) for item in items])
        return batch
