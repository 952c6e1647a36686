"""Tests of the uniformity of words: one p-value for each statistic, and one for all statistics together.

Under the null hypothesis words are independent and uniform, so every statistic's distribution is known. Meant for 2^18 words or
more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Words = NDArray[Any]  # uint32 or uint64

# The tests check about thirty uniform vectors, so fewer than one run in ten million fails by chance.
CHANCE, SURELY = 1e-9, 1e-12
LAGS = (1, 2, 3, 4, 8, 64, 1024, 32768)
BLOCK = 16  # bytes of the cipher


def p_values(words: Words) -> dict[str, float]:
    """The p-value of each statistic. A constant vector has zeros among them."""
    octets = words.view(np.uint8)
    return {
        "bytes": _counts(octets, 256),
        "pairs of bytes": _counts(octets.view(np.uint16), 2**16),
        "bytes at each place of a word": _all(_counts(column, 256) for column in octets.reshape(-1, words.itemsize).T),
        "bits at each place of a word": _bits(words),
        "serial correlation": _serial(words),
        "high halves": _counts(_top(_half(words, 1)), 2**16),
        "low halves": _counts(_top(_half(words, 0)), 2**16),
        "high against low halves": _correlated(_half(words, 1), _half(words, 0)),
        "repeated blocks": _repeats(octets),
    }


def p_value(words: Words) -> float:
    """The p-value of all statistics together (Bonferroni): for uniform words it is below p with probability at most p."""
    return _all(p_values(words).values())


def _all(values: Any) -> float:
    found = [float(value) for value in values]
    return min(1.0, min(found) * len(found))


def _counts(values: NDArray[Any], bins: int) -> float:
    return float(stats.chisquare(np.bincount(values, minlength=bins)).pvalue)


def _bits(words: Words) -> float:
    """Ones at each bit position: the sum of the squared standardised deviations from one half has a chi-square distribution."""
    bits = 8 * words.itemsize
    ones = np.array([int(((words >> words.dtype.type(place)) & words.dtype.type(1)).sum()) for place in range(bits)])
    deviations = (2 * ones - len(words)) / np.sqrt(len(words))
    return float(stats.chi2.sf((deviations**2).sum(), bits))


def _serial(words: Words) -> float:
    """The correlation of words `lag` places apart is approximately normal, with variance 1 / n."""
    return _all(_correlated(words[:-lag], words[lag:]) for lag in LAGS)


def _correlated(first: Words, second: Words) -> float:
    width = 2.0 ** (8 * first.itemsize)
    left, right = (part.astype(np.float64) / width - 0.5 for part in (first, second))
    # the mean product of n independent pairs of centred uniform numbers has variance (1/12)^2 / n
    return float(2 * stats.norm.sf(abs(left @ right) / len(left) * 12 * np.sqrt(len(left))))


def _half(words: Words, which: int) -> NDArray[Any]:
    """The low (0) or high (1) half of every word."""
    halves: NDArray[Any] = words.astype(f"<u{words.itemsize}").view(f"<u{words.itemsize // 2}")
    return halves[which::2]


def _top(halves: NDArray[Any]) -> NDArray[Any]:
    """The highest 16 bits of each half."""
    top: NDArray[Any] = (halves >> halves.dtype.type(8 * halves.itemsize - 16)).astype(np.uint16)
    return top


def _repeats(octets: NDArray[np.uint8]) -> float:
    """Among n uniform blocks of 16 bytes two are equal with probability at most n^2 / 2^129."""
    halves = octets[: len(octets) // BLOCK * BLOCK].view("<u8").reshape(-1, 2)
    order = np.lexsort(halves.T)
    same = (halves[order[1:]] == halves[order[:-1]]).all(axis=1).any()
    return len(halves) ** 2 / 2.0**129 if same else 1.0
