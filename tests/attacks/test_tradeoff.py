"""The figures that a guarantee allows, compared with the accountant, closed forms, and simulations.

The bound expected from the best attack, compared with simulated attacks on Gaussian noise.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from attacks.evidence.bounds import lower_bound
from attacks.evidence.tradeoff import Gaussian, allowed, area, drawn, expected, rate, same_epsilon, sampled_gaussian
from privacy import accounting
from tests.cells import chosen

SAMPLED = {"noise_multiplier": 0.5583, "sampling_rate": 0.05, "releases": 20, "delta": 1e-5}


@pytest.mark.parametrize(("z", "q", "count"), [(0.5583, 0.05, 20), (1.0, 1.0, 5), (2.0, 0.3, 40), (1.2, 0.02, 300)])
def test_its_epsilon_is_the_accountants(z: float, q: float, count: int) -> None:
    expected = accounting.epsilon(accounting.poisson_sampled(q, z), count, 1e-5, discretization=accounting.COARSE)
    assert sampled_gaussian(z, q, count).epsilon(1e-5) == pytest.approx(expected, rel=1e-2)


def test_golden_numbers_of_a_gaussian_over_poisson_samples() -> None:
    """Noise .5583 over samples of rate .05, in 20 rounds: the example of docs/audit.md."""
    curve = sampled_gaussian(0.5583, 0.05, 20)
    assert curve.epsilon(1e-5) == pytest.approx(7.97, abs=0.01)
    assert curve.area == pytest.approx(0.66, abs=0.005)


@pytest.mark.parametrize(("z", "delta"), [(0.5583, 1e-5), (0.05, 1e-9), (2.0, 0.1), (0.5583, 0.9)])
def test_its_epsilon_is_where_the_mean_falls_to_delta(z: float, delta: float) -> None:
    curve = sampled_gaussian(z, 0.05, 2)

    def excess(epsilon: float) -> float:
        both = ((curve.losses, curve.inside), (-curve.losses, curve.outside))
        return max(float(np.sum(law * np.maximum(0, -np.expm1(np.minimum(epsilon - x, 0))))) for x, law in both)

    found = curve.epsilon(delta)
    assert excess(found) <= delta * (1 + 1e-9)
    assert found == 0 or excess(found * (1 - 1e-6)) > delta


def test_where_everybody_takes_part_it_is_the_gaussian_curve() -> None:
    curve, mu = sampled_gaussian(2.0, 1.0, 4), math.sqrt(4) / 2.0
    assert curve.area == pytest.approx(stats.norm.cdf(mu / math.sqrt(2)), abs=1e-4)
    for fpr in (0.001, 0.01, 0.3):
        assert curve.rate(fpr) == pytest.approx(stats.norm.cdf(stats.norm.ppf(fpr) + mu), abs=1e-3)


def test_the_sampled_curve_is_that_of_draws() -> None:
    rng, mu, q = np.random.default_rng(0), 1.5, 0.2

    def losses(x: np.ndarray) -> np.ndarray:
        return np.log(1 - q + q * np.exp(mu * x - mu**2 / 2)).sum(1)

    outs = losses(rng.normal(size=(40_000, 6)))
    ins = losses(rng.normal(size=(40_000, 6)) + mu * (rng.random((40_000, 6)) < q))
    curve = sampled_gaussian(1 / mu, q, 6)
    assert curve.area == pytest.approx(stats.mannwhitneyu(ins, outs).statistic / 40_000**2, abs=0.006)
    assert curve.rate(0.05) == pytest.approx((ins > np.quantile(outs, 0.95)).mean(), abs=0.01)


@pytest.mark.parametrize(
    ("epsilon", "delta"), chosen([(0.0, 0.0), (0.5, 0.0), (1.0, 0.1), (7.97, 1e-5)], [(1.0, 0.1), (7.97, 1e-5)])
)
def test_the_area_of_epsilon_and_delta_is_the_integral_of_its_rates(epsilon: float, delta: float) -> None:
    fpr = np.linspace(0, 1, 40_001)
    assert area(epsilon, delta) == pytest.approx(
        np.trapezoid([rate(one, epsilon, delta) for one in fpr], fpr), abs=1e-4
    )
    if not delta:
        assert area(epsilon, 0.0) == pytest.approx(math.exp(epsilon) / (1 + math.exp(epsilon)))  # randomised response


def test_the_mechanisms_curve_is_taken_only_if_the_accounted_epsilon_is_its_own() -> None:
    own = allowed(SAMPLED, 7.966)
    assert own.by == "mechanism"
    assert own.auc == pytest.approx(0.66, abs=0.005)
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


MEMBERS = np.arange(500) < 250


def by_hand(mu: float, delta: float) -> float:
    """The median over audits where members score N(mu, 1) and others N(0, 1)."""
    rng = np.random.default_rng(1)
    bounds = [lower_bound(rng.normal(size=500) + mu * MEMBERS, MEMBERS, delta, 0.05).epsilon or 0.0 for _ in range(40)]
    return float(np.median(bounds))


@pytest.mark.parametrize("mu", [1.0, 2.5])
def test_it_is_what_the_best_attack_shows_of_a_gaussian(mu: float) -> None:
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
        tails = -drawn(curve, many, rng)
        for fpr in (0.001, 0.01, 0.1, 0.5):
            assert np.mean(tails[~many] <= fpr) == pytest.approx(fpr, abs=4 * (fpr / 20_000) ** 0.5)
            caught = curve.rate(fpr)
            assert np.mean(tails[many] <= fpr) == pytest.approx(caught, abs=4 * (caught / 20_000) ** 0.5)


def test_the_gaussian_of_an_epsilon_has_it() -> None:
    assert same_epsilon(7.99, 1e-5).epsilon(1e-5) == pytest.approx(7.99, abs=1e-3)


def test_a_mechanism_that_gives_nothing_away_is_expected_to_show_nothing() -> None:
    result = {"delta": 1e-5, "privacy": {"gaussian_mu": 0.01}}
    assert expected(result, Gaussian(0.01).epsilon(1e-5), MEMBERS, 0.05).epsilon_lower == 0.0
