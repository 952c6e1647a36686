"""The factor by which a change was scaled before it was sent, from the grid that float32 rounding leaves in it.

Parameters are kept in float32. So after - before is a whole multiple of the spacing of float32 numbers at `before`,
wherever the change is small beside it, and f (after - before) is a whole multiple of f times that spacing. So f can be computed
from `before`: the largest step of which all small entries, each divided by its spacing, are multiples. Neither clipping nor a
mean weight hides the size of the rounding from a server.

Noise of more than a fifth of a spacing hides the grid, as do sums of updates with different factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_ENTRIES = 64  # the smallest entries, whose fit to a grid is tested
_MULTIPLES = 1 << 16  # the largest multiple tried for the smallest entry
# The largest multiple of any entry: float32 results also lie on finer grids, of their own rounding.
_LARGEST = 1 << 18
_AT_ONCE = 1 << 12
_FIT = 0.6  # mean cosine of phases; entries on no grid reach 0.5 at most, over all grids tried
_BITS = 24  # of a float32 number


def scaled_by(changes: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """f from changes f (after - before), given with their `before`; None if no grid is visible."""
    parts = [_in_spacings(change.double().flatten(), before.double().flatten()) for change, before in changes]
    values = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    if len(values) < _ENTRIES:
        return None
    small = values.topk(_ENTRIES, largest=False).values.sort().values
    for start in range(1, _MULTIPLES, _AT_ONCE):
        steps = _refined(small, small[0] / torch.arange(start, start + _AT_ONCE, dtype=torch.float64))
        fits = (2 * math.pi * small / steps[:, None]).cos().mean(1) > _FIT
        fits &= small[-1] / steps < _LARGEST
        if fits.any():
            return float(steps[fits.byte().argmax()])
    return None


def _in_spacings(change: Tensor, before: Tensor) -> Tensor:
    """The sizes of the entries of a change, in float32 spacings at `before`."""
    moved = (change != 0) & (before != 0)
    _, exponent = torch.frexp(before[moved])
    return torch.ldexp(change[moved].abs(), _BITS - exponent)


def _refined(small: Tensor, steps: Tensor) -> Tensor:
    """(N,) steps, each refined to fit the smallest 1, 2, 4, ... entries best, as multiples of the previous step."""
    count = 1
    while count <= len(small):
        head = small[:count]
        multiples = (head / steps[:, None]).round().clamp_min(1)
        steps = (multiples @ head) / multiples.square().sum(1)
        count *= 2
    return steps
