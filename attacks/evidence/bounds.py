"""Lower bounds on epsilon from scores of members and non-members of ONE run, or from right guesses of its coins.

Audits call `lower_bound`. `Bound.epsilon` is Steinke, Nasr and Jagielski's bound. It needs one run, an independent fair coin
for each unit, and scores computed without the coins; it assumes nothing about the mechanism. So a bound above the accounted
epsilon means, with a confidence of 1 - significance, that the guarantee does not hold for the same unit, delta and adversary,
and for neighbours of which one has one unit more. Units that share a coin (duplicates) or a contribution (examples of one
client under the client's epsilon) do not qualify as units here.

The game: the coins include or exclude each of m units, and the mechanism runs once on the included ones. Somebody who sees its
output but not the coins guesses r coins, r fixed beforehand, and v guesses are right. Guesses may depend on each other in any
way. Neighbours differ in the presence of one unit, so the bounds are for that adjacency and that unit. Under pure epsilon-DP
each guess is right with a probability of at most q = e^epsilon / (1 + e^epsilon), as in randomised response, and delta adds a
term:

    P(at least v right) <= beta + 2 m delta alpha                             (Steinke, Nasr and Jagielski, 2023, Corollary 5.4)
    beta = P(Bin(r, q) >= v),   alpha = max_{1 <= i <= v} P(v - i <= Bin(r, q) < v) / i

`Bound.mu` is Mahloujifar, Melis and Chaudhuri's bound. For a mechanism with trade-off curve f, fbar = 1 - f, let p_i be the
probability of i right guesses. For every set T of counts

    sum_{i in T} (i / m) p_i <= fbar(sum_{i in T} ((r - i + 1) / m) p_{i-1})  (Mahloujifar, Melis and Chaudhuri, 2024)

Here f is the curve of a Gaussian mechanism, fbar(x) = Phi(Phi^-1(x) + mu). Sampling has another curve, and a mechanism may keep
its (epsilon, delta) while the fitted Gaussian curve has a larger epsilon at that delta. So `mu` is reported as an estimate and
never as a violation. Each of the two bounds alone holds at the whole significance.

`clopper_pearson_epsilon` assumes independent units. Scores of one run share its noise and are not independent: the function is
for one score from each of many runs, and no audit calls it. (`figures.independent` makes the same assumption where the law of
non-members is known, and calls its result an estimate.) Every choice of the best of several tests is corrected for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attacks.adversary.null import Bools, Floats
from secure_fed.runs.roc import exact_limits

# Shares of the units, highest scores and lowest: the first suits balanced attacks, the others attacks that are right in a tail.
WAYS = ((0.5, 0.5), (0.15, 0.15), (0.05, 0.05), (0.15, 0.0), (0.05, 0.0), (0.015, 0.0))
_ROUNDING = 1e-9  # 0.15 * 20 is 3 and 0.29 * 100 is 28.999999999999996


@dataclass(frozen=True)
class Bound:
    """epsilon: a lower bound; 0 if nothing is shown, None if so few units can show nothing. how: the method, or why there is no
    bound.

    mu, gaussian_epsilon: the bounds from the same guesses if the mechanism is Gaussian; gaussian_epsilon is None at a delta of
    0. guesses, right: for the way of guessing that gave epsilon, or came closest. significance: of epsilon, with all
    corrections. most: the bound with every guess right; so many units cannot contradict a larger epsilon.
    """

    epsilon: float | None
    how: str
    significance: float
    mu: float | None = None
    gaussian_epsilon: float | None = None
    guesses: int = 0
    right: int = 0
    most: float = 0.0


def lower_bound(scores: ArrayLike, members: ArrayLike, delta: float, significance: float, seed: int = 0) -> Bound:
    """The lower bound on epsilon at delta from one attack's scores of one run, defined in this module's docstring.

    The ways of guessing are fixed shares of the units, from all of them to the highest few. Each is tested at an equal share of
    the significance; ways that could show nothing even without a mistake are left out.
    """
    check_levels(delta, significance)
    found, truth = _shuffled(scores, members, seed)
    each = significance / len(WAYS)
    ways = [Guesses(*way, delta) for way in WAYS]
    m = len(found)
    ways = [way for way in ways if (made := sum(way.counts(m))) and one_run_p(m, made, made, 0.0, delta) < each]
    if not ways:
        return Bound(
            None, f"{m} units cannot show anything at delta {delta:g}, however right every guess", significance
        )
    each = significance / len(ways)
    most = max(one_run_epsilon(m, made, made, delta, each) for made in (sum(way.counts(m)) for way in ways))
    epsilons = [way(found, truth, each) for way in ways]
    best = int(np.argmax(epsilons))
    guessed = [(sum(way.counts(m)), way.right(found, truth)) for way in ways]
    mu, estimate = max(one_run_fdp(m, *one, delta, each) for one in guessed)
    how = _in_words(ways[best], m, guessed[best][1], len(ways))
    return Bound(epsilons[best], how, significance, mu, estimate if delta else None, *guessed[best], most)


@dataclass(frozen=True)
class Guesses:
    """A way to bound epsilon, fixed before scores are seen: guess that the units with the highest scores (a share `highest`)
    are members and those with the lowest (a share `lowest`) non-members.
    """

    highest: float
    lowest: float
    delta: float = 0.0

    def counts(self, units: int) -> tuple[int, int]:
        return int(self.highest * units + _ROUNDING), int(self.lowest * units + _ROUNDING)

    def right(self, scores: Floats, members: Bools) -> int:
        """Equal scores are taken in their order, so the caller must shuffle them."""
        ins, outs = self.counts(len(scores))
        order = np.argsort(scores, kind="stable")
        return int(members[order[len(order) - ins :]].sum() + (~members[order[:outs]]).sum())

    def __call__(self, scores: Floats, members: Bools, significance: float) -> float:
        made = sum(self.counts(len(scores)))
        return one_run_epsilon(len(scores), made, self.right(scores, members), self.delta, significance)


def _in_words(way: Guesses, units: int, right: int, ways: int) -> str:
    ins, outs = way.counts(units)
    lowest = f", the {outs} lowest non-members" if outs else ""
    corrected = f", as the best of {ways} ways to guess" if ways > 1 else ""
    return (
        f"of {units} scores the {ins} highest were called members{lowest}: {right} of {ins + outs} were right"
        f" (Steinke, Nasr and Jagielski, 2023{corrected})"
    )


def _shuffled(scores: ArrayLike, members: ArrayLike, seed: int) -> tuple[Floats, Bools]:
    found, truth = np.asarray(scores, dtype=np.float64), np.asarray(members, dtype=np.bool_)
    if found.ndim != 1 or found.shape != truth.shape:
        raise ValueError(
            f"scores of shape {found.shape} do not fit members of shape {truth.shape}: one of each for a unit"
        )
    if np.isnan(found).any():
        raise ValueError(f"{int(np.isnan(found).sum())} of {found.size} scores are NaN, which has no rank")
    order = np.random.default_rng(seed).permutation(len(found))
    return found[order], truth[order]


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


_ROUNDS = 6  # each narrows mu by a factor of 32, to 3e-8 at the end
_LARGEST_MU = 32.0  # Phi(-16) is 1e-57: no number of guesses rejects a mu as large


def gaussian_rejected(m: int, r: int, v: int, mu: Floats, significance: float) -> Bools:
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
    """The least epsilon at delta of a mu-GDP mechanism (Balle and Wang, 2018).

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).
    """
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    if not (mu >= 0 and 0 <= delta < 1):
        raise ValueError(f"mu {mu:g} must be at least 0, and delta {delta:g} at least 0 and below 1")
    return float(get_epsilon_gaussian(1 / mu, delta)) if mu else 0.0


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


def clopper_pearson_epsilon(
    tp: int, members: int, fp: int, non_members: int, delta: float, significance: float
) -> float:
    """max(0, ln((1 - delta - FNR_u) / FPR_u)), both upper limits at significance / 2; for one threshold fixed beforehand."""
    fnr, fpr = _upper(members - tp, members, significance / 2), _upper(fp, non_members, significance / 2)
    return max(0.0, math.log((1 - fnr - delta) / fpr)) if 1 - fnr > delta else 0.0


def _upper(count: int, of: int, tail: float) -> float:
    if not 0 <= count <= of or of < 1:
        raise ValueError(f"{count} of {of} is no count: at least one unit, and no more hits than units")
    return float(exact_limits(np.array(count), of, tail)[1])
