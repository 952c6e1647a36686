"""The factor that a change was scaled by before it was sent, from the grid that float32 rounding leaves on it.

Parameters are kept in float32. So after - before is a whole multiple of the spacing of float32 numbers at `before`,
wherever the change is small beside it, and f (after - before) is a whole multiple of f times that spacing. Whoever
knows `before` sees f: the largest step of which all the small entries, each divided by its spacing, are multiples.
Clipping hides nothing of the size of the rounding from a server, and neither does a mean weight.

Noise of more than a fifth of a spacing hides the grid, as do sums of updates that were each scaled by another factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_ENTRIES = 64  # the smallest, of whose fit to a grid it is judged
_MULTIPLES = 1 << 16  # the largest multiple that the smallest entry is tried as
# The largest multiple of any of them: what is computed in float32 lies on finer grids too, of its own rounding.
_LARGEST = 1 << 18
_AT_ONCE = 1 << 12
_FIT = 0.6  # mean cosine of phases; entries on no grid reach 0.5 at most, over all grids tried
_BITS = 24  # of a float32 number


def scaled_by(changes: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """f of changes f (after - before), given with their `before`; None where there is no grid to be seen."""
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
    """The sizes of the entries of a change, in spacings of float32 at where they began."""
    moved = (change != 0) & (before != 0)
    _, exponent = torch.frexp(before[moved])
    return torch.ldexp(change[moved].abs(), _BITS - exponent)


def _refined(small: Tensor, steps: Tensor) -> Tensor:
    """(N,) steps, each the best for the smallest 1, 2, 4, ... entries, taken as multiples of the step before it."""
    count = 1
    while count <= len(small):
        head = small[:count]
        multiples = (head / steps[:, None]).round().clamp_min(1)
        steps = (multiples @ head) / multiples.square().sum(1)
        count *= 2
    return steps
