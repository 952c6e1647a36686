"""Lower bounds of epsilon: what scores of members and non-members, or right guesses, rule out.

`lower_bound` is what audits call. `Bound.epsilon` is Steinke, Nasr and Jagielski's: it needs one run, a fair coin of its own
for each unit and scores made without the coins, and supposes nothing of the mechanism. So a bound above the accounted epsilon
means, with a confidence of 1 - significance, that the guarantee does not hold, for the same unit, delta and adversary, and for
neighbours of which one has a unit more. Units that share a coin (duplicates) or a contribution (examples of one client under
the client's epsilon) are not units here.

`Bound.mu` is Mahloujifar, Melis and Chaudhuri's. It supposes the trade-off curve of a Gaussian mechanism. Sampling makes
another, and a mechanism may keep its (epsilon, delta) while the Gaussian curve fitted to it has a larger epsilon there. So it
stands beside as an estimate and never makes a violation. Each of the two holds at the whole significance by itself.

Clopper and Pearson's bounds take units for independent draws. Scores of one run are not, since all have seen the same noise:
they are for one score from each of many runs, or where independence is otherwise known. Nothing here takes the best of several
tests without correcting for it (`best_of`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attacks.guessing import Floats, check_levels, one_run_p
from attacks.guessing import gaussian_epsilon as gaussian_epsilon
from attacks.guessing import one_run_epsilon as one_run_epsilon
from attacks.guessing import one_run_fdp as one_run_fdp
from secure_fed.roc_interval import exact_limits

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Bound:
    """epsilon: a lower bound; 0 if nothing is shown, None if so few units could show nothing. how: by what, or why not.

    mu, gaussian_epsilon: what the same guesses show if the mechanism is Gaussian; gaussian_epsilon is None at a delta of 0.
    guesses, right: of the way of guessing that gave epsilon, or came closest. significance: of epsilon, all corrections made.
    most: what so many units could have shown with every guess right; a larger epsilon cannot be contradicted by them.
    """

    epsilon: float | None
    how: str
    significance: float
    mu: float | None = None
    gaussian_epsilon: float | None = None
    guesses: int = 0
    right: int = 0
    most: float = 0.0


def violates(bound: Bound, accounted: float | None) -> bool:
    """Whether the bound contradicts an accounted epsilon; nothing contradicts a run that promised none."""
    return bound.epsilon is not None and accounted is not None and bound.epsilon > accounted


class Way(Protocol):
    """One way to bound epsilon from scores of units, fixed before they are seen."""

    def __call__(self, scores: Floats, members: Bools, significance: float) -> float: ...


@dataclass(frozen=True)
class Guesses:
    """Guess that these shares of the units, the highest and the lowest scores, are members and non-members; see `guessing`."""

    highest: float
    lowest: float
    delta: float = 0.0

    def counts(self, units: int) -> tuple[int, int]:
        return int(self.highest * units + _ROUNDING), int(self.lowest * units + _ROUNDING)

    def right(self, scores: Floats, members: Bools) -> int:
        """Which of equal scores come first is their order, so who calls shuffles them."""
        ins, outs = self.counts(len(scores))
        order = np.argsort(scores, kind="stable")
        return int(members[order[len(order) - ins :]].sum() + (~members[order[:outs]]).sum())

    def __call__(self, scores: Floats, members: Bools, significance: float) -> float:
        made = sum(self.counts(len(scores)))
        return one_run_epsilon(len(scores), made, self.right(scores, members), self.delta, significance)


@dataclass(frozen=True)
class Threshold:
    """Take who scores above `value` for a member; for units that are independent draws."""

    value: float
    delta: float = 0.0

    def __call__(self, scores: Floats, members: Bools, significance: float) -> float:
        above = scores > self.value
        tp, fp, ins = int((above & members).sum()), int((above & ~members).sum()), int(members.sum())
        return clopper_pearson_epsilon(tp, ins, fp, len(members) - ins, self.delta, significance)


def best_of(
    ways: Sequence[Way],
    scores: ArrayLike,
    members: ArrayLike,
    significance: float,
    correction: Literal["bonferroni", "split"] = "bonferroni",
    seed: int = 0,
) -> tuple[float, int]:
    """The best bound of several ways and which of them gave it; wrong with a probability of at most `significance`.

    bonferroni: each way at an equal share of the significance. split: the best on one random half, tried on the other at all
    of it; given the coins of the first half, the second is a game of its own. Equal scores are put in random order.
    """
    found, truth = _shuffled(scores, members, seed)
    if correction == "bonferroni":
        return _best(ways, found, truth, significance / len(ways))
    half = len(found) // 2
    _, chosen = _best(ways, found[:half], truth[:half], significance)
    return ways[chosen](found[half:], truth[half:], significance), chosen


def _best(ways: Sequence[Way], scores: Floats, members: Bools, significance: float) -> tuple[float, int]:
    bounds = [way(scores, members, significance) for way in ways]
    return max(bounds), int(np.argmax(bounds))


def lower_bound(scores: ArrayLike, members: ArrayLike, delta: float, significance: float, seed: int = 0) -> Bound:
    """What one attack's scores of one run show of epsilon at delta; see the head of this file for what it means.

    The ways to guess are fixed shares of the units, from all of them to the highest few. Each is tested at an equal share of
    the significance, and those are left out that even without a mistake could show nothing.
    """
    check_levels(delta, significance)
    found, truth = _shuffled(scores, members, seed)
    each = significance / len(WAYS)
    ways = [Guesses(*way, delta) for way in WAYS]
    m = len(found)
    ways = [way for way in ways if _unlikely_at_zero(m, sum(way.counts(m)), delta, each)]
    if not ways:
        return Bound(
            None, f"{m} units cannot show anything at delta {delta:g}, however right every guess", significance
        )
    each = significance / len(ways)
    most = max(one_run_epsilon(m, made, made, delta, each) for made in (sum(way.counts(m)) for way in ways))
    epsilon, best = _best(ways, found, truth, each)
    made = [(sum(way.counts(len(found))), way.right(found, truth)) for way in ways]
    mu, estimate = max(one_run_fdp(len(found), *one, delta, each) for one in made)
    how = _told(ways[best], len(found), made[best][1], len(ways))
    return Bound(epsilon, how, significance, mu, estimate if delta else None, *made[best], most)


def _unlikely_at_zero(m: int, r: int, delta: float, significance: float) -> bool:
    """Whether r right guesses of r could contradict an epsilon of 0."""
    return r > 0 and one_run_p(m, r, r, 0.0, delta) < significance


def _told(way: Guesses, units: int, right: int, ways: int) -> str:
    ins, outs = way.counts(units)
    lowest = f" and the {outs} lowest for non-members" if outs else ""
    corrected = f", as the best of {ways} ways to guess" if ways > 1 else ""
    return (
        f"taking the {ins} highest scores of {units} for members{lowest} is right {right} times of {ins + outs}"
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


def clopper_pearson_epsilon(
    tp: int, members: int, fp: int, non_members: int, delta: float, significance: float
) -> float:
    """max(0, ln((1 - delta - FNR_u) / FPR_u)), both upper limits at significance / 2; for one threshold fixed beforehand."""
    fnr, fpr = _miss_limits(tp, members, fp, non_members, significance)
    return _epsilon(1 - fnr, fpr, delta)


def gaussian_mu(tp: int, members: int, fp: int, non_members: int, significance: float) -> float:
    """max(0, Phi^-1(1 - FPR_u) - Phi^-1(FNR_u)): a lower bound of mu for a mu-GDP mechanism."""
    return _mu(*_miss_limits(tp, members, fp, non_members, significance))


def known_null_epsilon(tp: int, members: int, fpr: float, delta: float, significance: float) -> float:
    """The bound where the law of a non-member's score is known, and with it FPR: only the members' share has a limit."""
    return _epsilon(1 - _upper(members - tp, members, significance), fpr, delta)


def known_null_mu(tp: int, members: int, fpr: float, significance: float) -> float:
    """`gaussian_mu` where FPR is known."""
    return _mu(_upper(members - tp, members, significance), fpr)


def known_null(tails: ArrayLike, delta: float, significance: float) -> Bound:
    """The bound from members whose scores have a known law under the null, as those of random canaries' cosines, N(0, 1 / d).

    tails: for each member the probability that a non-member scores so high. Members are taken for independent
    draws, which canaries in random directions are but for overlaps of order 1 / sqrt(d). Thresholds are fixed: `NULL_RATES`.
    """
    found, each = np.asarray(tails, dtype=np.float64), significance / len(NULL_RATES)
    check_levels(delta, significance)
    if found.ndim != 1 or not ((found >= 0) & (found <= 1)).all():
        raise ValueError("tails are probabilities, one for each member")
    if not len(found):
        return Bound(None, "there are no canaries", significance)
    hits = [int((found <= rate).sum()) for rate in NULL_RATES]
    limits = [(1 - _upper(len(found) - k, len(found), each), rate) for k, rate in zip(hits, NULL_RATES, strict=True)]
    bounds = [_epsilon(tpr, rate, delta) for tpr, rate in limits]
    best, mu = int(np.argmax(bounds)), max(_mu(1 - tpr, rate) for tpr, rate in limits)
    how = (
        f"{hits[best]} of {len(found)} members score as only {NULL_RATES[best]:g} of non-members would"
        f" (Clopper and Pearson, 1934, as the best of {len(NULL_RATES)} thresholds)"
    )
    estimate = gaussian_epsilon(mu, delta) if delta else None
    return Bound(bounds[best], how, significance, mu, estimate, len(found), hits[best])


def _miss_limits(tp: int, members: int, fp: int, non_members: int, significance: float) -> tuple[float, float]:
    return _upper(members - tp, members, significance / 2), _upper(fp, non_members, significance / 2)


def _upper(count: int, of: int, tail: float) -> float:
    if not 0 <= count <= of or of < 1:
        raise ValueError(f"{count} of {of} is no count: at least one unit, and no more hits than units")
    return float(exact_limits(np.array(count), of, tail)[1])


def _epsilon(tpr: float, fpr: float, delta: float) -> float:
    return max(0.0, math.log((tpr - delta) / fpr)) if tpr > delta else 0.0


def _mu(fnr: float, fpr: float) -> float:
    from scipy.special import ndtri

    return max(0.0, float(-ndtri(fpr) - ndtri(fnr)))


# Shares of the units, highest scores and lowest: balanced attacks are found by the first, tails by the others.
WAYS = ((0.5, 0.5), (0.15, 0.15), (0.05, 0.05), (0.15, 0.0), (0.05, 0.0), (0.015, 0.0))
NULL_RATES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-9, 1e-12)
_ROUNDING = 1e-9  # 0.15 * 20 is 3 and 0.29 * 100 is 28.999999999999996
