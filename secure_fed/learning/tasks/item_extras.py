"""Items that contain more than the model's inputs, and their batches.

`aside` is the information on an example that metrics and answers need. `parts` are the sequences for its evaluation, beside the
sequence that it trains on: windows of a long text, or the choices of a question. They stay inside their example's item, because
example-level privacy protects an item, and a part alone is not an example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from secure_fed.learning.data.encode import Collate, Item

ASIDE, PARTS = "aside", "parts"


def without_aside(item: Any) -> Any:
    """What a model may train on of an item: items that differ in their asides alone train alike."""
    return {name: value for name, value in item.items() if name != ASIDE} if isinstance(item, Mapping) else item


@dataclass(frozen=True, slots=True)
class Aside:
    """Collates the model's inputs, and adds the asides as a list, and all parts as a batch of their own.

    `counts` (batch,) is the number of each item's parts.
    """

    plain: Collate

    def padded_to(self, width: int) -> Aside:
        """The same, for batches of at least `width` tokens."""
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
