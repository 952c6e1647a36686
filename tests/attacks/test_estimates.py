"""Estimates of epsilon from canaries, and what a guarantee allows: right for mechanisms of known epsilon, sharp, and high where
the noise is broken.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from attacks.adversary.null import Null
from attacks.evidence import tradeoff
from attacks.evidence.bounds import lower_bound
from attacks.evidence.figures import SHARES, estimates, independent, log_likelihood, shift_of
from attacks.evidence.tradeoff import Gaussian, allowed, area, expected, rate, same_epsilon, sampled_gaussian
from privacy import accounting
from tests.attacks.test_bounds import within
from tests.cells import every

Floats = NDArray[np.float64]
DEMO = (0.5583, 0.05, 20)  # noise multiplier, rate, releases: epsilon 7.97 at 1e-5


def drawn(z: float, rate: float, releases: int, members: int, seed: int) -> Floats:
    """What canaries of a Gaussian mechanism leave, each release N(1 / z, 1) where a member was drawn."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(members, releases)) + (rng.random((members, releases)) < rate) / z


def test_the_parametric_estimate_is_below_the_truth() -> None:
    """Epsilon rises with mu, so that one end is below the other as the shifts are."""
    z, rate, releases, members = 1.5, 0.3, 20, 60
    ends = [shift_of(drawn(z, rate, releases, members, seed), rate) for seed in range(100)]
    assert sum(low > 1 / z for low, _ in ends) <= within(0.05, len(ends))
    assert all(low <= likeliest for low, likeliest in ends)
    assert np.median([likeliest for _, likeliest in ends]) == pytest.approx(1 / z, rel=0.1)


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
    wrong = sum(independent(np.random.default_rng(seed).random(250), 0.0) > 0 for seed in range(200))
    assert wrong <= within(0.05, 200)


def likelihood_tails(x: Floats, rate: float, mu: float, seed: int) -> Floats:
    def score(x: Floats) -> Floats:
        return np.log(1 - rate + rate * np.exp(mu * x - mu**2 / 2)).sum(1)

    null = np.sort(score(np.random.default_rng(seed).normal(size=(20_000, x.shape[1]))))
    found: Floats = (len(null) - np.searchsorted(null, score(x)) + 1) / (len(null) + 1)
    return found


def test_the_estimate_of_independent_canaries_stays_below_the_truth() -> None:
    """It is Clopper's and Pearson's at fixed thresholds, by hand."""
    z, rate, releases = DEMO
    truth = sampled_gaussian(*DEMO).epsilon(1e-5)
    x = drawn(z, rate, releases, 250 * 60, 5)
    found = [independent(tails, 1e-5) for tails in likelihood_tails(x, rate, 1 / z, 6).reshape(60, 250)]
    assert sum(one > truth for one in found) <= within(0.05, 60)
    assert 1.5 < np.median(found) < 3  # far more than the bound that supposes nothing, and far less than the truth
    tails = np.concatenate([np.full(30, 5e-4), np.full(170, 0.6)])
    expected = [
        math.log((stats.beta.ppf(0.05 * share, 30, 171) - 1e-5) / fpr) for fpr, share in SHARES.items() if fpr >= 1e-3
    ]
    assert independent(tails, 1e-5) == pytest.approx(max(expected))
    assert sum(SHARES.values()) == pytest.approx(1)


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


def test_without_delta_or_members_nothing_is_estimated() -> None:
    x = drawn(*DEMO, 10, 0)
    null = Null(np.full(10, 0.5), x, 0.05)
    assert estimates(null, np.ones(10, dtype=bool), 0.0) == []
    assert estimates(null, np.zeros(10, dtype=bool), 1e-5) == []
    assert [one.name for one in estimates(Null(np.full(10, 0.5)), np.ones(10, dtype=bool), 1e-5)] == ["independent"]


# The figures that a guarantee allows, and the bound expected from the best attack.


SAMPLED = {"noise_multiplier": 0.5583, "sampling_rate": 0.05, "releases": 20, "delta": 1e-5}


@every(("z", "q", "count"), [(0.5583, 0.05, 20), (1.0, 1.0, 5), (2.0, 0.3, 40)])
def test_its_epsilon_is_the_accountants(z: float, q: float, count: int) -> None:
    expected = accounting.epsilon(accounting.poisson_sampled(q, z), count, 1e-5, discretization=accounting.COARSE)
    assert sampled_gaussian(z, q, count).epsilon(1e-5) == pytest.approx(expected, rel=1e-2)
    assert same_epsilon(expected, 1e-5).epsilon(1e-5) == pytest.approx(expected, abs=1e-3)


@every(("z", "delta"), [(0.5583, 1e-5), (0.05, 1e-9), (2.0, 0.1), (0.5583, 0.9)])
def test_its_epsilon_is_where_the_mean_falls_to_delta(z: float, delta: float) -> None:
    curve = sampled_gaussian(z, 0.05, 2)

    def excess(epsilon: float) -> float:
        both = ((curve.losses, curve.inside), (-curve.losses, curve.outside))
        return max(float(np.sum(law * np.maximum(0, -np.expm1(np.minimum(epsilon - x, 0))))) for x, law in both)

    found = curve.epsilon(delta)
    assert excess(found) <= delta * (1 + 1e-9)
    assert found == 0 or excess(found * (1 - 1e-6)) > delta


