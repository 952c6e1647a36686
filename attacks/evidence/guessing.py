"""Lower bounds on epsilon from correct guesses of fair coins after ONE run of a mechanism.

The game: an independent fair coin includes or excludes each of m units, and the mechanism runs once on the included ones.
Somebody who sees its output but not the coins guesses r coins, r fixed beforehand, and v guesses are right. Guesses may depend
on each other in any way. Neighbours differ in the presence of one unit, so the bounds are for that adjacency and that unit.

Under pure epsilon-DP each guess is right with a probability of at most q = e^epsilon / (1 + e^epsilon), as in randomised
response, and delta adds a term:

    P(at least v right) <= beta + 2 m delta alpha                             (Steinke, Nasr and Jagielski, 2023, Corollary 5.4)
    beta = P(Bin(r, q) >= v),   alpha = max_{1 <= i <= v} P(v - i <= Bin(r, q) < v) / i

For a mechanism with trade-off curve f, fbar = 1 - f, let p_i be the probability of i right guesses. For every set T of counts

    sum_{i in T} (i / m) p_i <= fbar(sum_{i in T} ((r - i + 1) / m) p_{i-1})  (Mahloujifar, Melis and Chaudhuri, 2024)

Here f is the curve of a Gaussian mechanism, fbar(x) = Phi(Phi^-1(x) + mu). The resulting mu holds for mechanisms with such a
curve; another (epsilon, delta)-DP mechanism may be assigned a mu whose epsilon at delta is above its own.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from attacks.adversary.null import Floats


def one_run_p(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """An upper bound on the probability of at least v right guesses under (epsilon, delta)-DP."""
    from scipy.special import bdtrc

    beta = float(bdtrc(v - 1, r, 1 / (1 + math.exp(-epsilon)))) if v else 1.0
    if not delta or not v:
        return min(1.0, beta)
    just_below = np.cumsum(_chances(r, np.arange(v - 1, -1, -1), epsilon))
    alpha = float(np.max(just_below / np.arange(1, v + 1)))
    return min(1.0, beta + 2 * m * delta * alpha)


def _chances(r: int, counts: NDArray[np.int64], epsilon: float) -> Floats:
    """P(Bin(r, q) = count) for each count. scipy's `binom.pmf` gives the same, but spends most of a search for epsilon on
    checking its arguments.
    """
    from scipy.special import gammaln, log_expit

    ways = gammaln(r + 1) - gammaln(counts + 1) - gammaln(r - counts + 1)
    return np.asarray(np.exp(ways + counts * log_expit(epsilon) + (r - counts) * log_expit(-epsilon)))


@lru_cache(maxsize=4096)  # an audit repeats equal counts
def one_run_epsilon(m: int, r: int, v: int, delta: float, significance: float) -> float:
    """A lower bound of epsilon at delta, wrong with a probability of at most `significance` whatever the mechanism.

    Every epsilon whose `one_run_p` is below `significance` is a valid bound: a mechanism of a smaller epsilon is also
    epsilon-DP.
    """
    check_game(m, r, v, delta, significance)

    def rejected(epsilon: float) -> bool:
        return one_run_p(m, r, v, epsilon, delta) < significance

    if not rejected(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while rejected(high):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


@lru_cache(maxsize=4096)
def one_run_fdp(m: int, r: int, v: int, delta: float, significance: float) -> tuple[float, float]:
    """The largest mu that v right guesses reject among Gaussian trade-off curves, and its epsilon at delta (infinite at 0)."""
    check_game(m, r, v, delta, significance)
    low, high = 0.0, _LARGEST_MU
    for _ in range(_ROUNDS):
        tried = np.linspace(low, high, 33)
        kept = np.flatnonzero(~gaussian_rejected(m, r, v, tried, significance))
        if kept.size and kept[0] == 0:
            return 0.0, 0.0
        first = int(kept[0]) if kept.size else len(tried) - 1
        low, high = float(tried[first - 1]), float(tried[first])
    return low, gaussian_epsilon(low, delta)


def gaussian_rejected(m: int, r: int, v: int, mu: Floats, significance: float) -> NDArray[np.bool_]:
    """For each mu whether at least v right guesses are less likely than `significance` under it.

    By contradiction: suppose they are as likely as that. Descending from v, `right` and `wrong` bound sum_{j >= i} (j / m) p_j
    and sum_{j >= i} ((r - j) / m) p_j from below. The inequality at T = {i+1 .. r} gives the latter at i from the former at
    i+1; if p_i adds x to `wrong`, it adds x i / (r - i) to `right`. Their sum, times m / r, is a probability.
    """
    from scipy.special import ndtr, ndtri

    right, wrong = np.full(len(mu), significance * v / m), np.full(len(mu), significance * (r - v) / m)
    for i in range(v - 1, -1, -1):
        more = np.maximum(wrong, ndtr(ndtri(np.minimum(right, 1.0)) - mu))
        right = right + i / (r - i) * (more - wrong)
        wrong = more
    return np.asarray(right + wrong > r / m)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon at delta of a mu-GDP mechanism: delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)."""
    from scipy.optimize import brentq
    from scipy.special import log_ndtr, ndtr

    if not (mu >= 0 and 0 <= delta < 1):
        raise ValueError(f"mu {mu:g} must be at least 0, and delta {delta:g} at least 0 and below 1")

    def excess(epsilon: float) -> float:
        return float(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))) - delta

    if mu == 0 or excess(0.0) <= 0:
        return 0.0
    if delta == 0:
        return math.inf
    highest = mu * (mu / 2 + math.sqrt(-2 * math.log(delta)))  # where Phi(mu/2 - epsilon/mu) alone is below delta
    return float(brentq(excess, 0.0, highest, xtol=1e-12))


def check_game(m: int, r: int, v: int, delta: float, significance: float) -> None:
    """Raises ValueError unless the arguments describe a game."""
    if not 0 <= v <= r <= m:
        raise ValueError(f"{v} right of {r} guesses about {m} units cannot be: 0 <= right <= guesses <= units")
    check_levels(delta, significance)


def check_levels(delta: float, significance: float) -> None:
    """Raises ValueError for a delta or a significance outside its range."""
    if not 0 <= delta < 1:
        raise ValueError(f"delta {delta:g} must be at least 0 and below 1")
    if not 0 < significance < 1:
        raise ValueError(f"a significance of {significance:g} must be above 0 and below 1")


_ROUNDS = 6  # each narrows mu by a factor of 32, to 3e-8 at the end
_LARGEST_MU = 32.0  # Phi(-16) is 1e-57: no number of guesses rejects a mu as large
