"""The factorisation of an m x n matrix into a tensor of small sides, for a tensor train.

The sides m and n are each written as a product of a few whole numbers: in the printed shape if there is one, otherwise by one
rule, which also gives most of the printed shapes:

    a side has three factors, or two where it is at most 64 (three there too, beside a side of 4096 or more);
    they are as equal as can be: of smallest sum, then of smallest spread; factors of 1 are left out;
    the largest stand in the middle of the train, but in a square matrix at its two ends.

A side with few divisors has fewer and more unequal factors: a prime is a single factor. This is correct, but less compact.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import NamedTuple


class Factorisation(NamedTuple):
    """The factors of both sides of a matrix: their products are m and n."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sides of the tensor, one for each core of the train."""
        return self.rows + self.columns


# Ghiasvand et al. (2024), Table 6, and the example in section 4.1.
PRINTED = {
    (768, 64): Factorisation((8, 8, 12), (8, 8)),
    (64, 768): Factorisation((8, 8), (12, 8, 8)),
    (4096, 64): Factorisation((16, 16, 16), (4, 4, 4)),
    (64, 4096): Factorisation((4, 4, 4), (16, 16, 16)),
    (768, 768): Factorisation((12, 8, 8), (8, 8, 12)),
    (16, 768): Factorisation((4, 4), (8, 8, 12)),
}


def factorisation(m: int, n: int) -> Factorisation:
    """The shape of the train for an m x n matrix."""
    return PRINTED.get((m, n)) or by_rule(m, n)


def by_rule(m: int, n: int) -> Factorisation:
    """The shape that the rule gives, printed or not."""
    rows, columns = (_factors(one, 3 if one > 64 or other >= 4096 else 2) for one, other in ((m, n), (n, m)))
    return Factorisation(rows[::-1], columns) if m == n else Factorisation(rows, columns[::-1])


@cache
def _factors(side: int, parts: int) -> tuple[int, ...]:
    """The factors of a side, ascending, without ones; (1,) for 1."""
    divisors = [d for d in range(1, math.isqrt(side) + 1) if side % d == 0]
    divisors += [side // d for d in reversed(divisors) if d * d != side]
    products = (
        (*some, side // math.prod(some))
        for some in itertools.combinations_with_replacement(divisors, parts - 1)
        if side % math.prod(some) == 0
    )
    best = min(map(sorted, products), key=lambda factors: (sum(factors), factors[-1] - factors[0]))
    return tuple(factor for factor in best if factor > 1) or (1,)
