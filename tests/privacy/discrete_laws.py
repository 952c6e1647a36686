"""References for the discrete Gaussian: its probabilities in floating point, and a slow sampler in exact fractions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]


def probabilities(sigma: float, reach: int) -> Floats:
    """(2 reach + 1,) probabilities of N_Z(0, sigma^2) at -reach .. reach, normalised over these values."""
    x = np.arange(-reach, reach + 1)
    weights = np.exp(-(x**2) / (2 * sigma**2))
    return np.asarray(weights / weights.sum())


def fit(samples: NDArray[np.int64], sigma: float) -> float:
    """The p-value of Pearson's test that samples follow N_Z(0, sigma^2); rare values (fewer than 10 expected) are one class."""
    law = probabilities(sigma, int(40 * sigma))
    reach = len(law) // 2
    cut = int(np.flatnonzero(law * len(samples) >= 10)[-1]) - reach
    expected = law[reach - cut : reach + cut + 1] * len(samples)
    clipped = np.clip(samples, -cut - 1, cut + 1)
    counts = np.bincount(clipped + cut + 1, minlength=2 * cut + 3)
    beyond = len(samples) - expected.sum()
    if beyond < 10:  # too few for a class of their own: counted with the lowest value
        counts[1] += counts[0] + counts[-1]
        expected[0] += beyond
        observed, wanted = counts[1:-1], expected
    else:
        observed = np.append(counts[1:-1], counts[0] + counts[-1])
        wanted = np.append(expected, beyond)
    return float(stats.chisquare(observed, wanted * (len(samples) / wanted.sum())).pvalue)


def shares(sigma: float, count: int, reach: int) -> Floats:
    """(2 reach + 1,) probabilities of the sum of `count` independent shares N_Z(0, sigma^2), at -reach .. reach."""
    one = probabilities(sigma, reach)
    total = one
    for _ in range(count - 1):
        total = np.convolve(total, one)
    beyond = (len(total) - len(one)) // 2  # outer values, which lack the tails cut off from a share
    return total[beyond : len(total) - beyond]


def shifted(law: Floats, by: int) -> tuple[Floats, Floats]:
    """The probabilities of by + X and of X, at the values that both arrays cover; the values left out are negligible."""
    return law[:-by], law[by:]
