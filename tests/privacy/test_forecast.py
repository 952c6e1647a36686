"""Forecasts: the epsilon and the error of noise, the settings that are refused, and the ways to guarantee one epsilon.

The noise of the ways is compared with dense matrices and with the mechanism itself.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from privacy import accounting, forecast
from privacy.correlation import best
from privacy.distributed import DistributedGaussian
from privacy.errors import PlanError
from privacy.forecast import Forecast, Possible, Setting, Way, compared, in_turn, least_cohort, pick, recommended
from privacy.plan import Target
from tests.cells import every
from tests.privacy.test_correlation import dense, patterns

SETTING = Setting(clients=200, cohort=40, rounds=9, delta=1e-5)
MASKED = Possible(counted=32, counted_of_all=160)
AT_TWO = Target(None, 2.0, 1e-5)
EVERYBODY = ("reader", "participant", "server")
SMALL = Setting(clients=20, cohort=2, rounds=5, delta=1e-5, dim=400)


def test_samples_of_one_size_are_accounted_for_as_such() -> None:
    fixed = forecast.for_noise(replace(SMALL, sampling="fixed"), 2.0)
    assert fixed.epsilon == accounting.epsilon(accounting.sampled_without_replacement(20, 2, 2.0), 5, 1e-5)
    assert fixed.epsilon_participants == accounting.epsilon(accounting.replaced(2.0), 5, 1e-5)
    assert fixed.epsilon > forecast.for_noise(SMALL, 2.0).epsilon


def test_the_error_is_that_of_a_noised_mean() -> None:
    plan = forecast.for_noise(replace(SMALL, clip_norm=0.5), 4.0)
    noise = 4.0 * 0.5 * np.random.default_rng(0).standard_normal((2000, 400)) / 2
    assert plan.noise_std == pytest.approx(noise.std(), rel=0.01)
    assert plan.noise_norm == pytest.approx(np.linalg.norm(noise, axis=1).mean(), rel=0.01)
    assert forecast.for_noise(replace(SMALL, dim=None), 4.0).noise_norm is None


@every(("dim", "outlook"), [(399, "hard"), (401, "long"), (5, "hard"), (3, "fine"), (None, None)])
@every("clip_norm", [1.0, 30.0])
def test_the_outlook_compares_noise_with_the_longest_mean(
    dim: int | None, outlook: str | None, clip_norm: float
) -> None:
    setting = Setting(clients=100, cohort=20, rounds=1, delta=1e-5, dim=dim, clip_norm=clip_norm)
    assert Forecast(setting, 1.0, 1.0, 1.0).outlook == outlook


@pytest.mark.nightly
def test_alternatives_keep_to_their_target_with_hardly_more_noise_than_a_plan() -> None:
    others = forecast.alternatives(SMALL, (3.0,))
    assert [(other.epsilon, other.setting.cohort) for other in others] == [(3.0, cohort) for cohort in (1, 2, 4, 8)]
    for other in others[-2:]:
        assert forecast.for_noise(other.setting, other.noise_multiplier).epsilon <= 3.0
        plan = forecast.for_epsilon(other.setting, 3.0)
        assert 0.99 * plan.noise_multiplier < other.noise_multiplier < 1.1 * plan.noise_multiplier


WRONG = [("cohort", 21), ("cohort", 0), ("rounds", 0), ("clients", -1), ("dim", 0), ("delta", 1.0), ("delta", math.nan)]


@every(("name", "value"), [*WRONG, ("clip_norm", 0.0)])
def test_what_cannot_be_planned_is_refused(name: str, value: float) -> None:
    with pytest.raises(PlanError, match=f"{name} is"):
        replace(SMALL, **{name: value})  # type: ignore[arg-type]


def made(possible: Possible = MASKED, setting: Setting = SETTING) -> dict[tuple[str, str, str], Way]:
    return {(way.sampling, way.noise, way.correlation): way for way in compared(setting, AT_TWO, possible)}


def test_each_way_costs_what_the_accountant_says_of_its_own_release() -> None:
    """In nine rounds of a fifth of the clients, a client has up to two turns; the band reaches beyond the last round."""
    ways = made()
    coins = accounting.poisson_sampled(0.2, 2.0)
    c = dense(best(9, 5, 2), 9)
    most = max(float(np.sum(c[:, list(turns)].sum(1) ** 2)) for turns in patterns(9, 5, 2))
    assert {name: way.epsilon for name, way in ways.items()} == {
        ("coins", "central", "none"): accounting.epsilon(coins, 9, 1e-5),
        ("schedule", "central", "none"): accounting.epsilon(accounting.unamplified(2.0), 2, 1e-5),
        ("schedule", "central", "banded"): pytest.approx(accounting.epsilon(accounting.unamplified(2.0), most, 1e-5)),
        ("schedule", "distributed", "none"): accounting.epsilon(accounting.unamplified(2.0), 2, 1e-5),
        ("coins", "distributed", "none"): accounting.epsilon(coins, 9, 1e-5),
        ("schedule", "local", "none"): accounting.epsilon(accounting.replaced(2.0), 2, 1e-5),
    }
    assert [way.holds_against for way in ways.values()] == [EVERYBODY[:1], *2 * [EVERYBODY[:2]], *3 * [EVERYBODY]]
    assert sum(way.recommended for way in ways.values()) == 1


@every("momentum", [0.0, 0.7])
def test_final_noise_is_that_of_the_sum_of_all_rounds(momentum: float) -> None:
    """It is the noise on the plain sum, whatever momentum the band was chosen for."""
    ways = made(replace(MASKED, momentum=momentum))
    independent = 2.0 * math.sqrt(9)
    assert ways["coins", "central", "none"].final_noise == independent
    assert ways["schedule", "central", "none"].final_noise == independent
    assert ways["schedule", "local", "none"].final_noise == pytest.approx(independent * math.sqrt(40))
    c = best(9, 5, 2, momentum)
    last = np.ones(9) @ np.linalg.inv(dense(c, 9))
    banded = ways["schedule", "central", "banded"]
    assert (banded.final_noise, banded.band) == (pytest.approx(2.0 * np.linalg.norm(last)), c.band)


@every("sampling, clients, counted", [("schedule", 40, 32), ("coins", 200, 160)])
def test_shares_that_are_not_counted_are_noise_all_the_same(sampling: str, clients: int, counted: int) -> None:
    a_round = DistributedGaussian(2.0, clients, counted).std(1.0, 100, clients)
    assert made()[sampling, "distributed", "none"].final_noise == pytest.approx(a_round * math.sqrt(9), rel=1e-3)


def test_what_is_not_possible_is_not_compared() -> None:
    assert not [way for way in made(Possible(correlated=False)) if "distributed" in way or "banded" in way]
    assert not [way for way in made(setting=replace(SETTING, cohort=200)) if "banded" in way], "no gap to reach over"


@every("epsilon, independent, banded", [(8.0, 2.68, 1.31), (3.0, 6.22, 3.05), (1.0, 16.7, 8.17)])
def test_the_noise_of_turns_against_known_figures(epsilon: float, independent: float, banded: float) -> None:
    """The known banded figures are for a band of 10; wider bands have less noise."""
    setting = Setting(clients=5000, cohort=250, rounds=20, delta=1e-5)
    found = list(forecast.in_turn(setting, Target(epsilon, None, 1e-5), Possible()))
    assert found[0].final_noise == pytest.approx(independent, rel=0.005)
    assert 0.9 * banded < found[1].final_noise < banded


# Which way is picked.


def way(final_noise: float, noise: str = "central", sampling: str = "schedule") -> Way:
    against = EVERYBODY if noise != "central" else EVERYBODY[:2] if sampling == "schedule" else EVERYBODY[:1]
    return Way(sampling, noise, "none", 1, 1.0, 1.0, against, final_noise)  # type: ignore[arg-type]


WAYS = [
    way(1.0, sampling="coins"),
    way(2.0, "distributed", "coins"),
    way(3.0),
    way(4.0, "distributed"),
    way(5.0, "local"),
]


# In this order: the length of the noise is unknown; 4 sqrt(100) / 400 is a tenth; a little more; no way has little noise; of
# the two ways that hold against everybody, the one with less noise.
@every("dim, quietest", [(None, 3.0), (100, 4.0), (101, 3.0), (400, 3.0), (4, 4.0)])
def test_the_strongest_promise_of_little_noise_is_picked_and_never_coins(dim: int | None, quietest: float) -> None:
    setting = Setting(clients=100, cohort=40, rounds=10, delta=1e-5, dim=dim)
    for order in (WAYS, WAYS[::-1]):
        assert pick(setting, order).final_noise == quietest


@pytest.mark.parametrize("possible", [MASKED, Possible(), Possible(correlated=False)])
def test_the_recommended_way_is_found_without_counting_coins(
    possible: Possible, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = next(way for way in compared(SETTING, AT_TWO, possible) if way.recommended)
    monkeypatch.delattr(forecast, "for_sums")
    monkeypatch.delattr(forecast, "for_shares")
    assert recommended(SETTING, AT_TWO, possible) == replace(marked, recommended=False)


@every("correlated", [True, False])
def test_the_least_cohort_is_the_first_of_all_whose_noise_is_no_longer_than_the_way(correlated: bool) -> None:
    """Also where larger cohorts have one turn more per client and so, again, noise that is too long."""
    few, found = Setting(clients=30, cohort=1, rounds=5, delta=1e-5), set()
    possible = Possible(correlated=correlated)
    for dim in (1, 300, 700, 2000, 10**6):
        here = [replace(few, cohort=cohort, dim=dim) for cohort in range(1, 31)]
        shares = [pick(one, in_turn(one, AT_TWO, possible)).share(one) for one in here]
        least = next((cohort for cohort, share in enumerate(shares, 1) if share is not None and share <= 1), None)
        assert least_cohort(here[0], AT_TWO, correlated=correlated) == least
        found.add(least)
    assert len(found) > 3
    assert None in found
