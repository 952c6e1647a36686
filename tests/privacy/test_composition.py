"""The best of a random number of tries, and guarantees for groups: against laws by enumeration, closed forms, dp_accounting."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import dp_event, get_epsilon_gaussian
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import geom, logser, norm, poisson

from privacy import accounting, composition
from privacy.composition import LAWS, ORDERS, Law, group_epsilon, group_epsilon_by_curve, largest, of_plan, together
from privacy.correlation import square_root
from privacy.errors import PlanError
from privacy.participation import Poisson, PublicOrder
from privacy.plan import Plan, Target, for_contributions, for_gradients, for_shares, for_sums, for_turns
from tests.cells import every

DELTAS = (1e-3, 1e-5, 1e-9)
ORDER = PublicOrder(60, 20)
TARGET = Target(None, 2.0, 1e-5)
Pmf = NDArray[np.float64]
MOST = 1500  # more tries than this have a probability below 1e-9 in every law here


def number_of_tries(law: Law, mean: float) -> Pmf:
    """P(K = k) for k = 0, 1, ..., by scipy's laws, whose parameters are independent of the module's."""
    counts = np.arange(MOST)
    if law == "poisson":
        return np.asarray(poisson.pmf(counts, mean))
    if law == "geometric":
        return np.asarray(geom.pmf(counts, 1 / mean))
    return np.asarray(logser.pmf(counts, 1 - log_law(mean)))


def log_law(mean: float) -> float:
    """gamma of the logarithmic law with this mean."""
    return float(brentq(lambda gamma: logser.mean(1 - gamma) - mean, 1e-4, 1 - 1e-6))


def best_of(law: Pmf, tries: Pmf) -> Pmf:
    """The probability of each output, in the order of scores, to be the best of K tries; last, of publishing nothing."""
    below = np.concatenate(([0.0], np.cumsum(law)))
    at_most = np.array([float((tries * value ** np.arange(len(tries))).sum()) for value in below])
    return np.append(np.diff(at_most), tries[0])


def divergence(one: Pmf, other: Pmf, order: float) -> float:
    """The larger of the Renyi divergences in both directions."""

    def way(p: Pmf, q: Pmf) -> float:
        there = (p > 0) & (q > 0)
        logs = order * np.log(p[there]) - (order - 1) * np.log(q[there])
        return float(np.logaddexp.reduce(logs)) / (order - 1)

    return max(way(one, other), way(other, one))


def neighbours(kind: str) -> tuple[Pmf, Pmf]:
    """The laws of one try on two neighbouring data sets, over outputs in the order of their scores."""
    if kind == "rare best":  # the best output is rare, and e times as likely on one side
        return np.array([0.99, 0.01]), np.array([1 - 0.01 * math.e, 0.01 * math.e])
    if kind == "response":  # randomized response: pure epsilon 1
        low, high = 1 / (1 + math.e), math.e / (1 + math.e)
        return np.array([low, high]), np.array([high, low])
    grid = np.arange(-40, 41) / 8  # a Gaussian of multiplier 1, on a grid
    one, other = np.exp(-(grid**2) / 2), np.exp(-((grid - 1) ** 2) / 2)
    return one / one.sum(), other / other.sum()


@pytest.mark.parametrize("kind", ["rare best", "response", "gaussian"])
@pytest.mark.parametrize("law", LAWS)
def test_the_best_of_a_random_number_of_tries_is_below_the_bound(law: Law, kind: str) -> None:
    one, other = neighbours(kind)
    base = {order: divergence(one, other, order) for order in ORDERS}
    for mean in (1.5, 4.0, 20.0):
        tries = number_of_tries(law, mean)
        assert tries @ np.arange(MOST) == pytest.approx(mean, rel=2e-3)
        ours, theirs = best_of(one, tries), best_of(other, tries)
        bound = composition.of_best(law, mean, base)
        for order in ORDERS:
            assert divergence(ours, theirs, order) <= bound[order] * (1 + 1e-9)


@pytest.mark.parametrize(("law", "shape"), [("logarithmic", 0), ("geometric", 1), ("poisson", math.inf)])
def test_epsilon_is_that_of_dp_accounting_for_an_event_it_knows(law: Law, shape: float) -> None:
    for mean, z in ((1.5, 0.6), (10.0, 1.0), (100.0, 5.0)):
        event = dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(z), mean, shape)
        theirs = RdpAccountant(list(ORDERS)).compose(event).get_epsilon(1e-5)
        base = {order: order / (2 * z**2) for order in ORDERS}
        assert composition.epsilon(composition.of_best(law, mean, base), 1e-5) == pytest.approx(theirs, rel=1e-6)


def test_no_more_than_common_orders_are_composed() -> None:
    runs = [{2.0: 1.0, 3.0: 1.5}, {3.0: 2.0, 4.0: 9.0}]
    assert together(runs) == {3.0: 3.5}
    assert largest(runs) == {3.0: 2.0}
    assert together([{2.0: 1.0}, {}]) == {}


def test_a_plan_states_divergences_that_grow_with_the_order_and_leaves_out_what_nobody_knows() -> None:
    plan = for_sums(Target(None, 0.8, 1e-5), Poisson(100, 0.25), 20)
    found = of_plan(plan, 20)
    assert list(found) == list(ORDERS)
    assert list(found.values()) == sorted(found.values())
    exact = accounting.rdp(plan.release, 20, ORDERS)
    assert all(ours <= theirs for ours, theirs in zip(found.values(), exact, strict=True))
    assert found[8.0] == exact[ORDERS.index(8.0)]
    unknown = accounting.Release(dp_event.DiscreteLaplaceDpEvent(2.0, 1), "add-remove")
    assert of_plan(replace(plan, release=unknown), 20) == {}, "dp_accounting has its PLD alone"


def test_of_tries_without_divergences_nothing_is_promised() -> None:
    assert composition.epsilon(composition.of_best("geometric", 5.0, {}), 1e-5) == math.inf


@every("mean", [1.0, 0.0, -2.0, math.inf, math.nan])
def test_a_mean_that_is_none_is_refused(mean: float) -> None:
    with pytest.raises(PlanError):
        composition.of_best("geometric", mean, {2.0: 1.0})


def delta_of(mu: float, epsilon: float) -> float:
    """The delta of an exact Gaussian of this mu: corollary 2.13 of Dong, Roth and Su."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize(
    ("plan", "mu"),
    [
        (for_turns(TARGET, ORDER, 9), math.sqrt(3) / 2),
        (for_turns(TARGET, ORDER, 9, passes=2), math.sqrt(6) / 2),
        (for_turns(TARGET, ORDER, 9, shares=True), math.sqrt(3) / 2),
        (for_turns(TARGET, ORDER, 9, correlation=square_root(3)), math.sqrt(3) / 2),
        (for_sums(TARGET, Poisson(20, 1.0), 9), 3 / 2),
        (for_contributions(TARGET, 0.1, ["a"], 1, 4), 2 * 2 / 2),  # replaced: twice as far
        (for_gradients(TARGET, ["a", "b"], [Poisson(9, 1.0)] * 2, [2, 3], 2), math.sqrt(6) / 2),  # of the worst client
    ],
    ids=["turns", "passes", "shares", "banded", "everybody", "local", "steps"],
)
def test_an_exact_gaussian_is_one_at_every_delta(plan: Plan, mu: float) -> None:
    assert plan.gaussian() == pytest.approx(mu)
    with pytest.raises(PlanError):
        plan.epsilon(-1)
    for delta, epsilon in plan.curve(DELTAS):
        assert delta_of(mu, epsilon) == pytest.approx(delta, rel=1e-6)


