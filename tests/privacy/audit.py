"""An audit: a lower bound of a mechanism's epsilon, from its releases on two neighbouring data sets.

For an (epsilon, delta)-private mechanism every test between neighbours X and X' has

    P(accept on X) <= exp(epsilon) P(accept on X') + delta                              (Kairouz, Oh and Viswanath, 2015)

so a test that accepts on X with probability at least p, and on X' with probability at most q, shows that epsilon is at least
log((p - delta) / q). The test is chosen on one half of the releases; on the other half, Clopper and Pearson's intervals bound p
and q. The result exceeds epsilon with probability at most `significance`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Scores = NDArray[np.float64]

SIGNIFICANCE = 1e-4


def lower_bound(first: Scores, second: Scores, delta: float, significance: float = SIGNIFICANCE) -> float:
    """A lower bound of epsilon, from the scores of the releases on X (`first`) and on X' (`second`): a high score means X."""
    tests = (first, second), (-second, -first)  # accept X for high scores, or X' for low ones
    return max(0.0, *(_one_sided(on, off, delta, significance / 2) for on, off in tests))


def _one_sided(on: Scores, off: Scores, delta: float, significance: float) -> float:
    chosen = _best_threshold(on[::2], off[::2], delta, significance)
    return float(_bounds(np.array([chosen]), on[1::2], off[1::2], delta, significance)[0])


def _best_threshold(on: Scores, off: Scores, delta: float, significance: float) -> float:
    everything = np.concatenate([on, off])
    candidates = np.unique(np.quantile(everything, np.linspace(0, 1, 401)))
    candidates = np.concatenate([candidates, np.sort(off)[-20:]])
    midpoint = (off.max() + on.min()) / 2  # separates the scores where they do not overlap
    candidates = np.append(candidates, midpoint)
    return float(candidates[np.argmax(_bounds(candidates, on, off, delta, significance))])


def _bounds(thresholds: Scores, on: Scores, off: Scores, delta: float, significance: float) -> Scores:
    """For each threshold, log((p - delta) / q) of the test "score above the threshold"."""
    hits, misses = (len(one) - np.searchsorted(np.sort(one), thresholds, side="right") for one in (on, off))
    with np.errstate(all="ignore"):
        p = np.where(hits > 0, stats.beta.ppf(significance / 2, hits, len(on) - hits + 1), 0.0)
        q = np.where(misses < len(off), stats.beta.isf(significance / 2, misses + 1, len(off) - misses), 1.0)
        found = np.log((p - delta) / q)
    return np.where(np.isnan(found), -math.inf, found)
