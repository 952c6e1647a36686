"""Random rounding of a vector to integers that barely lengthens it (Kairouz, Liu and Steinke, arXiv 2102.06387, 2021).

Every coordinate is rounded up with probability its fractional part, and down otherwise, so its mean is unchanged. The squared
norm of the result has a mean of at most unit^2 + d / 4, but may be as large as (unit + sqrt(d))^2. The whole result is
therefore redrawn until its squared norm is at most

    min{ (unit + sqrt(d))^2,   unit^2 + d / 4 + sqrt(2 log(1 / beta)) (unit + sqrt(d) / 2) },      beta = exp(-1/2),

which is the guarantee, for any vector: it is checked in exact integers, and nothing is clipped afterwards. A vector of norm at
most `unit` meets it with probability at least 1 - beta = 0.39 at the first draw (their bound of the tail). Only this condition
biases the result: it rejects draws that are longer than most.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from privacy.discrete_wholes import Integers
from privacy.entropy import Floats, Stream
from privacy.errors import PlanError

BETA = math.exp(-0.5)


def norm_bound(unit: float, dim: int, beta: float = BETA) -> float:
    """The L2 norm that no rounded vector exceeds: a float64 that is no smaller than the root of `squared_bound`."""
    squared = squared_bound(unit, dim, beta)
    bound = math.sqrt(squared)
    while Fraction(bound) ** 2 < squared:
        bound = math.nextafter(bound, math.inf)
    return bound


def squared_bound(unit: float, dim: int, beta: float = BETA) -> int:
    """The largest squared norm of a rounded vector: an integer, as all squared norms of integer vectors are."""
    always = (unit + math.sqrt(dim)) ** 2
    mostly = unit**2 + dim / 4 + math.sqrt(-2 * math.log(beta)) * (unit + math.sqrt(dim) / 2)
    return math.floor(min(always, mostly))


def rounded(values: Floats, unit: float, stream: Stream, beta: float = BETA) -> Integers:
    """(d,) integers of squared norm at most `squared_bound`, from (d,) float64 of norm at most `unit`.

    Each draw is refused with probability at most beta. If beta is exp(-1/2), the number of refusals in a row that raises an
    error has a probability below 1e-200, so they never happen by chance; they mean a vector that is longer than `unit`.
    """
    if not np.isfinite(values).all() or np.abs(values).max(initial=0.0) >= _TOO_LARGE:
        raise PlanError(
            f"values to round must be finite and below {_TOO_LARGE:g}; clip them to the norm {unit:g} first"
        )
    limit = squared_bound(unit, len(values), beta)
    down = np.floor(values)
    share = values - down
    for _ in range(_MOST_DRAWS):
        drawn: Integers = (down + (stream.uniform(len(values)) < share)).astype(np.int64)
        if squared_norm(drawn) <= limit:
            return drawn
    raise PlanError(
        f"a vector of norm {float(np.linalg.norm(values)):g} cannot be rounded to one of norm {math.sqrt(limit):g}; "
        f"clip it to the norm {unit:g} first"
    )


def squared_norm(vector: Integers) -> int:
    """The exact squared L2 norm of integers below 2^62 in absolute value: by limbs of 21 bits, whose products int64 can add."""
    total = 0
    for start in range(0, len(vector), _SUMMED_AT_ONCE):
        rest = np.abs(vector[start : start + _SUMMED_AT_ONCE])
        limbs: list[NDArray[np.int64]] = []
        while rest.any():
            limbs.append(rest & _LIMB)
            rest >>= _LIMB_BITS
        total += sum(int(a @ b) << _LIMB_BITS * (i + j) for i, a in enumerate(limbs) for j, b in enumerate(limbs))
    return total


_TOO_LARGE = 2.0**62
_MOST_DRAWS = 1000
_LIMB_BITS, _LIMB = 21, (1 << 21) - 1
_SUMMED_AT_ONCE = 1 << 20  # products of two limbs are below 2^42, and the sum of this many of them below 2^62