def test_an_early_end_costs_the_rounds_that_were_made() -> None:
    plan = for_turns(TARGET, ORDER, 9)
    assert plan.gaussian(3) == pytest.approx(1 / 2)
    assert plan.sensitivity(4) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    "plan",
    [for_sums(TARGET, Poisson(20, 0.1), 4), for_shares(TARGET, Poisson(20, 0.1), 4, hidden=True)],
    ids=["central", "shares"],
)
def test_what_is_no_exact_gaussian_has_no_mu(plan: Plan) -> None:
    assert plan.gaussian() is None
    curve = plan.curve((1e-3, 1e-5, 1e-30))
    assert dict(curve)[1e-5] == plan.epsilon()
    assert curve[0][1] < curve[1][1]


def test_a_group_of_an_exact_gaussian_moves_it_so_many_times_as_far() -> None:
    assert group_epsilon(0.5, 5, 1e-5) == get_epsilon_gaussian(1 / 2.5, 1e-5)
    assert group_epsilon(0.0, 5, 1e-5) == 0.0


def test_a_group_by_epsilon_and_delta_alone() -> None:
    """Two members at (1, 1e-8) have (2, 1e-8 (1 + e)). This bound exceeds the exact epsilon of a Gaussian."""
    assert group_epsilon_by_curve([(1e-8, 1.0)], 2, 1e-8 * (1 + math.e) * (1 + 1e-12)) == 2.0
    assert group_epsilon_by_curve([(1e-8, 1.0)], 2, 1e-8 * (1 + math.e) * (1 - 1e-12)) is None
    assert group_epsilon_by_curve([(1e-5, 700.0)], 5, 1e-5) is None
    curve = for_sums(Target(None, 8.0, 1e-5), Poisson(20, 1.0), 4).curve(DELTAS)
    found = group_epsilon_by_curve(curve, 2, 1e-5)
    assert found is not None
    assert found > group_epsilon(math.sqrt(4) / 8, 2, 1e-5)


def test_the_smallest_epsilons_are_planned_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = for_turns(Target(1e-4, None, 1e-5), ORDER, 20)
    assert 0.9e-4 < plan.cost().epsilon <= 1e-4