def test_the_sampled_curve_is_that_of_draws() -> None:
    rng, mu, q = np.random.default_rng(0), 1.5, 0.2

    def losses(x: np.ndarray) -> np.ndarray:
        return np.log(1 - q + q * np.exp(mu * x - mu**2 / 2)).sum(1)

    outs = losses(rng.normal(size=(40_000, 6)))
    ins = losses(rng.normal(size=(40_000, 6)) + mu * (rng.random((40_000, 6)) < q))
    curve = sampled_gaussian(1 / mu, q, 6)
    assert curve.area == pytest.approx(stats.mannwhitneyu(ins, outs).statistic / 40_000**2, abs=0.006)
    assert curve.rate(0.05) == pytest.approx((ins > np.quantile(outs, 0.95)).mean(), abs=0.01)


@every(("epsilon", "delta"), [(0.5, 0.0), (1.0, 0.1), (7.97, 1e-5)])
def test_the_area_of_epsilon_and_delta_is_the_integral_of_its_rates(epsilon: float, delta: float) -> None:
    fpr = np.linspace(0, 1, 40_001)
    assert area(epsilon, delta) == pytest.approx(
        np.trapezoid([rate(one, epsilon, delta) for one in fpr], fpr), abs=1e-4
    )
    if not delta:
        assert area(epsilon, 0.0) == pytest.approx(math.exp(epsilon) / (1 + math.exp(epsilon)))  # randomised response


def test_the_mechanisms_curve_is_taken_only_if_the_accounted_epsilon_is_its_own() -> None:
    """In the example of docs/audit.md."""
    curve, own = sampled_gaussian(0.5583, 0.05, 20), allowed(SAMPLED, 7.966)
    assert curve.epsilon(1e-5) == pytest.approx(7.97, abs=0.01)
    assert own.by == "mechanism"
    assert own.auc == curve.area == pytest.approx(0.66, abs=0.005)
    assert own.tpr_at_fpr[0.01] == pytest.approx(0.088, abs=0.001)
    for other in (allowed(SAMPLED, 5.0), allowed({**SAMPLED, "noise_multiplier": None}, 7.966)):
        assert other.by == "epsilon"
    assert allowed(SAMPLED, 65.0).auc == pytest.approx(1.0)


def test_one_gaussian_for_the_whole_run_allows_what_its_mu_says_and_not_what_coins_would() -> None:
    """A run in a public order: its sampling rate and number of rounds would be those of coins, at an epsilon of their own."""
    mu, said = 1 / 0.6, {**SAMPLED, "noise_multiplier": 0.6, "privacy": {"gaussian_mu": 1 / 0.6}}
    epsilon = accounting.epsilon(accounting.unamplified(0.6), 1, 1e-5)
    assert Gaussian(mu).epsilon(1e-5) == pytest.approx(epsilon)
    own = allowed(said, epsilon)
    assert own.by == "mechanism"
    assert own.auc == pytest.approx(stats.norm.cdf(mu / math.sqrt(2)))
    assert own.tpr_at_fpr[0.01] == pytest.approx(stats.norm.sf(stats.norm.isf(0.01) - mu))
    assert own.auc == pytest.approx(sampled_gaussian(0.6, 1.0, 1).area, abs=1e-3)
    assert allowed(said, 5.0).by == "epsilon"
    loose = allowed(said, 1.1 * epsilon)  # accounted by divergences, as noise shares are
    assert (loose.by, loose.auc) == ("mechanism", own.auc)


MEMBERS = np.arange(500) < 250


def by_hand(mu: float, delta: float) -> float:
    """The median over audits where members score N(mu, 1) and others N(0, 1)."""
    rng = np.random.default_rng(1)
    bounds = [lower_bound(rng.normal(size=500) + mu * MEMBERS, MEMBERS, delta, 0.05).epsilon or 0.0 for _ in range(20)]
    return float(np.median(bounds))


def test_it_is_what_the_best_attack_shows_of_a_gaussian() -> None:
    mu = 2.5
    accounted = Gaussian(mu).epsilon(1e-5)
    for result in (
        {"delta": 1e-5, "privacy": {"gaussian_mu": mu}},
        {"delta": 1e-5, "privacy": {"mechanism": "shares"}},
    ):
        found = expected(result, accounted, MEMBERS, 0.05)
        assert found.epsilon_lower == pytest.approx(by_hand(mu, 1e-5), abs=0.25)
        assert found.by == ("mechanism" if "gaussian_mu" in result["privacy"] else "Gaussian of the same epsilon")


def test_members_have_the_rates_that_the_curve_allows() -> None:
    rng, many = np.random.default_rng(0), np.arange(40_000) < 20_000
    for curve in (Gaussian(1.5), sampled_gaussian(0.6, 0.05, 20)):
        tails = -tradeoff.drawn(curve, many, rng)
        for fpr in (0.001, 0.01, 0.1, 0.5):
            assert np.mean(tails[~many] <= fpr) == pytest.approx(fpr, abs=4 * (fpr / 20_000) ** 0.5)
            caught = curve.rate(fpr)
            assert np.mean(tails[many] <= fpr) == pytest.approx(caught, abs=4 * (caught / 20_000) ** 0.5)
