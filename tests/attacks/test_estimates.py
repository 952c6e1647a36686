"""Estimates of epsilon from canaries: right for mechanisms of known epsilon, sharp, and high where the noise is broken."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from attacks.adversary.null import Null
from attacks.evidence.judge import SHARES, estimates, independent, log_likelihood, shift_of
from attacks.evidence.tradeoff import sampled_gaussian
from tests.cells import chosen

Floats = NDArray[np.float64]
DEMO = (0.5583, 0.05, 20)  # noise multiplier, rate, releases: epsilon 7.97 at 1e-5


def drawn(z: float, rate: float, releases: int, members: int, seed: int) -> Floats:
    """What canaries of a Gaussian mechanism leave, each release N(1 / z, 1) where a member was drawn."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(members, releases)) + (rng.random((members, releases)) < rate) / z


def within(nominal: float, runs: int) -> int:
    """The most failures that a test of that level shows in so many runs, but once in a thousand times."""
    return int(stats.binom.isf(1e-3, runs, nominal))


@pytest.mark.parametrize(
    ("z", "rate", "releases", "members"),
    chosen([(*DEMO, 250), (1.0, 0.05, 20, 250), (1.5, 0.3, 20, 60)], [(1.5, 0.3, 20, 60)]),
)
def test_the_end_of_the_parametric_estimate_is_below_the_truth_as_often_as_said(
    z: float, rate: float, releases: int, members: int
) -> None:
    """Epsilon rises with mu, so that one end is below the other as the shifts are."""
    ends = [shift_of(drawn(z, rate, releases, members, seed), rate) for seed in range(100)]
    assert sum(low > 1 / z for low, _ in ends) <= within(0.05, len(ends))
    assert all(low <= likeliest for low, likeliest in ends)
    assert np.median([likeliest for _, likeliest in ends]) == pytest.approx(1 / z, rel=0.1)


def test_an_end_without_its_interval_would_be_above_the_truth_far_too_often() -> None:
    """The likeliest itself is, in half of all runs: what the test above catches."""
    z, rate, releases = DEMO
    likeliest = [shift_of(drawn(z, rate, releases, 250, seed), rate)[1] for seed in range(40)]
    assert sum(one > 1 / z for one in likeliest) > within(0.05, 40)


def test_the_most_likely_shift_is_that_of_a_grid() -> None:
    z, rate, releases = DEMO
    x = drawn(z, rate, releases, 100, 3)
    low, likeliest = shift_of(x, rate)
    grid = np.linspace(0.01, 5, 2000)
    heights = np.array([log_likelihood(x, mu, rate) for mu in grid])
    assert likeliest == pytest.approx(grid[heights.argmax()], abs=0.005)
    kept = grid[2 * (heights.max() - heights) <= stats.chi2.ppf(0.9, 1)]
    assert low == pytest.approx(kept[0], abs=0.005)


def test_of_the_null_nothing_is_estimated() -> None:
    ends = [shift_of(drawn(math.inf, 0.05, 20, 100, seed), 0.05)[0] for seed in range(50)]
    assert sum(low > 0 for low in ends) <= within(0.05, 50)
    wrong = sum(independent(np.random.default_rng(seed).random(250), 0.0) > 0 for seed in range(500))
    assert wrong <= within(0.05, 500)


def likelihood_tails(x: Floats, rate: float, mu: float, seed: int) -> Floats:
    def score(x: Floats) -> Floats:
        return np.log(1 - rate + rate * np.exp(mu * x - mu**2 / 2)).sum(1)

    null = np.sort(score(np.random.default_rng(seed).normal(size=(200_000, x.shape[1]))))
    found: Floats = (len(null) - np.searchsorted(null, score(x)) + 1) / (len(null) + 1)
    return found


def test_the_estimate_of_independent_canaries_stays_below_the_truth() -> None:
    z, rate, releases = DEMO
    truth = sampled_gaussian(*DEMO).epsilon(1e-5)
    x = drawn(z, rate, releases, 250 * 60, 5)
    found = [independent(tails, 1e-5) for tails in likelihood_tails(x, rate, 1 / z, 6).reshape(60, 250)]
    assert sum(one > truth for one in found) <= within(0.05, 60)
    assert 1.5 < np.median(found) < 3  # far more than the bound that supposes nothing, and far less than the truth


def test_golden_number_of_independent_canaries() -> None:
    """505 canaries, half of them members, counted at the one threshold that shows most: 2.6."""
    curve = sampled_gaussian(*DEMO)
    limits = []
    for fpr in np.geomspace(1e-5, 1e-1, 80):
        hits = 252.5 * curve.rate(float(fpr))
        limits.append(math.log(max((stats.beta.ppf(0.05, hits, 252.5 - hits + 1) - 1e-5) / fpr, 1e-9)))
    assert max(limits) == pytest.approx(2.6, abs=0.05)
    assert sum(SHARES.values()) == pytest.approx(1)


def test_clopper_and_pearson_at_the_thresholds_by_hand() -> None:
    tails = np.concatenate([np.full(30, 5e-4), np.full(170, 0.6)])
    expected = [
        math.log((stats.beta.ppf(0.05 * share, 30, 171) - 1e-5) / fpr) for fpr, share in SHARES.items() if fpr >= 1e-3
    ]
    assert independent(tails, 1e-5) == pytest.approx(max(expected))


def test_broken_noise_is_estimated_above_what_is_accounted_and_noise_that_holds_is_not() -> None:
    """A third of the noise that is due."""
    z, rate, releases = DEMO
    accounted = sampled_gaussian(*DEMO).epsilon(1e-5)
    members = np.ones(250, dtype=bool)
    for noise, broken in ((z, False), (z / 3, True)):
        x = drawn(noise, rate, releases, 250, 8)
        found = estimates(Null(likelihood_tails(x, rate, 1 / z, 9), x, rate), members, 1e-5)
        assert [one.name for one in found] == ["independent", "sampled_gaussian"]
        assert (found[1].epsilon > accounted) is broken
        assert found[1].point is not None
        assert found[1].point >= found[1].epsilon >= found[0].epsilon


@pytest.mark.nightly
def test_a_null_of_the_wrong_scale_moves_the_estimate() -> None:
    """Twice the coordinates: every number 1.4 times too large. Held-out units give that away (`test_null`), so none is made."""
    z, rate, releases = DEMO
    accounted = sampled_gaussian(*DEMO).epsilon(1e-5)
    x = drawn(z, rate, releases, 250, 10)
    low, _ = shift_of(x * math.sqrt(2), rate)
    assert sampled_gaussian(1 / low, rate, releases).epsilon(1e-5) > accounted


def test_without_delta_or_members_nothing_is_estimated() -> None:
    x = drawn(*DEMO, 10, 0)
    null = Null(np.full(10, 0.5), x, 0.05)
    assert estimates(null, np.ones(10, dtype=bool), 0.0) == []
    assert estimates(null, np.zeros(10, dtype=bool), 1e-5) == []
    assert [one.name for one in estimates(Null(np.full(10, 0.5)), np.ones(10, dtype=bool), 1e-5)] == ["independent"]
