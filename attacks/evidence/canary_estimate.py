"""Estimates of epsilon from canaries whose null distribution is known (`null`): sharper than a lower bound, but not proven.

Each makes an assumption that no audit can check, and is named after it. Neither is ever evidence of a violation: only
`bounds.lower_bound` is, which assumes nothing but fair coins.

independent       assumes that the members' scores are independent draws from one law. Then k of n members with a tail of at
                  most r give a lower limit of the true-positive rate at a false-positive rate of exactly r (Clopper and
                  Pearson, 1934), and epsilon >= log((TPR - delta) / r). The thresholds r, and each one's share of the 5 %
                  error, are fixed (`SHARES`), so the best of them errs in at most 5 %. It is only an estimate because canaries
                  of one run share its noise: directions in d dimensions overlap by only 1 / sqrt(d), but nothing ensures that
                  a broken mechanism treats them independently.
sampled_gaussian  also assumes that the mechanism is a Gaussian over Poisson samples, at the run's rate q and number of
                  releases, with an unknown noise multiplier z = 1 / mu, the same in every release. A member's numbers x_t are
                  then draws from (1 - q) N(0, 1) + q N(mu, 1), with one unknown. The point is the epsilon of the most likely
                  mu. The 95 % lower limit is the epsilon of the smallest mu that a likelihood-ratio test does not reject: with
                  2 (log L(most likely mu) - log L(mu)) <= 2.71, the quantile .9 of chi^2 with one degree of freedom, since
                  half of the errors are on the other side. It is tested on mechanisms of known z
                  (`tests/attacks/test_estimates.py`).

Under a public order there is no sampling: a score covers all turns of a canary and counts as one release of a plain Gaussian
(q = 1).

Both are too low, not too high, where canaries move a release by less than a unit may, or where some releases were not used. The
second may be too high where the noise is not Gaussian, or differs between releases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks.adversary.null import Floats, Null
from attacks.evidence.tradeoff import sampled_gaussian
from secure_fed.runs.membership.roc_interval import exact_limits

CONFIDENCE = 0.95  # of each estimate by itself
# Thresholds on the tails, and each one's share of the error: largest where a few hundred members show most.
SHARES = {1e-1: 0.05, 1e-2: 0.15, 1e-3: 0.4, 1e-4: 0.3, 1e-6: 0.06, 1e-9: 0.04}
_TWICE_LOG_RATIO = 2.705543454095404  # chi^2 of one degree of freedom, quantile .9
_GRID = 60
_LARGEST_MU, _SMALLEST_MU = 200.0, 1e-3


@dataclass(frozen=True)
class Estimate:
    """epsilon: a 95 % lower limit, if the assumption holds; point: the most likely epsilon."""

    name: str
    epsilon: float
    point: float | None = None


def estimates(null: Null, members: NDArray[np.bool_], delta: float, releases: int | None = None) -> list[Estimate]:
    """The estimates that `null` permits. releases: the run's number of releases; None: the rounds in `null`."""
    if not 0 < delta < 1 or not members.any():
        return []
    found = [Estimate("independent", independent(null.tails[members], delta))]
    if null.rounds is not None and null.rate is not None:
        low, likeliest = shift_of(null.rounds[members], null.rate)
        count = 1 if null.together else releases or null.rounds.shape[1]
        ends = (_epsilon(mu, null.rate, count, delta) for mu in (low, likeliest))
        found.append(Estimate("sampled_gaussian", *ends))
    return found


def independent(tails: Floats, delta: float, confidence: float = CONFIDENCE) -> float:
    """max(0, log((TPR - delta) / r)) over the thresholds r, with the lower limit of each TPR."""
    best = 0.0
    for rate, share in SHARES.items():
        hits = np.array(int((tails <= rate).sum()))
        tpr = float(exact_limits(hits, len(tails), (1 - confidence) * share)[0])
        if tpr > delta:
            best = max(best, math.log((tpr - delta) / rate))
    return best


def shift_of(x: Floats, rate: float) -> tuple[float, float]:
    """The 95 % lower limit and most likely mu for (members, rounds) draws of (1 - rate) N(0, 1) + rate N(mu, 1)."""
    from scipy.optimize import brentq, minimize_scalar

    def lost(mu: float) -> float:
        return -log_likelihood(x, mu, rate)

    grid = np.geomspace(_SMALLEST_MU, _LARGEST_MU, _GRID)
    best = int(np.argmin([lost(mu) for mu in grid]))
    ends = (grid[max(best - 1, 0)], grid[min(best + 1, _GRID - 1)])
    likeliest = float(minimize_scalar(lost, bounds=ends, method="bounded").x)
    least = lost(likeliest)
    if least >= 0:  # mu = 0 is as likely
        return 0.0, 0.0

    def beyond(mu: float) -> float:
        return 2 * (lost(mu) - least) - _TWICE_LOG_RATIO

    return (float(brentq(beyond, 0.0, likeliest)) if beyond(0.0) > 0 else 0.0), likeliest


def log_likelihood(x: Floats, mu: float, rate: float) -> float:
    """The log-likelihood of a shift of mu when drawn, minus that of no shift."""
    with np.errstate(divide="ignore"):
        return float(np.logaddexp(np.log1p(-rate), math.log(rate) + mu * x - mu**2 / 2).sum())


def _epsilon(mu: float, rate: float, releases: int, delta: float) -> float:
    return sampled_gaussian(1 / mu, rate, releases).epsilon(delta) if mu >= _SMALLEST_MU else 0.0
