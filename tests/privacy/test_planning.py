"""Plans: the epsilon and the error of noise, and the settings that are refused before anything is computed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from privacy import accounting, forecast
from privacy.errors import PlanError
from privacy.forecast import Forecast, Setting
from tests.cells import every

SMALL = Setting(clients=20, cohort=2, rounds=5, delta=1e-5, dim=400)


@pytest.mark.slow
def test_a_target_is_met_and_not_exceeded() -> None:
    plan = forecast.for_epsilon(SMALL, 3.0)
    assert 2.97 < plan.epsilon <= 3.0
    assert plan.epsilon == forecast.for_noise(SMALL, plan.noise_multiplier).epsilon
    seen = accounting.unamplified(plan.noise_multiplier)
    assert plan.epsilon_participants == accounting.epsilon(seen, 5, 1e-5) > plan.epsilon


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
def test_alternatives_keep_to_their_targets_with_more_noise_than_a_plan() -> None:
    others = forecast.alternatives(SMALL, (1.0, 3.0))
    assert [(other.epsilon, other.setting.cohort) for other in others] == [
        (e, c) for e in (1.0, 3.0) for c in (1, 2, 4, 8)
    ]
    for other in others[-2:]:
        assert forecast.for_noise(other.setting, other.noise_multiplier).epsilon <= 3.0
        plan = forecast.for_epsilon(other.setting, 3.0)
        assert 0.99 * plan.noise_multiplier < other.noise_multiplier < 1.1 * plan.noise_multiplier


@pytest.mark.nightly
def test_alternatives_stop_at_all_clients() -> None:
    assert [other.setting.cohort for other in forecast.alternatives(replace(SMALL, cohort=15), (3.0,))] == [7, 15, 20]
    assert [other.setting.cohort for other in forecast.alternatives(replace(SMALL, cohort=1), (3.0,))] == [1, 2, 4]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cohort": 21}, "cohort is 21, of 20 clients"),
        ({"cohort": 0}, "cohort is 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"clients": -1}, "clients is -1"),
        ({"dim": 0}, "dim is 0"),
        ({"delta": 1.0}, "delta is 1"),
        ({"delta": math.nan}, "delta is nan"),
        ({"clip_norm": 0.0}, "clip_norm is 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(change: dict[str, float], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        replace(SMALL, **change)  # type: ignore[arg-type]
