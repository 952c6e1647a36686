"""Two sums over one secret cohort are accounted as one sampled release, and not as two."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting as dp
import pytest
from dp_accounting.pld import PLDAccountant

from privacy import accounting
from privacy.plan import Target, for_shares, for_sums
from privacy.sampling_and_turns import FixedSize, Poisson
from tests.cells import chosen
from tests.secure_fed.masked.wide_toys import CLIPPED, MASKED, SKETCH, federation

pytestmark = pytest.mark.slow
ADD = dp.NeighboringRelation.ADD_OR_REMOVE_ONE


def _pld(event: Any, count: int, delta: float, step: float = 1e-3) -> float:
    accountant = PLDAccountant(ADD, value_discretization_interval=step)
    accountant.compose(dp.SelfComposedDpEvent(event, count))
    return float(accountant.get_epsilon(delta))


def _rounds(rate: float, z: float, rounds: int, delta: float, passes: int = 2) -> float:
    """Epsilon with one sampling coin for each round, and one Gaussian for each pass of a sampled client."""
    both = dp.GaussianDpEvent(z / math.sqrt(passes))
    return _pld(dp.PoissonSampledDpEvent(rate, both), rounds, delta)


def _naive(rate: float, z: float, rounds: int, delta: float, passes: int = 2) -> float:
    """Epsilon by wrong accounting: a separate coin for every pass."""
    return _pld(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), passes * rounds, delta)


@pytest.mark.parametrize(
    ("rate", "z", "rounds"), chosen([(0.1, 1.0, 20), (0.01, 0.8, 100), (0.3, 1.5, 10)], [(0.1, 1.0, 20)])
)
def test_a_round_of_two_passes_is_one_sampled_release(rate: float, z: float, rounds: int) -> None:
    plan = for_sums(Target(None, z, 1e-5), Poisson(100, rate), 2 * rounds, 2)
    oracle = _rounds(rate, z, rounds, 1e-5)
    assert plan.epsilon() == pytest.approx(oracle, rel=0.005)
    assert plan.epsilon() >= oracle * (1 - 1e-3)
    assert _naive(rate, z, rounds, 1e-5) < 0.9 * oracle, "the wrong accounting promises too much"


@pytest.mark.parametrize("rate", chosen([0.02, 0.3], [0.3]))
def test_who_sees_the_cohort_sees_all_passes(rate: float) -> None:
    plan = for_sums(Target(None, 2.0, 1e-5), Poisson(100, rate), 20, 2)
    assert plan.epsilon_participants() == pytest.approx(_pld(dp.GaussianDpEvent(2.0), 20, 1e-5), rel=0.005)


@pytest.mark.nightly
@pytest.mark.parametrize("target", [1.0, 8.0])
def test_noise_is_made_to_fit_whole_rounds(target: float) -> None:
    plan = for_sums(Target(target, None, 1e-5), Poisson(100, 0.1), 20, 2)
    assert 0.99 * target < plan.epsilon() <= target
    assert _rounds(0.1, plan.noise_multiplier, 10, 1e-5) == pytest.approx(target, rel=0.015)
    single = for_sums(Target(target, None, 1e-5), Poisson(100, 0.1), 10, 1)
    assert plan.noise_multiplier == pytest.approx(math.sqrt(2) * single.noise_multiplier, rel=0.01)


@pytest.mark.nightly
def test_fixed_cohorts_and_shares_count_rounds_too() -> None:
    fixed = for_sums(Target(None, 2.0, 1e-5), FixedSize(100, 10), 20, 2)
    oracle = accounting.epsilon(accounting.sampled_without_replacement(100, 10, math.sqrt(2)), 10, 1e-5)
    assert fixed.epsilon() == pytest.approx(oracle)
    assert fixed.epsilon_participants() == pytest.approx(
        _pld(dp.GaussianDpEvent(1 / math.sqrt(2)), 10, 1e-5), rel=0.005
    )
    for hidden in (False, True):
        shares = for_shares(Target(None, 2.0, 1e-5), Poisson(100, 0.1), 20, 2, hidden=hidden)
        z = math.sqrt(2)
        release = accounting.poisson_sampled(0.1, z) if hidden else accounting.unamplified(z)
        assert shares.epsilon() == pytest.approx(accounting.epsilon(release, 10, 1e-5))


def test_a_round_that_was_begun_counts_in_full() -> None:
    plan = for_sums(Target(None, 1.0, 1e-5), Poisson(100, 0.1), 20, 2)
    assert [plan.epsilon(count) == plan.epsilon(count + 1) for count in (1, 2, 3)] == [True, False, True]
    assert plan.epsilon(1) == pytest.approx(_rounds(0.1, 1.0, 1, 1e-5), rel=0.005)
    assert plan.epsilon(0) == 0


@pytest.mark.parametrize(("rate", "z"), chosen([(0.01, 0.5), (0.1, 1.0), (0.5, 1.0), (0.5, 3.0)], [(0.1, 1.0)]))
def test_two_halves_of_rounds_that_were_cut_short_cost_no_more_than_the_one_they_are_counted_as(
    rate: float, z: float
) -> None:
    """A round killed twice after its first pass has charged two releases, each with its own coin."""
    event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z))
    both = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z / math.sqrt(2)))
    for delta in (1e-5, rate / 10):
        assert _pld(event, 2, delta, 1e-3) <= _pld(both, 1, delta, 1e-3) + 2e-3


@pytest.mark.parametrize("masks", chosen([{}, MASKED], [MASKED]), ids=["open", "masked"])
def test_a_run_says_what_the_plan_does(masks: dict[str, Any]) -> None:
    settings = {**CLIPPED, **SKETCH, **masks, "federation.cohort": 4, "federation.rounds": 4, "privacy.delta": 1e-3}
    said = federation(settings, sizes=[4] * 8).run().summary
    assert said["releases"] == 8
    assert said["epsilon"] == pytest.approx(_rounds(0.5, 1.0, 4, 1e-3), rel=0.005)
    assert said["epsilon"] > _naive(0.5, 1.0, 4, 1e-3)
    assert said["epsilon_participants"] == pytest.approx(_pld(dp.GaussianDpEvent(1.0), 8, 1e-3), rel=0.005)
    assert said["epsilon_cumulative"] == said["epsilon"]
