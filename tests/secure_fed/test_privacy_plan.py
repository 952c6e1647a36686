"""The releases that a run may make: against naive counts for each client."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scipy.stats import binom

from privacy import accounting
from privacy.errors import BudgetExhausted
from privacy.filters import Cost
from privacy.plan import Target, for_contributions, for_gradients, for_sums, usual_participations
from privacy.sampling_and_turns import FixedSize, Poisson
from tests.golden import refused

DELTA = 1e-5
UNITS = (8, 40, 300)  # each client's examples; Poisson batches of 8, one epoch a round
NAMES = [f"site-{units}" for units in UNITS]
DRAWS = [Poisson(units, min(1.0, 8 / units)) for units in UNITS]
STEPS = [-(-units // 8) for units in UNITS]


def each(z: float, counts: Sequence[int]) -> list[float]:
    """Each client's epsilon, computed one by one."""
    return [accounting.epsilon(draw.release(z), count, DELTA) for draw, count in zip(DRAWS, counts, strict=True)]


# The federation as a whole.


def test_a_sum_is_calibrated_to_just_below_the_target() -> None:
    sampler = Poisson(100, 0.1)
    plan = for_sums(Target(3.0, None, DELTA), sampler, 20)
    z = plan.noise_multiplier
    assert 0.99 * 3 < plan.epsilon() <= 3
    assert plan.epsilon() == accounting.epsilon(sampler.release(z), 20, DELTA)
    assert plan.epsilon_participants() == accounting.epsilon(accounting.unamplified(z), 20, DELTA) > 3
    assert (plan.releases, plan.limits, plan.limit(""), plan.participations) == (20, {}, 20, None)
    assert plan.cost() == Cost(plan.epsilon(), DELTA)
    assert plan.epsilon(21) > plan.epsilon(20) > plan.epsilon(19)


def test_a_cost_has_what_the_ledger_adds_up() -> None:
    plan = for_sums(Target(None, 2.0, DELTA), Poisson(3, 1.0), 4)
    assert plan.cost(orders=(8.0,)).rdp == pytest.approx((4 * 8 / (2 * 2.0**2),))
    assert plan.cost(2, (8.0,)).rdp == pytest.approx((2 * 8 / (2 * 2.0**2),))
    assert (plan.cost(0).epsilon, plan.cost(0).delta) == (0.0, 0.0)


def test_fixed_cohorts_have_a_neighbour_replaced_for_participants_too() -> None:
    plan = for_sums(Target(None, 2.0, DELTA), FixedSize(10, 2), 4)
    assert plan.release.adjacency == plan.seen.adjacency == "replace-one"
    assert plan.epsilon_participants() == accounting.epsilon(accounting.replaced(2.0), 4, DELTA) >= plan.epsilon()


# A limit beside the noise.


def test_a_noise_multiplier_alone_has_no_limit_and_beside_it_epsilon_is_one() -> None:
    everybody = Poisson(3, 1.0)
    alone = for_sums(Target(None, 0.5, DELTA), everybody, 50)
    assert (alone.noise_multiplier, alone.releases) == (0.5, 50)
    assert alone.epsilon() > 50
    assert for_sums(Target(100.0, 2.0, DELTA), everybody, 5).releases == 5
    with refused(BudgetExhausted, hide=r"epsilon \d\S+"):
        for_sums(Target(3.0, 2.0, DELTA), everybody, 5)
    stopped = for_sums(Target(3.0, 2.0, DELTA, stop_early=True), everybody, 5)
    assert 0 < stopped.releases < 5
    assert stopped.epsilon() <= 3 < stopped.epsilon(stopped.releases + 1)


# Each client by itself.


def test_local_noise_is_counted_with_a_client_replaced() -> None:
    plan = for_contributions(Target(4.0, None, DELTA), 0.3, NAMES, passes=2, participations=3)
    assert 0.99 * 4 < plan.epsilon() <= 4
    assert plan.epsilon() == plan.epsilon_participants()
    assert plan.release == accounting.replaced(plan.noise_multiplier)
    assert plan.limits == dict.fromkeys(NAMES, 6)
    assert plan.participations == 3


