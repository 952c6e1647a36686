"""From scores to figures: the one place, beside a run's own loss threshold, that knows who was a member."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks.bounds import Bound, known_null, lower_bound
from attacks.canary_estimate import andrew_epsilon
from attacks.case import Finding, Floats
from secure_fed import roc

ROC_POINTS = 200  # that a curve is drawn by


@dataclass(frozen=True)
class Judged:
    """A finding held against the truth. ranking and bound: None of an attack on something else than membership, or of scores
    that are not numbers; why: the reason. estimates: of epsilon, sharper than the bound under assumptions, and no bounds.
    """

    finding: Finding
    ranking: roc.Ranking | None = None
    corrected: tuple[float, float] | None = None
    bound: Bound | None = None
    curve: dict[str, list[float]] = field(default_factory=dict)
    estimates: dict[str, float] = field(default_factory=dict)
    why: str = ""


def judged(finding: Finding, members: NDArray[np.bool_], *, delta: float, significance: float, seed: int) -> Judged:
    """significance: of the corrected interval and of the lower bound, which is what is left to each of several attacks."""
    scores = finding.scores
    if scores is None:
        return Judged(finding)
    if np.isnan(scores).any():
        return Judged(finding, why="its scores are not numbers")
    ins, outs = scores[members], scores[~members]
    ranking = roc.rank(ins, outs, seed=seed)
    corrected = roc.rank(ins, outs, confidence=1 - significance, seed=seed).auc_interval
    bound = lower_bound(scores, members, delta, significance, seed)
    estimates = _estimates(finding, bound, ins, delta)
    return Judged(finding, ranking, corrected, bound, _curve(ins, outs), estimates)


def _estimates(finding: Finding, bound: Bound, ins: Floats, delta: float) -> dict[str, float]:
    """If the mechanism is Gaussian; of canaries whose null law is known, if their cosines are normal, or independent."""
    told = {} if bound.gaussian_epsilon is None else {"estimate_if_gaussian": bound.gaussian_epsilon}
    if finding.measured.get("null_is_exact") and delta and len(ins) > 1:
        from scipy.stats import norm

        told["estimate_if_normal"] = andrew_epsilon(ins, 1, delta)
        told["estimate_if_independent"] = known_null(norm.sf(ins), delta, bound.significance).epsilon or 0.0
    return told


def _curve(ins: Floats, outs: Floats) -> dict[str, list[float]]:
    """The ROC with its band, thinned to what a plot can show."""
    band = roc.band(ins, outs)
    points = len(band.fpr)
    keep = np.unique(np.linspace(0, points - 1, min(points, ROC_POINTS)).astype(int))
    few = np.flatnonzero(band.fpr * len(outs) <= 20)[: ROC_POINTS // 4]  # which a log axis shows at length
    keep = np.union1d(keep, few)
    lines = {"fpr": band.fpr, "tpr": band.tpr, "low": band.low, "high": band.high}
    return {name: line[keep].tolist() for name, line in lines.items()}


def cell(attack: str, vantage: str, one: Judged, seconds: float, accounted: float | None) -> dict[str, Any]:
    """One cell of the matrix as JSON."""
    told = empty(attack, vantage, one.why) | {
        "applicable": not one.why,
        "measured": {**one.finding.measured, **one.estimates},
        "note": one.finding.note,
        "seconds": round(seconds, 3),
        "epsilon_accounted": accounted,
    }
    if one.ranking is not None:
        told |= roc.to_dict(one.ranking)
        told["auc_interval_corrected"] = list(one.corrected or ())
    if one.bound is not None:
        told |= {"epsilon_lower": one.bound.epsilon, "epsilon_how": one.bound.how, "epsilon_showable": one.bound.most}
    return told


def empty(attack: str, vantage: str, why: str) -> dict[str, Any]:
    """A cell that has no figures, with the reason."""
    nothing = dict.fromkeys(
        (
            *("auc", "auc_interval", "auc_interval_corrected", "members", "non_members", "tpr_at_fpr"),
            *("epsilon_lower", "epsilon_showable", "epsilon_accounted", "seconds"),
        )
    )
    named = {"attack": attack, "vantage": vantage, "applicable": False, "why": why}
    return named | nothing | {"epsilon_how": "", "measured": {}, "note": ""}
