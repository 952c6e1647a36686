"""The figures of a finding, from its scores and the true members. Only a run's own loss threshold reads the members elsewhere.

`judged` computes the AUC, the true-positive rates and the lower bound on epsilon (`bounds`). Where the law of a non-member's
score is known (`null`), members are compared with the law: with t_i the probability that a non-member scores at least as high
as member i, the AUC is the mean of 1 - t_i, the share of all possible non-members, not just of the held-out ones, below a
member. At a false-positive rate of exactly r, the members with t_i <= r are caught.

A known law also permits estimates of epsilon (`Estimate`), which are sharper than a lower bound but not proven.

`clients`, `exposed` and `accusations` list the units and clients that an attack ranks highest, over all units of the audit,
members and non-members alike: a list of members alone would hide false accusations. Texts are shown only on request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attacks.adversary.case import Finding
from attacks.adversary.null import Bools, Floats, Null, refuted
from attacks.evidence.bounds import Bound, lower_bound
from attacks.evidence.tradeoff import sampled_gaussian
from attacks.record import Accusation, Allowed, Cell, Client, Curve, Estimate, Exposed, Rates
from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.learning.data.audit_unit import Unit, plain
from secure_fed.runs import roc
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.roc import exact_limits

ROC_POINTS = 200  # points of a drawn curve
CONFIDENCE = 0.95  # of each interval and each estimate by itself
_RESAMPLES = 2000
_FEWEST = 10


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
    curve: Curve | None = None
    null: str = ""
    estimates: tuple[Estimate, ...] = ()
    why: str = ""


def judged(
    finding: Finding, members: Bools, *, delta: float, significance: float, seed: int, releases: int | None = None
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
        band = roc.band(ins, outs)
        curve = _thinned(band.fpr, band.tpr, band.low, band.high, units=len(outs))
        return Judged(finding, roc.rank(ins, outs, seed=seed), bound, curve, given_up)
    tails = null.tails[members]
    ranking = rank_by_law(tails, int((~members).sum()), seed)
    estimated = tuple(estimates(null, members, delta, releases))
    return Judged(finding, ranking, bound, _thinned(*curve_by_law(tails), units=len(tails)), "known", estimated)


def _thinned(fpr: Floats, *lines: Floats, units: int) -> Curve:
    """The ROC with its band, thinned for a plot."""
    keep = np.linspace(0, len(fpr) - 1, min(len(fpr), ROC_POINTS)).astype(int)
    few = np.flatnonzero(fpr * units <= 20)[: ROC_POINTS // 4]  # which a log axis shows in detail
    kept = np.union1d(keep, few)
    return Curve(*(tuple(line[kept].tolist()) for line in (fpr, *lines)))


def cell(
    attack: str, vantage: str, one: Judged, seconds: float, accounted: float | None, allowed: Allowed | None = None
) -> Cell:
    """One cell of the matrix. allowed: the figures that the guarantee allows an attack, if it covers this adversary."""
    ranking, bound, measured = one.ranking, one.bound, dict(one.finding.measured)
    found = Cell(
        attack,
        vantage,
        not one.why,
        one.why,
        epsilon_accounted=accounted,
        seconds=round(seconds, 3),
        measured=measured,
        note=one.finding.note,
    )
    if ranking is None or bound is None:
        return found
    if bound.gaussian_epsilon is not None:
        measured["estimate_if_gaussian"] = bound.gaussian_epsilon
    return replace(
        found,
        auc=ranking.auc,
        auc_interval=ranking.auc_interval,
        members=ranking.members,
        non_members=ranking.non_members,
        tpr_at_fpr={fpr: None if at is None else _rates(at) for fpr, at in ranking.at.items()},
        allowed=allowed,
        null=one.null,
        estimates=one.estimates,
        epsilon_lower=bound.epsilon,
        epsilon_how=bound.how,
        epsilon_showable=bound.most,
    )


def _rates(at: roc.TprAt) -> Rates:
    return Rates(at.tpr.value, (at.tpr.low, at.tpr.high), at.fpr.value, (at.fpr.low, at.fpr.high))


def rank_by_law(tails: Floats, non_members: int, seed: int = 0) -> roc.Ranking:
    """AUC and true-positive rates of members against the known law of a non-member's score.

    tails: the members'. non_members: the number held out, which no figure here depends on.
    """
    below = 1 - tails

    def caught(rate: float) -> roc.TprAt:
        known = roc.Rate(rate, rate, rate)
        return roc.TprAt(rate, roc.exact_rate(int((tails <= rate).sum()), len(tails), CONFIDENCE), known)

    return roc.Ranking(
        auc=float(below.mean()),
        auc_interval=_interval(below, np.random.default_rng(seed)),
        members=len(tails),
        non_members=non_members,
        at={rate: caught(rate) for rate in roc.FALSE_POSITIVE_RATES},
    )


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


def curve_by_law(tails: Floats) -> tuple[Floats, ...]:
    """The ROC at the members' own tails, with a pointwise band: false-positive rates are known, true-positive ones counted.

    Returns false-positive rates, true-positive rates, and the lower and upper limits of these.
    """
    fpr = np.sort(tails)
    hits = np.searchsorted(fpr, fpr, side="right")
    low, high = exact_limits(hits, len(tails), (1 - CONFIDENCE) / 2)
    begun = ((0.0, fpr), (0.0, hits / len(tails)), (0.0, low), (high[0], high))
    return tuple(np.r_[first, line, 1.0] for first, line in begun)


# Thresholds on the tails, and each one's share of the error: largest where a few hundred members show most.
SHARES = {1e-1: 0.05, 1e-2: 0.15, 1e-3: 0.4, 1e-4: 0.3, 1e-6: 0.06, 1e-9: 0.04}
_TWICE_LOG_RATIO = 2.705543454095404  # chi^2 of one degree of freedom, quantile .9
_GRID = 60
_LARGEST_MU, _SMALLEST_MU = 200.0, 1e-3


def estimates(null: Null, members: Bools, delta: float, releases: int | None = None) -> list[Estimate]:
    """The estimates that `null` permits. releases: the run's number of releases; None: the rounds in `null`.

    Each estimate makes an assumption that no audit can check, and is named after it. Neither is ever evidence of a violation:
    only `bounds.lower_bound` is, which assumes nothing but fair coins.

    independent assumes that the members' scores are independent draws from one law. Then k of n members with a tail of at
    most r give a lower limit of the true-positive rate at a false-positive rate of exactly r (Clopper and Pearson, 1934),
    and epsilon >= log((TPR - delta) / r). The thresholds r, and each one's share of the 5 % error, are fixed (`SHARES`), so
    the best of them errs in at most 5 %. It is only an estimate because canaries of one run share its noise: directions in
    d dimensions overlap by only 1 / sqrt(d), but nothing ensures that a broken mechanism treats them independently.

    sampled_gaussian also assumes that the mechanism is a Gaussian over Poisson samples, at the run's rate q and number of
    releases, with an unknown noise multiplier z = 1 / mu, the same in every release. A member's numbers x_t are then draws
    from (1 - q) N(0, 1) + q N(mu, 1), with one unknown. The point is the epsilon of the most likely mu. The 95 % lower
    limit is the epsilon of the smallest mu that a likelihood-ratio test does not reject: with 2 (log L(most likely mu) -
    log L(mu)) <= 2.71, the quantile .9 of chi^2 with one degree of freedom, since half of the errors are on the other side.
    It is tested on mechanisms of known z (`tests/attacks/test_estimates.py`).

    Under a public order there is no sampling: a score covers all turns of a canary and counts as one release of a plain
    Gaussian (q = 1). Both estimates are too low, not too high, where canaries move a release by less than a unit may, or
    where some releases were not used. The second may be too high where the noise is not Gaussian, or differs between
    releases.
    """
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


MOST = 50  # units listed
MOST_CLIENTS = 20
FIRST = (10, 20, 50)  # false accusations are counted among so many first units


def accusations(held: AuditPool, scores: Floats) -> list[Accusation]:
    """The number of held-out units among the highest scores; equal scores keep the order of the units."""
    members = held.members[_order(scores)]
    return [Accusation(n, int((~members[:n]).sum())) for n in FIRST if n <= len(members)]


def clients(held: AuditPool, scores: Floats) -> list[Client]:
    """The clients whose members score highest. A score is .5 by chance. Empty if the units are whole clients."""
    if held.kind == "client":
        return []
    shares = roc.shares_below(scores, scores[~held.members])
    own: dict[str, tuple[list[float], list[float]]] = {}
    for unit, share, member in zip(held.units, shares, held.members, strict=True):
        inside, outside = own.setdefault(unit.client, ([], []))
        (inside if member else outside).append(float(share))
    rows = [
        Client(name, len(inside), float(np.mean(inside)), len(outside), float(np.mean(outside)) if outside else None)
        for name, (inside, outside) in own.items()
        if inside
    ]
    return sorted(rows, key=lambda one: -one.score)[:MOST_CLIENTS]


def exposed(assembly: Assembly, scores: Floats, *, show_texts: bool) -> list[Exposed]:
    """The units with the highest scores, members and non-members."""
    held = assembly.audit_pool
    shares = roc.shares_below(scores, scores[~held.members])
    return [
        Exposed(
            unit=held.units[i].name,
            client=held.units[i].client,
            score=float(scores[i]) if np.isfinite(scores[i]) else None,
            share_below=float(shares[i]),
            rank=rank,
            member=bool(held.members[i]),
            text=_text(assembly, held.units[i]) if show_texts else None,
        )
        for rank, i in enumerate(_order(scores)[:MOST].tolist(), 1)
    ]


def _order(scores: Floats) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.argsort(-scores, kind="stable")


def _text(assembly: Assembly, unit: Unit) -> str | None:
    """The first example of a unit as text, if the tokenizer can decode it."""
    tokenizer = assembly.problem.tokenizer
    if tokenizer is None or not len(unit.examples):
        return None
    example = plain(unit.examples[0])
    ids = example.get("input_ids") if isinstance(example, Mapping) else None
    return None if ids is None or np.ndim(ids) != 1 else str(tokenizer.decode(ids, skip_special_tokens=True))
