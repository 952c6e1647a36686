"""The figures that a guarantee allows, compared with the accountant, closed forms, and simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from attacks.evidence.tradeoff import Gaussian, allowed, area, rate, sampled_gaussian
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
    assert own["by"] == "mechanism"
    assert own["auc"] == pytest.approx(0.66, abs=0.005)
    assert own["tpr_at_fpr"]["0.01"] == pytest.approx(0.088, abs=0.001)
    for other in (allowed(SAMPLED, 5.0), allowed({**SAMPLED, "noise_multiplier": None}, 7.966)):
        assert other["by"] == "epsilon"
    assert allowed(SAMPLED, 65.0)["auc"] == pytest.approx(1.0)


def test_one_gaussian_for_the_whole_run_allows_what_its_mu_says_and_not_what_coins_would() -> None:
    """A run in a public order: its sampling rate and number of rounds would be those of coins, at an epsilon of their own."""
    mu, said = 1 / 0.6, {**SAMPLED, "noise_multiplier": 0.6, "privacy": {"gaussian_mu": 1 / 0.6}}
    epsilon = accounting.epsilon(accounting.unamplified(0.6), 1, 1e-5)
    assert Gaussian(mu).epsilon(1e-5) == pytest.approx(epsilon)
    own = allowed(said, epsilon)
    assert own["by"] == "mechanism"
    assert own["auc"] == pytest.approx(stats.norm.cdf(mu / math.sqrt(2)))
    assert own["tpr_at_fpr"]["0.01"] == pytest.approx(stats.norm.sf(stats.norm.isf(0.01) - mu))
    assert own["auc"] == pytest.approx(sampled_gaussian(0.6, 1.0, 1).area, abs=1e-3)
    assert allowed(said, 5.0)["by"] == "epsilon"
