"""Exact limits of a probability, and the interval of an AUC: a bootstrap, or disjoint pairs where the bootstrap fails.

BCa: members and non-members are resampled separately, each with replacement. Let B be the law of the resampled AUC and t the
AUC of the sample. With z0 = Phi^-1(B(t)) for its bias and the jackknife's acceleration a, the limit at level p is B's quantile
at

    Phi(z0 + (z0 + z) / (1 - a (z0 + z))),   z = Phi^-1(p)                                       (Efron, 1987)

It is approximate: of binormal samples of 40 + 40 and 200 + 200 with areas of .5 to .9, a nominal 95 % covers the truth in 94 to
96 %, and with an area of .97 in 91 %.

Exact: of the pairs (i-th member, i-th non-member) in an order drawn without looking at scores, no two share a unit, so they are
independent. A member wins with probability w and loses with probability l, and the AUC is (1 + w - l) / 2. Clopper and
Pearson's limits of w and l, each at a quarter of the allowed error, hold for any law of the scores and any ties, and are wide.
They are used for an AUC of 0 or 1, for fewer than 10 units on either side, and where the bootstrap fails: resamples that are
all equal, a bias or an acceleration that cannot be computed, or an acceleration that is too large.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Interval = tuple[float, float]

FEWEST = 10


def auc_interval(
    members: Floats, non_members: Floats, confidence: float, rng: np.random.Generator, resamples: int
) -> Interval:
    """The interval that fits the sample; it contains the sample's AUC."""
    found = float(np.mean(shares_below(members, non_members)))
    interval = None
    if min(len(members), len(non_members)) >= FEWEST and 0 < found < 1:
        interval = bca(members, non_members, confidence, rng, resamples)
    low, high = interval or disjoint_pairs(members, non_members, confidence, rng)
    return min(low, found), max(high, found)


def bca(
    members: Floats, non_members: Floats, confidence: float, rng: np.random.Generator, resamples: int
) -> Interval | None:
    """The BCa interval; None where bias or acceleration cannot be computed."""
    from scipy.special import ndtr, ndtri

    wins, losses = shares_below(members, non_members), 1 - shares_below(non_members, members)
    found = float(np.mean(wins))
    drawn = resampled(members, non_members, rng, resamples)
    below = float(np.mean(drawn < found - _ALIKE) + np.mean(np.abs(drawn - found) <= _ALIKE) / 2)
    spread = float(np.mean((wins - found) ** 2) / len(wins) + np.mean((losses - found) ** 2) / len(losses))
    if spread == 0 or not 0 < below < 1 or bool(drawn.max() - drawn.min() <= _ALIKE):
        return None
    skew = float(np.mean((wins - found) ** 3) / len(wins) ** 2 + np.mean((losses - found) ** 3) / len(losses) ** 2)
    acceleration, bias = skew / (6 * spread**1.5), float(ndtri(below))
    z = bias + ndtri(np.array([(1 - confidence) / 2, (1 + confidence) / 2]))
    if (acceleration * z >= 1).any():  # too skewed for the bootstrap
        return None
    low, high = np.quantile(drawn, ndtr(bias + z / (1 - acceleration * z)))
    return float(low), float(high)


def resampled(members: Floats, non_members: Floats, rng: np.random.Generator, resamples: int) -> Floats:
    """(resamples,) AUCs. Time and memory of each grow with the number of units, not of pairs."""
    others = np.sort(non_members)
    left, right = (np.searchsorted(others, members, side=side) for side in ("left", "right"))
    drawn, n, m = np.empty(resamples), len(members), len(others)
    up_to = np.zeros(m + 1)  # [i]: the number of resampled non-members among the lowest i
    for i in range(resamples):
        np.cumsum(np.bincount(rng.integers(m, size=m), minlength=m), out=up_to[1:])
        who = rng.integers(n, size=n)
        drawn[i] = up_to[left[who]].sum() + up_to[right[who]].sum()
    return drawn / (2 * n * m)


def disjoint_pairs(members: Floats, non_members: Floats, confidence: float, rng: np.random.Generator) -> Interval:
    """Exact limits from min(members, non-members) independent pairs."""
    pairs = min(len(members), len(non_members))
    first, second = rng.permutation(members)[:pairs], rng.permutation(non_members)[:pairs]
    tail = (1 - confidence) / 4
    win_low, win_high = exact_limits(_count(first > second), pairs, tail)
    loss_low, loss_high = exact_limits(_count(first < second), pairs, tail)
    return max(0.0, float(1 + win_low - loss_high)) / 2, min(2.0, float(1 + win_high - loss_low)) / 2


def shares_below(scores: Floats, others: Floats) -> Floats:
    """For each score the share of `others` that is lower; equal ones count half."""
    others = np.sort(others)
    left, right = (np.searchsorted(others, scores, side=side) for side in ("left", "right"))
    return np.asarray((left + right) / (2 * len(others)), dtype=np.float64)


def exact_limits(counts: NDArray[np.int64], of: int, tail: float) -> tuple[Floats, Floats]:
    """Clopper and Pearson's limits of a probability, each exceeded with a probability of at most `tail`."""
    from scipy.special import betaincinv

    some, most = np.maximum(counts, 1), np.minimum(counts, of - 1)
    low = np.where(counts > 0, betaincinv(some, of - some + 1, tail), 0.0)
    high = np.where(counts < of, betaincinv(most + 1, of - most, 1 - tail), 1.0)
    return low, high


def _count(which: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.asarray(which.sum(), dtype=np.int64)


_ALIKE = 1e-12  # resampled AUCs are multiples of 1 / (2 n m), summed in floating point
