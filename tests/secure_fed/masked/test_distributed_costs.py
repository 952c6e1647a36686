"""The epsilon charged for noise in shares: by independent accounting, for the least number of survivors whoever stayed."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting as dp
import pytest
from dp_accounting.rdp import RdpAccountant

from privacy import accounting
from tests.secure_fed.masked.wide_toys import DISTRIBUTED, HIDDEN, SKETCH, federation

TEN = [4] * 10
HALF = {"secure_aggregation.dropout": 0.3, "secure_aggregation.corrupt": 0.2}


def _rdp(rho: float, rate: float, count: int, delta: float) -> float:
    """Epsilon by dp_accounting's RDP of the sampled Gaussian, at integer orders."""
    orders = [float(order) for order in range(2, 200)]
    event: Any = dp.GaussianDpEvent(math.sqrt(0.5 / rho))
    event = dp.PoissonSampledDpEvent(rate, event) if rate < 1 else event
    accountant = RdpAccountant(orders, dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp.SelfComposedDpEvent(event, count))
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(("hidden", "passes"), [(False, 1), (False, 2), (True, 1)])
def test_epsilon_is_that_of_an_independent_computation(hidden: bool, passes: int) -> None:
    settings = {
        **(HIDDEN if hidden else DISTRIBUTED),
        **(SKETCH if passes == 2 else {}),
        "privacy.noise_multiplier": 3.0,
    }
    result = federation({**settings, "federation.cohort": 2 if hidden else 4}).run()
    said = result.summary
    rate = 0.5 if hidden else 1.0
    assert said["sampling_rate"] == rate or not hidden
    oracle = _rdp(passes / (2 * 3.0**2), rate, 3, 1e-3)
    assert said["epsilon"] == pytest.approx(oracle, rel=0.01)
    assert said["epsilon_participants"] == said["epsilon"]
    assert said["releases"] == 3 * passes
    assert said["noise_multiplier"] == 3.0


def test_a_cohort_that_is_seen_is_not_amplified() -> None:
    small = (
        federation({**DISTRIBUTED, "federation.cohort": 4, "privacy.noise_multiplier": 3.0}, sizes=TEN).run().summary
    )
    everybody = federation({**DISTRIBUTED, "privacy.noise_multiplier": 3.0}, sizes=TEN).run().summary
    assert small["epsilon"] == small["epsilon_participants"] == everybody["epsilon"]


@pytest.mark.parametrize("base", [DISTRIBUTED, {**HIDDEN, "federation.cohort": 6}], ids=["seen", "hidden"])
def test_a_target_is_kept_to_from_below(base: dict[str, Any]) -> None:
    settings = {**base, **HALF, "privacy.noise_multiplier": None, "privacy.epsilon": 6.0}
    said = federation(settings, sizes=TEN).run().summary
    assert 0.99 * 6 < said["epsilon"] <= 6
    z, rate = said["noise_multiplier"], 0.6 if "privacy.hidden_cohort" in base else 1.0
    assert _rdp(0.5 / z**2, rate, 3, 1e-3) == pytest.approx(said["epsilon"], rel=0.01)


@pytest.mark.parametrize("base", [DISTRIBUTED, {**HIDDEN, "federation.cohort": 6}], ids=["seen", "hidden"])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_what_the_survivors_realised_is_told_and_refunds_nothing(base: dict[str, Any], share: float) -> None:
    settings = {**base, **HALF, "federation.vanishing": share, "federation.seed": 3}
    said = federation(settings, sizes=TEN).run().whole
    realised = said["privacy"]["realised"]
    survivors = said["secure_aggregation"]["survivors"]
    assert realised["survivors"] == survivors
    assert realised["noise_multiplier"] == pytest.approx(math.sqrt((survivors - 2) / 5))
    assert realised["epsilon"] <= said["epsilon"]
    assert (realised["epsilon"] == said["epsilon"]) == (survivors == 7)
    release = (
        accounting.discrete_sampled(0.6, realised["noise_multiplier"])
        if "privacy.hidden_cohort" in base
        else accounting.discrete(realised["noise_multiplier"])
    )
    assert realised["epsilon"] == pytest.approx(accounting.epsilon(release, 3, 1e-3))


def test_the_charged_epsilon_is_that_at_the_least_number_whoever_vanished() -> None:
    settings = {**DISTRIBUTED, **HALF}
    all_stayed = federation(settings, sizes=TEN).run().summary
    some = federation({**settings, "federation.vanishing": 0.3}, sizes=TEN).run().summary
    assert all_stayed["epsilon"] == some["epsilon"]
