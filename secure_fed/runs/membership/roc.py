"""How well scores separate members from non-members: AUC, true positives at few false positives, the ROC curve; with intervals.

Higher scores indicate membership. Scores may be infinite, since only their order counts, but not NaN. Nothing here chooses a
sign: an AUC below 1/2 is reported as it is.

Intervals are for the population that the units are drawn from, with units independent given the trained model: they measure the
uncertainty of the sample, not of another training run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from secure_fed.runs.membership.roc_interval import Floats, Interval, auc_interval, exact_limits, shares_below

FALSE_POSITIVE_RATES = (0.01, 0.001)
EXPECTED_FALSE_POSITIVES = 3  # a rate at which fewer are expected among the non-members cannot be measured on them


@dataclass(frozen=True)
class Rate:
    """A share of units, with its two-sided exact interval (Clopper and Pearson, 1934)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TprAt:
    """Units that score above `threshold` count as members: the smallest threshold whose `fpr.value` is at most the given rate.

    The threshold is the (k+1)-th highest score of a non-member, where k non-members may be above it. The interval of the false
    positives holds nevertheless: their true rate there is Beta(k+1, n-k) at most, whose quantile is Clopper and Pearson's upper
    limit.
    """

    threshold: float
    tpr: Rate
    fpr: Rate


@dataclass(frozen=True)
class Ranking:
    """Members' scores against non-members'. `at` has None for a false-positive rate that so few units cannot show."""

    auc: float
    auc_interval: Interval
    members: int
    non_members: int
    at: Mapping[float, TprAt | None]


@dataclass(frozen=True)
class Band:
    """`curve`, and for each of its false-positive rates the limits of the true-positive rate there; `meaning` in words."""

    fpr: Floats
    tpr: Floats
    low: Floats
    high: Floats
    meaning: str


def rank(
    members: ArrayLike, non_members: ArrayLike, *, confidence: float = 0.95, seed: int = 0, resamples: int = 2000
) -> Ranking:
    """The full evaluation of one attack's scores. Equal arguments give equal results."""
    high, low = _scores("members", members), _scores("non-members", non_members)
    _check(confidence)
    return Ranking(
        auc=auc(high, low),
        auc_interval=auc_interval(high, low, confidence, np.random.default_rng(seed), resamples),
        members=len(high),
        non_members=len(low),
        at={rate: tpr_at(high, low, rate, confidence) for rate in FALSE_POSITIVE_RATES},
    )


def to_dict(ranking: Ranking) -> dict[str, Any]:
    """A ranking as JSON: {auc, auc_interval, members, non_members, tpr_at_fpr: {"0.01": {tpr, ...} or None}}."""
    return {
        "auc": ranking.auc,
        "auc_interval": list(ranking.auc_interval),
        "members": ranking.members,
        "non_members": ranking.non_members,
        "tpr_at_fpr": {f"{rate:g}": None if at is None else _rates(at) for rate, at in ranking.at.items()},
    }


def _rates(at: TprAt) -> dict[str, Any]:
    return {
        "tpr": at.tpr.value,
        "tpr_interval": [at.tpr.low, at.tpr.high],
        "fpr": at.fpr.value,
        "fpr_interval": [at.fpr.low, at.fpr.high],
    }


def auc(members: ArrayLike, non_members: ArrayLike) -> float:
    """P(a member scores higher than a non-member) + P(both score the same) / 2, over all pairs."""
    return float(np.mean(shares_below(_scores("members", members), _scores("non-members", non_members))))


