"""Epsilon estimated from the cosines of canaries (Andrew et al. 2023, arXiv 2302.03098): an estimate, and no bound."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Normal = tuple[float, float]  # mean and standard deviation


def andrew_epsilon(cosines_in: Floats, dimension: int, delta: float) -> float:
    """An estimate of epsilon, and no bound: that between N(0, 1/d) and the normal law with mean and variance of the canaries'
    cosines, as if these were what the laws are. Scores, which have d = 1, do as well.

    It is the least epsilon >= 0 with P(S) <= e^epsilon Q(S) + delta for all S, for P and Q either way around.
    """
    cosines = np.asarray(cosines_in, dtype=np.float64)
    if len(cosines) < 2 or not np.isfinite(cosines).all() or dimension < 1 or not 0 < delta < 1:
        raise ValueError(
            f"an estimate takes two finite cosines or more, a dimension of 1 or more and delta between 0 and 1, and got "
            f"{len(cosines)} cosines, dimension {dimension} and delta {delta}"
        )
    null = (0.0, 1 / math.sqrt(dimension))
    fitted = (float(cosines.mean()), max(float(cosines.std(ddof=1)), 1e-12))
    return max(_epsilon(null, fitted, delta), _epsilon(fitted, null, delta))


def _epsilon(p: Normal, q: Normal, delta: float) -> float:
    low, high = 0.0, 1.0
    if excess(p, q, low) <= delta:
        return 0.0
    while excess(p, q, high) > delta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(p, q, middle) > delta else (low, middle)
    return high


def excess(p: Normal, q: Normal, epsilon: float) -> float:
    """max_S P(S) - e^epsilon Q(S) of two normal laws (mean, standard deviation).

    It is taken where log p(x) - log q(x) >= epsilon: where a x^2 + b x + c >= 0.
    """
    (m, s), (n, t) = p, q
    a = 1 / (2 * t * t) - 1 / (2 * s * s)
    b = m / (s * s) - n / (t * t)
    c = n * n / (2 * t * t) - m * m / (2 * s * s) + math.log(t / s) - epsilon
    return sum(_mass(p, *part) - _weighed(q, epsilon, *part) for part in _not_negative(a, b, c))


def _not_negative(a: float, b: float, c: float) -> list[tuple[float, float]]:
    """The intervals on which a x^2 + b x + c >= 0."""
    square = b * b - 4 * a * c
    if square <= 0:
        return [(-math.inf, math.inf)] if a + b + c > 0 or c > 0 else []
    far = (
        -(b + math.copysign(math.sqrt(square), b)) / 2
    )  # the sum that cancels nothing; the other root is the product over it
    roots = [c / far, *([far / a] if a and math.isfinite(far / a) else [])]
    if len(roots) == 1:
        return [(roots[0], math.inf)] if b > 0 else [(-math.inf, roots[0])]
    low, high = sorted(roots)
    return [(-math.inf, low), (high, math.inf)] if a > 0 else [(low, high)]


def _mass(law: Normal, low: float, high: float) -> float:
    return float(np.exp(_log_mass(law, low, high)))


def _weighed(law: Normal, epsilon: float, low: float, high: float) -> float:
    """e^epsilon times the mass, where e^epsilon alone is no float."""
    return float(np.exp(min(epsilon + _log_mass(law, low, high), 700.0)))


def _log_mass(law: Normal, low: float, high: float) -> float:
    from scipy.stats import norm

    low, high = (low - law[0]) / law[1], (high - law[0]) / law[1]
    if low > 0:  # the tail that keeps its digits
        low, high = -high, -low
    upper, lower = float(norm.logcdf(high)), float(norm.logcdf(low))
    return -math.inf if upper <= lower else upper + math.log1p(-math.exp(lower - upper))
