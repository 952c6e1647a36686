"""Lower bounds on epsilon from scores of members and non-members, or from right guesses.

Audits call `lower_bound`. `Bound.epsilon` is Steinke, Nasr and Jagielski's bound. It needs one run, an independent fair coin
for each unit, and scores computed without the coins; it assumes nothing about the mechanism. So a bound above the accounted
epsilon means, with a confidence of 1 - significance, that the guarantee does not hold for the same unit, delta and adversary,
and for neighbours of which one has one unit more. Units that share a coin (duplicates) or a contribution (examples of one
client under the client's epsilon) do not qualify as units here.

`Bound.mu` is Mahloujifar, Melis and Chaudhuri's bound, which assumes the trade-off curve of a Gaussian mechanism. Sampling has
another curve, and a mechanism may keep its (epsilon, delta) while the fitted Gaussian curve has a larger epsilon at that delta.
So `mu` is reported as an estimate and never as a violation. Each of the two bounds alone holds at the whole significance.

`clopper_pearson_epsilon` assumes independent units. Scores of one run share its noise and are not independent: the function is
for one score from each of many runs, and no audit calls it. (`canary_estimate.independent` makes the same assumption where the
law of non-members is known, and calls its result an estimate.) Every choice of the best of several tests is corrected for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attacks.adversary.null import Floats
from attacks.evidence.guessing import check_levels, one_run_p
from attacks.evidence.guessing import gaussian_epsilon as gaussian_epsilon
from attacks.evidence.guessing import one_run_epsilon as one_run_epsilon
from attacks.evidence.guessing import one_run_fdp as one_run_fdp
from secure_fed.runs.membership.roc_interval import exact_limits

Bools = NDArray[np.bool_]


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


@dataclass(frozen=True)
class Guesses:
    """A way to bound epsilon, fixed before scores are seen: guess that the units with the highest scores (a share `highest`)
    are members and those with the lowest (a share `lowest`) non-members (`guessing`).
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


# Shares of the units, highest scores and lowest: the first suits balanced attacks, the others attacks that are right in a tail.
WAYS = ((0.5, 0.5), (0.15, 0.15), (0.05, 0.05), (0.15, 0.0), (0.05, 0.0), (0.015, 0.0))
_ROUNDING = 1e-9  # 0.15 * 20 is 3 and 0.29 * 100 is 28.999999999999996
