"""Areas, rates, curves and their intervals: against pairs counted one by one, scikit-learn, scipy, and simulated truths."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from secure_fed.runs import roc
from tests.cells import chosen, every
from tests.golden import refused

Floats = NDArray[np.float64]
scores = st.lists(st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 0.5, 1.0, math.inf]), min_size=1, max_size=12)


def binormal(auc: float, n: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    return rng.normal(size=n) + math.sqrt(2) * stats.norm.ppf(auc), rng.normal(size=n)


AT_NIGHT = [(0.65, 40), (0.9, 200), (0.97, 10), (0.97, 15)]


def naive_tail(at_least: int, n: int, p: float) -> float:
    return math.fsum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(at_least, n + 1))


@every("decimals", [0, 1, 15])
def test_area_and_curve_are_scikit_learns(decimals: int) -> None:
    rng = np.random.default_rng(decimals)
    members, non_members = (
        np.round(rng.normal(at, 1, 70), decimals) for at in (0.5, 0)
    )  # the fewer decimals, the more ties
    truth, scores = np.repeat([1, 0], 70), np.r_[members, non_members]
    assert roc.auc(members, non_members) == pytest.approx(roc_auc_score(truth, scores), abs=1e-14)
    fpr, tpr, _ = roc_curve(truth, scores, drop_intermediate=False)
    found = roc.curve(members, non_members)
    assert (found[0].tolist(), found[1].tolist()) == (fpr.tolist(), tpr.tolist())


def test_the_sign_is_not_chosen() -> None:
    assert roc.rank([0.0] * 20, [1.0] * 20).auc == 0.0


def test_the_curve_ranks_infinities() -> None:
    fpr, tpr = roc.curve([math.inf, 1.0], [1.0, -math.inf])
    assert (fpr.tolist(), tpr.tolist()) == ([0, 0, 0.5, 1], [0, 0.5, 1, 1])


@settings(max_examples=30)
@given(scores, st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 1.0, math.inf]), min_size=30, max_size=60))
def test_the_threshold_is_the_smallest_that_keeps_to_the_rate(members: list[float], non_members: list[float]) -> None:
    at = roc.tpr_at(members, non_members, 0.1)
    assert at is not None

    def share(whose: list[float], threshold: float) -> float:
        return sum(score > threshold for score in whose) / len(whose)

    fit = [threshold for threshold in [-math.inf, *non_members] if share(non_members, threshold) <= 0.1]
    assert at.threshold == min(fit)
    assert at.fpr.value == share(non_members, at.threshold) <= 0.1
    assert at.tpr.value == share(members, at.threshold)


def test_a_rate_that_floating_point_does_not_hold_is_kept_to() -> None:
    at = roc.tpr_at([0.0], np.arange(100.0), 0.29)  # 0.29 * 100 is 28.999999999999996
    assert at is not None
    assert at.fpr.value == 0.29


@pytest.mark.parametrize(("rate", "fewest"), [(0.01, 300), (0.001, 3000), (0.3, 10)])
def test_rates_that_so_few_non_members_cannot_show_are_refused(rate: float, fewest: int) -> None:
    assert roc.tpr_at([1.0], np.arange(float(fewest - 1)), rate) is None
    assert roc.tpr_at([1.0], np.arange(float(fewest)), rate) is not None


@pytest.mark.parametrize(("count", "of"), [(0, 1), (1, 1), (0, 40), (7, 40), (39, 40), (40, 40), (3, 300)])
def test_rates_have_exact_intervals(count: int, of: int) -> None:
    rate = roc.exact_rate(count, of, 0.95)
    assert rate.value == count / of
    assert rate.low == 0 if count == 0 else naive_tail(count, of, rate.low) == pytest.approx(0.025)
    assert rate.high == 1 if count == of else 1 - naive_tail(count + 1, of, rate.high) == pytest.approx(0.025)


def test_the_interval_of_the_false_positives_holds_though_the_threshold_is_taken_from_them() -> None:
    rng, missed = np.random.default_rng(0), 0
    for _ in range(400):
        at = roc.tpr_at([0.0], rng.normal(size=300), 0.05)
        assert at is not None
        missed += not at.fpr.low <= stats.norm.sf(at.threshold) <= at.fpr.high
    assert missed <= 28


@pytest.mark.parametrize(
    ("auc", "n"),
    [
        pytest.param(auc, n, marks=pytest.mark.nightly if (auc, n) in AT_NIGHT else pytest.mark.weekly)
        for auc, n in [*itertools.product([0.5, 0.65, 0.9], [40, 200]), (0.97, 10), (0.97, 15)]
    ],
)
def test_the_area_is_in_its_interval_as_often_as_said(auc: float, n: int) -> None:
    """Near one some samples of few units are separate, with an exact interval, and others are resampled."""
    rng, covered, runs = np.random.default_rng(n), 0, 800
    for seed in range(runs):
        low, high = roc.rank(*binormal(auc, n, rng), seed=seed, resamples=400).auc_interval
        covered += low <= auc <= high
    assert 0.92 <= covered / runs <= (0.98 if auc < 0.97 else 1)


@pytest.mark.parametrize(
    ("auc", "n", "decimals"),
    chosen([(0.6, 40, 12), (0.85, 25, 12), (0.7, 40, 0), (0.7, 20, 0)], [(0.7, 20, 0)]),
)
def test_the_interval_is_scipys(auc: float, n: int, decimals: int) -> None:
    members, non_members = (np.round(one, decimals) for one in binormal(auc, n, np.random.default_rng(n)))

    def area(ours: Floats, theirs: Floats, axis: int = -1) -> Floats:
        above, alike = ours[..., :, None] > theirs[..., None, :], ours[..., :, None] == theirs[..., None, :]
        return np.mean(above + alike / 2, axis=(-1, -2))

    theirs = stats.bootstrap(
        (members, non_members), area, n_resamples=10_000, method="BCa", rng=np.random.default_rng(0), batch=500
    ).confidence_interval
    found = roc.rank(members, non_members, resamples=10_000).auc_interval
    assert found == pytest.approx((theirs.low, theirs.high), abs=0.012)  # the random error of 10,000 resamples


@every("auc", [0.0, 1.0])
@every("n", [1, 5, 40, 1000])
def test_separate_scores_have_an_exact_interval(auc: float, n: int) -> None:
    low, high = roc.rank(np.full(n, auc), np.full(n, 1 - auc)).auc_interval
    edge = 0.0125 ** (1 / n)  # the exact limit for 0 of n pairs lost, at a tail of 0.05 / 4
    assert (low, high) == pytest.approx((edge, 1.0) if auc else (0.0, 1 - edge))


def test_equal_scores_show_an_area_about_a_half() -> None:
    """Every resample has the same area, and BCa has no interval."""
    assert roc.bca(np.zeros(20), np.zeros(20), 0.95, np.random.default_rng(0), 200) is None
    low, high = roc.rank(np.zeros(100), np.zeros(200)).auc_interval
    assert (low, high) == pytest.approx((0.5 - (1 - 0.0125**0.01) / 2, 0.5 + (1 - 0.0125**0.01) / 2))


@every("steps", [2, 100])
@every("n", [3, 9])
def test_few_units_have_an_interval_that_holds(steps: int, n: int) -> None:
    """The scores may have ties."""
    rng, covered = np.random.default_rng(steps), 0
    values = np.arange(steps)
    law = (values + 1.0) / (values + 1).sum()
    truth = sum(law[i] * ((i > values).sum() + 0.5) / steps for i in values)  # against uniform non-members
    for seed in range(150):
        members, non_members = rng.choice(values, n, p=law), rng.integers(steps, size=n)
        low, high = roc.rank(members, non_members, seed=seed).auc_interval
        covered += low <= truth <= high
    assert covered >= 0.95 * 150


def test_a_thousand_of_each_are_ranked_with_all_that_is_said() -> None:
    rng = np.random.default_rng(0)
    members, non_members = rng.normal(0.5, 1, 1000), rng.normal(0, 1, 1000)
    found = roc.rank(members, non_members)
    spread = math.sqrt(roc.shares_below(members, non_members).var() + roc.shares_below(non_members, members).var())
    half = 1.96 * spread / math.sqrt(1000)  # DeLong's interval, accurate for 1,000 of each
    assert found.auc_interval == pytest.approx((found.auc - half, found.auc + half), abs=0.003)
    assert (found.members, found.non_members) == (1000, 1000)
    assert list(found.at) == [0.01, 0.001]
    assert found.at[0.001] is None


def test_only_the_seed_and_the_order_of_scores_count() -> None:
    members, non_members = binormal(0.6, 50, np.random.default_rng(0))
    one = roc.rank(members, non_members, resamples=300)
    assert roc.rank(members, non_members, resamples=300) == one
    assert roc.rank(members, non_members, resamples=300, seed=1) != one
    other = roc.rank(np.exp(members), np.exp(non_members), resamples=300)
    assert (one.auc, one.auc_interval) == (other.auc, other.auc_interval)
    members[0], non_members[0] = members.max() + 1, non_members.min() - 1
    finite = roc.rank(members, non_members, resamples=300)
    members[0], non_members[0] = math.inf, -math.inf
    assert roc.rank(members, non_members, resamples=300).auc_interval == finite.auc_interval


def test_a_ranking_is_json() -> None:
    told = roc.to_dict(roc.rank(np.full(400, math.inf), np.arange(400.0)))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["tpr_at_fpr"]["0.001"] is None
    assert told["tpr_at_fpr"]["0.01"]["tpr"] == 1.0
    assert set(told["tpr_at_fpr"]["0.01"]) == {"tpr", "tpr_interval", "fpr", "fpr_interval"}
    assert set(told) == {"auc", "auc_interval", "members", "non_members", "tpr_at_fpr"}


def test_what_cannot_be_ranked_is_refused() -> None:
    for members, non_members, confidence in (
        ([], [1.0], 0.95),
        ([[1.0]], [1.0], 0.95),
        ([math.nan, 1.0], [1.0], 0.95),
        ([1.0], [math.nan], 0.95),
        ([1.0], [1.0], 1.0),
    ):
        with refused(ValueError):
            roc.rank(members, non_members, confidence=confidence)
    with refused(ValueError):
        roc.tpr_at([1.0], [1.0], 0.0)


def naive_band(members: Floats, non_members: Floats, at: Floats, tail: float) -> list[tuple[float, float]]:
    """The band's limits at the false-positive rates `at`, computed one threshold at a time."""
    n, limits = len(non_members), []
    for k, score in enumerate(sorted(non_members, reverse=True)):
        strictly, loosely = (
            roc.exact_rate(int(which.sum()), len(members), 1 - 2 * tail)
            for which in (members > score, members >= score)
        )
        limits.append((*(stats.beta.ppf(p, k + 1, n - k) for p in (1 - tail, tail)), strictly.low, loosely.high))
    found = []
    for x in at:
        low = max([low for at_most, _, low, _ in limits if at_most <= x], default=0.0)
        high = min([high for _, at_least, _, high in limits if at_least >= x], default=1.0)
        found.append((1.0 if x == 1 else low, high))
    return found


