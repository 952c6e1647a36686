"""Searches for the noise that meets a target epsilon, and for the most releases within one: never above it, and close."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

from privacy.accounting import (
    Release,
    _rounded_up,
    calibrate,
    epsilon,
    largest_count,
    poisson_sampled,
    replaced,
    sampled_without_replacement,
    unamplified,
)
from tests.cells import every

DELTA = 1e-5
NIGHT = pytest.mark.nightly


@pytest.mark.parametrize(
    ("release_at", "count", "target"),
    [
        pytest.param(lambda z: poisson_sampled(0.01, z), 1000, 3.0, marks=NIGHT),
        pytest.param(lambda z: poisson_sampled(0.01, z), 1000, 0.05, marks=NIGHT),
        pytest.param(lambda z: poisson_sampled(0.01, z), 100, 1000.0, marks=NIGHT),
        pytest.param(lambda z: poisson_sampled(0.3, z), 5, 8.0, marks=NIGHT),
        (lambda z: poisson_sampled(0.3, z), 5, 0.3),
        pytest.param(lambda z: sampled_without_replacement(1000, 10, z), 100, 2.0, marks=NIGHT),
        (lambda z: sampled_without_replacement(10, 9, z), 5, 8.0),
        (unamplified, 20, 0.5),
        (replaced, 1, 100.0),
    ],
)
def test_calibration_never_exceeds_and_wastes_little(
    release_at: Callable[[float], Release], count: int, target: float
) -> None:
    z = calibrate(release_at, count, target, DELTA)
    assert 0.99 * target < epsilon(release_at(z), count, DELTA) <= target
    assert epsilon(release_at(0.98 * z), count, DELTA) > target
    assert float(f"{z:.6g}") == z
    coarse = calibrate(release_at, count, target, DELTA, coarse=True)
    assert epsilon(release_at(coarse), count, DELTA) <= target
    assert z * 0.98 < coarse < 1.3 * z


def test_noise_is_no_less_than_the_exact_formula_asks_for() -> None:
    z = calibrate(unamplified, 3, 1.0, DELTA)
    assert 1.0 <= 1.0 / get_epsilon_gaussian(z / math.sqrt(3), DELTA) < 1.01


@every("exact", [0.123456, 0.1234561, 0.8145339, 5.0, 99999.95, 1e-3, 123.4565000001])
def test_noise_is_rounded_up_and_never_down(exact: float) -> None:
    rounded = _rounded_up(exact)
    assert exact * (1 - 1e-11) <= rounded <= exact * (1 + 1.1e-5)
    assert float(f"{rounded:.6g}") == rounded == _rounded_up(rounded)


@pytest.mark.parametrize(
    ("release", "limit"),
    [
        (unamplified(10.0), 3.0),
        pytest.param(sampled_without_replacement(1000, 10, 2.0), 3.0, marks=NIGHT),
        pytest.param(poisson_sampled(0.2, 2.0), 4.0, marks=NIGHT),
        (poisson_sampled(0.2, 4.0), 1.0),
        pytest.param(poisson_sampled(0.5, 0.6), 1.0, marks=NIGHT),
    ],
)
def test_as_many_as_fit_and_not_one_more(release: Release, limit: float) -> None:
    count = largest_count(release, limit, DELTA)
    assert epsilon(release, count, DELTA) <= limit < epsilon(release, count + 1, DELTA)


@pytest.mark.nightly
def test_of_thousands_all_but_one_in_a_thousand_fit() -> None:
    release = poisson_sampled(0.01, 1.0)
    count = largest_count(release, 3.0, DELTA)
    assert epsilon(release, count, DELTA) <= 3.0 < epsilon(release, count + count // 500, DELTA)