def test_gradients_are_calibrated_for_the_client_who_fares_worst() -> None:
    plan = for_gradients(Target(3.0, None, DELTA), NAMES, DRAWS, STEPS, participations=4)
    planned = [4 * steps for steps in STEPS]
    epsilons = each(plan.noise_multiplier, planned)
    assert plan.limits == dict(zip(NAMES, planned, strict=True))
    assert plan.epsilon() == max(epsilons)
    assert 0.99 * 3 < max(epsilons) <= 3
    assert min(epsilons) < 0.6 * max(epsilons), "had another client been taken for the worst, it would show"
    worst = epsilons.index(max(epsilons))
    assert (plan.sampling_rate, plan.releases) == (DRAWS[worst].rate, planned[worst])
    assert plan.epsilon() == plan.epsilon_participants(), "nobody but the client sees its batches"


@pytest.mark.slow
def test_the_order_of_clients_does_not_matter() -> None:
    target = Target(3.0, None, DELTA)
    one, other = (for_gradients(target, NAMES[::way], DRAWS[::way], STEPS[::way], participations=4) for way in (1, -1))
    assert one.limits == other.limits
    assert one.epsilon() == pytest.approx(other.epsilon(), rel=1e-2)
    assert max(each(other.noise_multiplier, [other.limits[name] for name in NAMES])) <= 3


def test_a_client_without_examples_may_come_first() -> None:
    names, draws, steps = ["empty", *NAMES[:1]], [Poisson(0, 1.0), DRAWS[0]], [0, STEPS[0]]
    plan = for_gradients(Target(3.0, None, DELTA), names, draws, steps, 4)
    alone = for_gradients(Target(3.0, None, DELTA), NAMES[:1], DRAWS[:1], STEPS[:1], 4)
    assert (plan.noise_multiplier, plan.epsilon()) == (alone.noise_multiplier, alone.epsilon())
    assert plan.limits == {"empty": 0, **alone.limits}


@pytest.mark.nightly
def test_stopping_early_is_each_clients_own_affair_and_the_worst_of_them_is_told() -> None:
    """The client with the highest planned epsilon may be left with no release; then another client has the highest epsilon."""
    plan = for_gradients(Target(5.0, 0.8, DELTA, stop_early=True), NAMES, DRAWS, STEPS, participations=3)
    allowed, planned = [plan.limits[name] for name in NAMES], [3 * steps for steps in STEPS]
    at_first, epsilons = each(0.8, planned), each(0.8, allowed)
    for count, one_more, most in zip(allowed, each(0.8, [count + 1 for count in allowed]), planned, strict=True):
        assert count == most or one_more > 5
    worst_at_first = at_first.index(max(at_first))
    assert epsilons[worst_at_first] < 0.5 * max(epsilons), "or the test would not see it told in place of the worst"
    assert plan.epsilon() == plan.cost().epsilon == max(epsilons) <= 5
    assert plan.cost().delta == DELTA


def test_a_limit_that_holds_not_even_one_release_is_refused_when_stopping_early_too() -> None:
    target = Target(0.5, 0.8, DELTA, stop_early=True)
    with refused(BudgetExhausted):
        for_sums(target, Poisson(3, 1.0), 4)
    with refused(BudgetExhausted):
        for_contributions(target, 0.5, NAMES, 1, 3)
    for own in (target, Target(1.0, 0.8, DELTA)):
        with refused(BudgetExhausted, hide=r"epsilon \d\S+"):
            for_gradients(own, NAMES[:1], DRAWS[:1], STEPS[:1], 6)


@pytest.mark.parametrize(("rounds", "rate"), [(20, 0.05), (100, 0.1), (3, 1.0), (1, 0.5), (50, 0.001)])
def test_few_clients_are_drawn_more_often_than_is_usual(rounds: int, rate: float) -> None:
    most = usual_participations(rounds, rate)
    assert 1 <= most <= rounds
    assert binom.sf(most, rounds, rate) <= 0.01
    assert most == 1 or binom.sf(most - 1, rounds, rate) > 0.01


def test_a_renyi_ledger_is_charged_for_whoever_costs_most_at_its_order() -> None:
    """The client with the highest epsilon at delta need not cost most at an order: 17 examples against 65, in batches of 16."""
    order, draws, steps = 18.0, [Poisson(17, 16 / 17), Poisson(65, 16 / 65)], [2, 5]
    plan = for_gradients(Target(None, 1.0, DELTA), ("small", "large"), draws, steps, 3)
    each = [accounting.rdp(draw.release(1.0), 3 * count, [order])[0] for draw, count in zip(draws, steps, strict=True)]
    assert plan.cost(orders=[order]).rdp == (max(each),)
    assert each[0] != pytest.approx(each[1])