@pytest.mark.parametrize("decimals", [0, 12])
def test_the_band_is_what_it_says(decimals: int) -> None:
    members, non_members = (np.round(one, decimals) for one in binormal(0.7, 60, np.random.default_rng(5)))
    band = roc.band(members, non_members)
    fpr, tpr = roc.curve(members, non_members)
    assert (band.fpr.tolist(), band.tpr.tolist()) == (fpr.tolist(), tpr.tolist())
    expected = naive_band(members, non_members, fpr, 0.0125)
    assert np.c_[band.low, band.high] == pytest.approx(np.array(expected))
    assert (band.low <= tpr).all()
    assert (tpr <= band.high).all()
    assert band.low[fpr < 4 / 60].max() == 0  # 60 non-members give no positive lower limit here
    assert "95%" in band.meaning


def test_the_band_holds_at_every_rate_and_needs_both_groups() -> None:
    """The true curve is Phi(d + Phi^-1(x)). A band that takes observed false-positive rates as exact misses it too often."""
    rng, shift, runs = np.random.default_rng(0), math.sqrt(2) * stats.norm.ppf(0.7), 150
    at = np.array([0.01, 0.05, 0.2, 0.5, 0.9])
    truth = stats.norm.cdf(shift + stats.norm.ppf(at))
    missed, missed_by_naive = np.zeros(len(at)), np.zeros(len(at))
    for _ in range(runs):
        members, non_members = binormal(0.7, 100, rng)
        band = roc.band(members, non_members)
        where = np.searchsorted(band.fpr, at - 1e-9)  # the first point of that rate, which is a multiple of 1 / 100
        missed += (truth < band.low[where]) | (truth > band.high[where])
        taken = [roc.exact_rate(round(100 * tpr), 100) for tpr in band.tpr[where]]
        missed_by_naive += [not rate.low <= true <= rate.high for rate, true in zip(taken, truth, strict=True)]
    assert (missed <= 0.05 * runs).all()
    assert missed_by_naive.max() > 0.08 * runs
