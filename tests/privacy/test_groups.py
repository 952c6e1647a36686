"""Guarantees at other deltas and for groups of members, against closed forms."""

from __future__ import annotations

import math
import warnings

import pytest
from dp_accounting import get_epsilon_gaussian
from scipy.stats import norm

from privacy.composition import group_epsilon, group_epsilon_by_curve
from privacy.correlation import square_root
from privacy.plan import Plan, Target, for_contributions, for_shares, for_sums, for_turns
from privacy.sampling import Poisson, PublicOrder

DELTAS = (1e-3, 1e-5, 1e-9)
ORDER = PublicOrder(60, 20)
TARGET = Target(None, 2.0, 1e-5)


def delta_of(mu: float, epsilon: float) -> float:
    """The delta of an exact Gaussian of this mu: corollary 2.13 of Dong, Roth and Su."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize(
    ("plan", "mu"),
    [
        (for_turns(TARGET, ORDER, 9), math.sqrt(3) / 2),
        (for_turns(TARGET, ORDER, 9, passes=2), math.sqrt(6) / 2),
        (for_turns(TARGET, ORDER, 9, correlation=square_root(3)), math.sqrt(3) / 2),
        (for_sums(TARGET, Poisson(20, 1.0), 9), 3 / 2),
        (for_contributions(TARGET, 0.1, ["a"], 1, 4), 2 * 2 / 2),  # replaced: twice as far
    ],
    ids=["turns", "passes", "banded", "everybody", "local"],
)
def test_an_exact_gaussian_is_one_at_every_delta(plan: Plan, mu: float) -> None:
    assert plan.gaussian() == pytest.approx(mu)
    for delta, epsilon in plan.curve(DELTAS):
        assert delta_of(mu, epsilon) == pytest.approx(delta, rel=1e-6)


def test_an_early_end_costs_the_rounds_that_were_made() -> None:
    plan = for_turns(TARGET, ORDER, 9)
    assert plan.gaussian(3) == pytest.approx(1 / 2)
    assert plan.sensitivity(4) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    "plan", [for_sums(TARGET, Poisson(20, 0.1), 4), for_turns(TARGET, ORDER, 9, shares=True)], ids=["coins", "shares"]
)
def test_what_is_no_exact_gaussian_has_no_mu(plan: Plan) -> None:
    assert plan.gaussian() is None
    curve = plan.curve((1e-3, 1e-5, 1e-30))
    assert dict(curve)[1e-5] == plan.epsilon()
    assert curve[0][1] < curve[1][1]


def test_a_delta_that_the_accountant_cannot_resolve_is_left_out() -> None:
    assert [delta for delta, _ in for_sums(TARGET, Poisson(20, 0.1), 4).curve((1e-5, 1e-30))] == [1e-5]


def test_a_group_of_an_exact_gaussian_moves_it_so_many_times_as_far() -> None:
    assert group_epsilon(0.5, 5, 1e-5) == get_epsilon_gaussian(1 / 2.5, 1e-5)
    assert group_epsilon(0.0, 5, 1e-5) == 0.0


def test_a_group_by_epsilon_and_delta_alone() -> None:
    """Two members at (1, 1e-8) have (2, 1e-8 (1 + e)). This bound exceeds the exact epsilon of a Gaussian."""
    assert group_epsilon_by_curve([(1e-8, 1.0)], 2, 1e-8 * (1 + math.e) * (1 + 1e-12)) == 2.0
    assert group_epsilon_by_curve([(1e-8, 1.0)], 2, 1e-8 * (1 + math.e) * (1 - 1e-12)) is None
    assert group_epsilon_by_curve([(1e-5, 700.0)], 5, 1e-5) is None
    curve = for_shares(Target(None, 8.0, 1e-5), Poisson(20, 0.1), 4, hidden=False).curve(DELTAS)
    found = group_epsilon_by_curve(curve, 2, 1e-5)
    assert found is not None
    assert found > group_epsilon(math.sqrt(4) / 8, 2, 1e-5)


def test_the_smallest_epsilons_are_planned_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = for_turns(Target(1e-4, None, 1e-5), ORDER, 20)
    assert 0.9e-4 < plan.cost().epsilon <= 1e-4
