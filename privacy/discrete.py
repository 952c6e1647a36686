"""The discrete Gaussian N_Z(0, sigma^2), exactly: P(x) is proportional to exp(-x^2 / (2 sigma^2)) on the integers.

For sigma = 2^m, Karney's rejection ("Sampling exactly from the normal distribution", 2016) needs only fair bits and comparisons
of integers; no number of the sampler is ever rounded. With x a multiple of 2^-m in [0, 1), the value s (k + x) sigma is
proposed with weight exp(-k^2 / 2) (`discrete_wholes`), every x and both signs s alike, and accepted with probability

    exp(-k x) exp(-x^2 / 2),       which leaves it the weight       exp(-(k + x)^2 / 2).

Zero would be proposed with both signs; one of them is refused.

A coin of probability exp(-g), 0 <= g <= 1, is von Neumann's alternating series: let N count the successes, before the first
failure, of coins of probability g / 1, g / 2, g / 3, ... Then P(N >= n) = g^n / n!, and N is even with probability
1 - g + g^2 / 2! - ... = exp(-g). All g here are x^p / c of whole c, and such a coin of probability g / n is p coins of
probability x and one of probability 1 / (c n), all of them exact: a word of 64 uniform bits is below the 64-bit fraction x
with probability x, and a half word is uniform below the largest multiple of c n once those beyond it are redrawn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from privacy.discrete_wholes import Integers, wholes
from privacy.entropy import Stream, Words
from privacy.errors import PlanError

Flags = NDArray[np.bool_]

LARGEST_EXPONENT = 40


def discrete_gaussian(sigma: int, count: int, stream: Stream) -> Integers:
    """(count,) independent samples of N_Z(0, sigma^2), sigma a power of two up to 2^40.

    Proposals are independent of each other and are taken in order, so the first `count` accepted samples have exactly this law.
    As in any rejection sampler, the number of words drawn depends on the samples, which an observer who measures time can use.
    """
    exponent = sigma.bit_length() - 1
    if sigma < 1 or sigma != 1 << exponent or exponent > LARGEST_EXPONENT:
        raise PlanError(
            f"discrete noise of standard deviation {sigma} cannot be drawn; sigma must be a power of two up to "
            f"2^{LARGEST_EXPONENT}"
        )
    out = np.empty(count, np.int64)
    filled = 0
    while filled < count:
        wanted = count - filled
        # 0.715 of the proposals are accepted
        found = _accepted(exponent, min(_PROPOSALS_AT_ONCE, wanted + 7 * wanted // 16 + 64), stream)[:wanted]
        out[filled : filled + len(found)] = found
        filled += len(found)
    return out


def _accepted(exponent: int, proposals: int, stream: Stream) -> Integers:
    """The accepted samples among `proposals` proposals."""
    whole = wholes(proposals, stream)
    bits = stream.words(proposals)
    x = bits & _top(exponent)  # the first bits of a word are x, as a fraction of 2^64; its last bit is the sign
    negative = (bits & np.uint64(1)).astype(np.bool_)
    kept = np.flatnonzero((whole > 0) | (x > 0) | ~negative)
    kept = kept[_survives(x[kept], 2, 2, stream)]
    kept = kept[_survives_each(x[kept], whole[kept], stream)]
    magnitude = (whole[kept] << exponent) + (x[kept] >> np.uint64(63 - exponent) >> np.uint64(1)).astype(np.int64)
    return np.where(negative[kept], -magnitude, magnitude)


def _survives_each(x: Words, times: Integers, stream: Stream) -> Flags:
    """(n,) coins of probability exp(-times x): as many coins of probability exp(-x), none of which may fail."""
    owner = np.repeat(np.arange(len(x)), times)
    survives = np.ones(len(x), np.bool_)
    survives[owner[~_survives(x[owner], 1, 1, stream)]] = False
    return survives


def _survives(x: Words, power: int, divisor: int, stream: Stream) -> Flags:
    """(n,) independent coins of probability exp(-x^power / divisor), x in units of 2^-64."""
    even = np.ones(len(x), np.bool_)
    going = np.arange(len(x))
    step = 1
    while len(going):
        if divisor * step > 1:
            going = going[_one_in(divisor * step, len(going), stream)]
        for _ in range(power):
            going = going[stream.words(len(going)) < x[going]]
        even[going] ^= True
        step += 1
    return even


def _one_in(sides: int, count: int, stream: Stream) -> Flags:
    """(count,) coins of probability 1 / sides, from half words; those beyond the last multiple of `sides` are redrawn."""
    share = (1 << 32) // sides
    halves = _halves(count, stream)
    while len(beyond := np.flatnonzero(halves > sides * share - 1)):
        halves[beyond] = _halves(len(beyond), stream)
    return halves < share


def _halves(count: int, stream: Stream) -> NDArray[np.uint32]:
    return stream.words((count + 1) // 2).view("<u4")[:count].copy()


def _top(bits: int) -> np.uint64:
    """The mask of a word's first `bits` bits."""
    return np.uint64((1 << 64) - (1 << (64 - bits)))


_PROPOSALS_AT_ONCE = 1 << 16  # proposals made in one go: bounds the memory, and stays within a processor's cache