def tpr_at(members: ArrayLike, non_members: ArrayLike, rate: float, confidence: float = 0.95) -> TprAt | None:
    """True positives at a false-positive rate of at most `rate`; None with fewer than 3 / rate non-members."""
    high, low = _scores("members", members), _scores("non-members", non_members)
    _check(confidence)
    if not 0 < rate < 1:
        raise ValueError(f"a false-positive rate of {rate:g} is not between 0 and 1: choose one that is")
    if len(low) * rate < EXPECTED_FALSE_POSITIVES - _ROUNDING:
        return None
    allowed = math.floor(len(low) * rate + _ROUNDING)
    threshold = float(np.sort(low)[len(low) - 1 - allowed])
    return TprAt(
        threshold=threshold,
        tpr=exact_rate(int(np.sum(high > threshold)), len(high), confidence),
        fpr=exact_rate(int(np.sum(low > threshold)), len(low), confidence),
    )


def exact_rate(count: int, of: int, confidence: float = 0.95) -> Rate:
    """`count` of `of` independent units, with Clopper and Pearson's interval."""
    tail = (1 - confidence) / 2
    return Rate(count / of, *(float(limit) for limit in exact_limits(np.array(count), of, tail)))


def curve(members: ArrayLike, non_members: ArrayLike) -> tuple[Floats, Floats]:
    """The empirical ROC: (fpr, tpr) at "no unit", then for "score at least s" at every distinct score s, downwards."""
    high, low = np.sort(_scores("members", members)), np.sort(_scores("non-members", non_members))
    thresholds = np.unique(np.concatenate([high, low]))[::-1]
    fpr, tpr = ((len(one) - np.searchsorted(one, thresholds, side="left")) / len(one) for one in (low, high))
    return np.concatenate([[0.0], fpr]), np.concatenate([[0.0], tpr])


def band(members: ArrayLike, non_members: ArrayLike, confidence: float = 0.95) -> Band:
    """A pointwise band that covers the sampling error of both groups: it assumes only independent units.

    Let y_1 >= y_2 >= ... be the n non-members' scores. The true false-positive rate of "above y_(k+1)" is at most, and the rate
    of "at least y_(k+1)" at least, a variable of law Beta(k+1, n-k). With a = 1 - confidence, the lower limit at x uses the
    largest k whose rate is at most x except with probability a/4, and the upper limit the smallest k whose rate is at least x
    except with probability a/4; both then use Clopper and Pearson's limits of the share of members there, at a/4 each. Below x
    = 4 / n or so the lower one is 0.
    """
    from scipy.special import betaincinv

    fpr, tpr = curve(members, non_members)
    high, low = np.sort(_scores("members", members)), np.sort(_scores("non-members", non_members))[::-1]
    _check(confidence)
    tail, n, k = (1 - confidence) / 4, len(low), np.arange(len(low))
    below = (
        np.searchsorted(betaincinv(k + 1, n - k, 1 - tail), fpr, side="right") - 1
    )  # -1: no threshold is strict enough
    above = np.searchsorted(betaincinv(k + 1, n - k, tail), fpr, side="left")  # n: none is lenient enough
    certain = len(high) - np.searchsorted(high, low[np.maximum(below, 0)], side="right")
    possible = len(high) - np.searchsorted(high, low[np.minimum(above, n - 1)], side="left")
    lower = np.where(below >= 0, exact_limits(certain, len(high), tail)[0], 0.0)
    upper = np.where(above < n, exact_limits(possible, len(high), tail)[1], 1.0)
    meaning = f"At each false-positive rate, the true-positive rate is in the band with {confidence:.0%} confidence."
    return Band(fpr, tpr, np.where(fpr >= 1, 1.0, lower), upper, meaning)


def _scores(whose: str, scores: ArrayLike) -> Floats:
    found = np.asarray(scores, dtype=np.float64)
    if found.ndim != 1 or not found.size:
        raise ValueError(f"the scores of {whose} have shape {found.shape}: give one number for each, and at least one")
    if np.isnan(found).any():
        raise ValueError(f"{int(np.isnan(found).sum())} of {found.size} scores of {whose} are NaN, which has no rank")
    return found


def _check(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence of {confidence:g} is not between 0 and 1: choose one that is")


_ROUNDING = 1e-9  # 0.29 * 100 is 28.999999999999996
