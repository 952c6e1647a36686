"""AUC and true-positive rates of members against non-members whose scores have a known law (`null`).

With t_i the probability that a non-member scores at least as high as member i, the AUC is the mean of 1 - t_i: the share of all
possible non-members, not just of the held-out ones, below a member. At a false-positive rate of exactly r, the members with t_i
<= r are caught.
"""

from __future__ import annotations

import numpy as np

from attacks.adversary.null import Floats
from secure_fed.runs.membership import roc
from secure_fed.runs.membership.roc_interval import exact_limits

CONFIDENCE = 0.95
_RESAMPLES = 2000
_FEWEST = 10


def rank(tails: Floats, non_members: int, seed: int = 0) -> roc.Ranking:
    """tails: the members'. non_members: the number held out, which no figure here depends on."""
    below = 1 - tails
    return roc.Ranking(
        auc=float(below.mean()),
        auc_interval=_interval(below, np.random.default_rng(seed)),
        members=len(tails),
        non_members=non_members,
        at={rate: _caught(tails, rate) for rate in roc.FALSE_POSITIVE_RATES},
    )


def _caught(tails: Floats, rate: float) -> roc.TprAt:
    known = roc.Rate(rate, rate, rate)
    return roc.TprAt(rate, roc.exact_rate(int((tails <= rate).sum()), len(tails), CONFIDENCE), known)


def _interval(below: Floats, rng: np.random.Generator) -> tuple[float, float]:
    """An interval of the mean: BCa, as in `roc_interval` for two samples; Hoeffding's where resampling is uninformative."""
    from scipy.special import ndtr, ndtri

    found, deviations = float(below.mean()), below - below.mean()
    spread = float(np.sqrt(np.square(deviations).sum()))
    if len(below) < _FEWEST or spread == 0:
        half = float(np.sqrt(np.log(2 / (1 - CONFIDENCE)) / (2 * len(below))))
        return max(0.0, found - half), min(1.0, found + half)
    drawn = below[rng.integers(len(below), size=(_RESAMPLES, len(below)))].mean(axis=1)
    bias = float(ndtri(np.clip(np.mean(drawn < found), 1 / _RESAMPLES, 1 - 1 / _RESAMPLES)))
    acceleration = float((deviations**3).sum()) / (6 * spread**3)
    z = bias + ndtri(np.array([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]))
    low, high = np.quantile(drawn, ndtr(bias + z / (1 - acceleration * z)))
    return min(float(low), found), max(float(high), found)


def curve(tails: Floats) -> dict[str, list[float]]:
    """The ROC at the members' own tails, with a pointwise band: false-positive rates are known, true-positive ones counted."""
    fpr = np.sort(tails)
    hits = np.searchsorted(fpr, fpr, side="right")
    low, high = exact_limits(hits, len(tails), (1 - CONFIDENCE) / 2)
    lines = {"fpr": fpr, "tpr": hits / len(tails), "low": low, "high": high}
    ends = {"fpr": (0.0, 1.0), "tpr": (0.0, 1.0), "low": (0.0, 1.0), "high": (float(high[0]), 1.0)}
    return {name: [ends[name][0], *line.tolist(), ends[name][1]] for name, line in lines.items()}
