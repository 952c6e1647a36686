"""The bound expected from the best attack, compared with simulated attacks on Gaussian noise."""

from __future__ import annotations

import numpy as np
import pytest

from attacks.evidence.bounds import lower_bound
from attacks.evidence.tradeoff import Gaussian, drawn, expected, same_epsilon, sampled_gaussian

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
        assert found["epsilon_lower"] == pytest.approx(by_hand(mu, 1e-5), abs=0.25)
        assert found["by"] == ("mechanism" if "gaussian_mu" in result["privacy"] else "Gaussian of the same epsilon")


def test_members_have_the_rates_that_the_curve_allows() -> None:
    rng, many = np.random.default_rng(0), np.arange(40_000) < 20_000
    for curve in (Gaussian(1.5), sampled_gaussian(0.6, 0.05, 20)):
        tails = -drawn(curve, many, rng)
        for rate in (0.001, 0.01, 0.1, 0.5):
            assert np.mean(tails[~many] <= rate) == pytest.approx(rate, abs=4 * (rate / 20_000) ** 0.5)
            caught = curve.rate(rate)
            assert np.mean(tails[many] <= rate) == pytest.approx(caught, abs=4 * (caught / 20_000) ** 0.5)


def test_the_gaussian_of_an_epsilon_has_it() -> None:
    assert same_epsilon(7.99, 1e-5).epsilon(1e-5) == pytest.approx(7.99, abs=1e-3)


def test_a_mechanism_that_gives_nothing_away_is_expected_to_show_nothing() -> None:
    result = {"delta": 1e-5, "privacy": {"gaussian_mu": 0.01}}
    assert expected(result, Gaussian(0.01).epsilon(1e-5), MEMBERS, 0.05)["epsilon_lower"] == 0.0
