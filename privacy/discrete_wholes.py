"""Whole numbers k >= 0 of weight exp(-k^2 / 2), exactly, from one uniform number each.

Let F_k be the probability of at most k. A uniform U in [0, 1), whose bits are drawn one word after the other, gives the first
k with U < F_k. With the first word W and T_k = floor(2^64 F_k), W < T_k implies U < F_k, and W > T_k implies U > F_k. Only W =
T_k, of probability 2^-64, implies neither: then the next word is drawn, and compared with as many more bits of F_k. So no
rounding decides. The bits of F_k are computed with more decimal places than requested, and used only where the extra places
leave no doubt.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from privacy.entropy import Stream

Integers = NDArray[np.int64]

BITS = 64  # of a word
_GUARD = 30  # decimal places beyond the requested ones


def wholes(count: int, stream: Stream) -> Integers:
    """(count,) independent samples k."""
    table = np.array(thresholds(BITS), np.uint64)
    words = stream.words(count)
    found = np.searchsorted(table, words, side="right").astype(np.int64)  # thresholds that a word is not below
    for at in np.flatnonzero((found > 0) & (words == table[np.maximum(found - 1, 0)])):
        found[at] = resolved(int(words[at]), lambda: int(stream.words(1)[0]), BITS)
    return found


def resolved(first: int, more: Callable[[], int], bits: int) -> int:
    """The k of a U whose first word, of `bits` bits, equals one of the thresholds. more: draws the next word."""
    value, drawn = first, 1
    while True:
        value, drawn = (value << bits) | more(), drawn + 1
        not_below = [k for k, threshold in enumerate(thresholds(bits * drawn)) if value >= threshold]
        if not not_below:
            return 0
        if value > thresholds(bits * drawn)[not_below[-1]]:
            return not_below[-1] + 1


@lru_cache(64)
def thresholds(bits: int, guard: int = _GUARD) -> tuple[int, ...]:
    """floor(2^bits F_k) of k = 0, 1, ..., up to the first that is 2^bits - 1."""
    with localcontext() as context:
        context.prec = (
            bits // 3 + guard
        )  # 2^bits has bits log10(2) < bits / 3 places before the point, one more at most
        weights, least = [Decimal(1)], Decimal(10) ** -context.prec
        while weights[-1] > least:
            weights.append((Decimal(-(len(weights) ** 2)) / 2).exp())
        total, below, found = sum(weights), Decimal(0), list[int]()
        doubt = Decimal(10) ** (10 - guard)  # larger than the error of `scaled`
        while not found or found[-1] < (1 << bits) - 1:
            below += weights[len(found)]
            scaled = below / total * (1 << bits)
            whole = int(scaled)
            if not doubt < scaled - whole < 1 - doubt:
                return thresholds(bits, 2 * guard)
            found.append(whole)
    return tuple(found)
