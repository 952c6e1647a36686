"""Figures of a finding, from its scores and the true members. Only a run's own loss threshold reads the members elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks.adversary.case import Finding
from attacks.adversary.null import Floats, refuted
from attacks.evidence import against_null
from attacks.evidence.bounds import Bound, lower_bound
from attacks.evidence.canary_estimate import Estimate, estimates
from secure_fed.runs.membership import roc

ROC_POINTS = 200  # points of a drawn curve


@dataclass(frozen=True)
class Judged:
    """A finding compared with the true members. ranking, bound: None for attacks on something other than membership, and for
    scores that are not numbers; why: the reason. null: "known" if members were compared with the known law of a non-member's
    score; "refuted" if the held-out units contradict that law, so that members were compared with these units; else empty.
    estimates: of epsilon, sharper than the bound under assumptions, and not proven; none if the law is refuted.
    """

    finding: Finding
    ranking: roc.Ranking | None = None
    bound: Bound | None = None
    curve: dict[str, list[float]] = field(default_factory=dict)
    null: str = ""
    estimates: tuple[Estimate, ...] = ()
    why: str = ""


def judged(
    finding: Finding,
    members: NDArray[np.bool_],
    *,
    delta: float,
    significance: float,
    seed: int,
    releases: int | None = None,
) -> Judged:
    """significance: of the lower bound, this attack's share. releases: the run's number of releases, if public."""
    scores, null = finding.scores, finding.null
    if scores is None:
        return Judged(finding)
    if np.isnan(scores).any():
        return Judged(finding, why="its scores are not numbers")
    bound = lower_bound(scores, members, delta, significance, seed)
    if null is None or refuted(null.tails[~members]):
        ins, outs = scores[members], scores[~members]
        given_up = "refuted" if null is not None else ""
        return Judged(finding, roc.rank(ins, outs, seed=seed), bound, _curve(ins, outs), given_up)
    tails = null.tails[members]
    ranking = against_null.rank(tails, int((~members).sum()), seed)
    estimated = tuple(estimates(null, members, delta, releases))
    return Judged(finding, ranking, bound, _thinned(against_null.curve(tails), len(tails)), "known", estimated)


def _curve(ins: Floats, outs: Floats) -> dict[str, list[float]]:
    """The ROC with its band, thinned for a plot."""
    band = roc.band(ins, outs)
    lines = {"fpr": band.fpr, "tpr": band.tpr, "low": band.low, "high": band.high}
    return _thinned({name: line.tolist() for name, line in lines.items()}, len(outs))


def _thinned(lines: Mapping[str, list[float]], units: int) -> dict[str, list[float]]:
    fpr = np.array(lines["fpr"])
    keep = np.unique(np.linspace(0, len(fpr) - 1, min(len(fpr), ROC_POINTS)).astype(int))
    few = np.flatnonzero(fpr * units <= 20)[: ROC_POINTS // 4]  # which a log axis shows in detail
    return {name: [line[i] for i in np.union1d(keep, few).tolist()] for name, line in lines.items()}


def cell(
    attack: str,
    vantage: str,
    one: Judged,
    seconds: float,
    accounted: float | None,
    allowed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One cell of the matrix as JSON. allowed: the figures that the guarantee allows an attack, if it covers this adversary."""
    measured = dict(one.finding.measured)
    if one.bound is not None and one.bound.gaussian_epsilon is not None:
        measured["estimate_if_gaussian"] = one.bound.gaussian_epsilon
    figures = empty(attack, vantage, one.why) | {
        "applicable": not one.why,
        "measured": measured,
        "note": one.finding.note,
        "seconds": round(seconds, 3),
        "epsilon_accounted": accounted,
    }
    if one.ranking is not None:
        figures |= roc.to_dict(one.ranking)
        figures |= {"null": one.null, "allowed": None if allowed is None else dict(allowed)}
        figures["estimates"] = [asdict(estimate) for estimate in one.estimates]
    if one.bound is not None:
        figures |= {
            "epsilon_lower": one.bound.epsilon,
            "epsilon_how": one.bound.how,
            "epsilon_showable": one.bound.most,
        }
    return figures


def empty(attack: str, vantage: str, why: str) -> dict[str, Any]:
    """A cell without figures, with the reason."""
    nothing = dict.fromkeys(
        (
            *("auc", "auc_interval", "members", "non_members", "tpr_at_fpr"),
            *("epsilon_lower", "epsilon_showable", "epsilon_accounted", "allowed", "seconds"),
        )
    )
    named = {"attack": attack, "vantage": vantage, "applicable": False, "why": why}
    return named | nothing | {"epsilon_how": "", "measured": {}, "note": "", "null": "", "estimates": []}
