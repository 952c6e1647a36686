"""The moving tensors of many clients as one matrix, a client a row, so that one operation steps all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Flat:
    """Named tensors one after the other in a row of `width` numbers; unused numbers at its end stay zero.

    The width is a multiple of 64: vectorised arithmetic then treats every row of a matrix alike. shapes: of the tensors, by
    name.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def width(self) -> int:
        return -(-sum(map(math.prod, self.shapes.values())) // _TOGETHER) * _TOGETHER

    def rows(self, tensors: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """(S, width) of S clients' tensors."""
        each = [torch.cat([own[name].detach().reshape(-1) for name in self.shapes]) for own in tensors]
        found = each[0].new_zeros(len(each), self.width)
        for row, numbers in zip(found, each, strict=True):
            row[: len(numbers)] = numbers
        return found

    def parts(self, rows: Tensor) -> dict[str, Tensor]:
        """{name: (B, *shape)}, views of the rows (B, width)."""
        found, at = {}, 0
        for name, shape in self.shapes.items():
            count = math.prod(shape)
            found[name] = rows[:, at : at + count].view(len(rows), *shape)
            at += count
        return found

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """(B, width) of tensors (B, *shape) in the order of the names."""
        flat = [part.flatten(1) for part in parts]
        unused = self.width - sum(part.shape[1] for part in flat)
        return torch.cat([*flat, flat[0].new_zeros(len(flat[0]), unused)], 1)


def add_in_order(total: Tensor, owners: Tensor, rows: Tensor) -> None:
    """Add each row (P,) to its owner's row of `total` (S, P), one owner's rows in order: its bits depend on them alone.

    An accelerator adds rows of one owner in no fixed order, so there each addition takes at most one row of each owner.
    """
    if total.device.type == "cpu" or not len(owners):
        total.index_add_(0, owners, rows)
        return
    turns: dict[int, list[int]] = {}
    taken: dict[int, int] = {}
    for at, owner in enumerate(owners.tolist()):
        taken[owner] = taken.get(owner, -1) + 1
        turns.setdefault(taken[owner], []).append(at)
    order = torch.tensor(list(itertools.chain(*turns.values())), device=total.device)  # the CPU waits for each copy
    lengths = [len(turn) for turn in turns.values()]
    for own, some in zip(owners[order].split(lengths), rows[order].split(lengths), strict=True):
        total[own] += some


_TOGETHER = 64
