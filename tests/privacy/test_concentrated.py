"""Accounting for releases of which only Renyi divergences are known: against exact discrete laws, and against Gaussians."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting import UnsupportedEventError
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from privacy import accounting
from privacy.accounting import (
    Release,
    calibrate,
    delta,
    discrete,
    discrete_replaced,
    discrete_sampled,
    epsilon,
    largest_count,
    poisson_sampled,
    rdp,
    replaced,
    unamplified,
)
from privacy.distributed import _tau
from privacy.errors import PlanError
from tests.cells import every
from tests.privacy.discrete_laws import divergence, shares, shifted

DELTA = 1e-5
WHOLE = tuple(map(float, range(2, 17)))


@every("rate", [0.01, 0.2, 0.7])
@every("count", [1, 2, 3])
@every("shift", [1, 2])
def test_sampled_divergences_bound_exact_sums_in_both_directions(rate: float, count: int, shift: int) -> None:
    """One coordinate, shares of sigma 1: the exact laws with the member, without it, and with it at probability `rate`."""
    law = shares(1, count, 36)
    z = 1 / math.sqrt(shift**2 / count + _tau(count, 1))
    orders = (1.3, *WHOLE[:7], 4.5)
    said = rdp(discrete_sampled(rate, z), 1, orders)
    for there, absent in (shifted(law, shift), shifted(law, shift)[::-1]):
        perhaps = (1 - rate) * absent + rate * there
        for order, bound in zip(orders, said, strict=True):
            one_more, one_less = divergence(perhaps, absent, order), divergence(absent, perhaps, order)
            assert one_less <= one_more * (1 + 1e-9) + 1e-14  # by the reflection argument of `concentrated_divergences`
            assert one_more <= bound
            if order.is_integer():
                assert bound == pytest.approx(one_more, rel=0.02, abs=1e-9)
    half = rdp(discrete_sampled(rate / 2, z), 1, orders)
    there, absent = shifted(law, shift)
    assert half[1] < divergence((1 - rate) * absent + rate * there, absent, 2.0)  # half the rate is noticed


@every("rate", [0.001, 0.05, 0.5, 0.99])
@every("z", [0.3, 1.0, 5.0, 100.0])
def test_never_below_a_gaussian_and_equal_to_it(rate: float, z: float) -> None:
    orders = (*WHOLE, 64.0, 200.0)
    event = PoissonSampledDpEvent(rate, GaussianDpEvent(z))
    exact = RdpAccountant(orders).compose(event).rdp
    ours = rdp(discrete_sampled(rate, z), 1, orders)
    for order, one, gaussian in zip(orders, ours, exact, strict=True):
        least = min(gaussian, order / (2 * z**2))
        assert least * (1 - 1e-12) <= one <= least * (1 + 1e-6) + 2e-14, order
    between, above = rdp(discrete_sampled(rate, z), 1, (2.5, 6.2)), rdp(discrete_sampled(rate, z), 1, (3.0, 7.0))
    for order, one, whole in zip((2.5, 6.2), between, above, strict=True):
        assert one == min(whole, rdp(discrete(z), 1, (order,))[0])
    for order, one, gaussian in zip(orders, rdp(discrete(z), 3, orders), rdp(unamplified(z), 3, orders), strict=True):
        assert gaussian <= one <= gaussian * (1 + 1e-12), order


@pytest.mark.parametrize(
    ("release", "gaussian"),
    [
        (discrete(1.0), unamplified(1.0)),
        (discrete(40.0), unamplified(40.0)),
        (discrete_replaced(3.0), replaced(3.0)),
        pytest.param(discrete_sampled(0.1, 0.89), poisson_sampled(0.1, 0.89), marks=pytest.mark.nightly),
        (discrete_sampled(0.02, 2.0), poisson_sampled(0.02, 2.0)),
        pytest.param(discrete_sampled(0.5, 0.4), poisson_sampled(0.5, 0.4), marks=pytest.mark.nightly),
    ],
)
def test_epsilon_and_delta_are_those_of_renyi_privacy_and_never_below_a_gaussian(
    release: Release, gaussian: Release
) -> None:
    count = 50
    found = epsilon(release, count, DELTA)
    assert epsilon(gaussian, count, DELTA) <= found < math.inf
    plain = release.event if release.rate == 1 else None
    dense = tuple(1 + 1.003**power for power in range(-1700, 4000)) if plain else WHOLE
    assert found <= accounting.by_rdp(gaussian, count, DELTA, dense) * 1.001 + 1e-6
    assert delta(release, count, found) == pytest.approx(DELTA, rel=1e-3) or found == 0
    assert delta(release, count, found * 0.9) >= delta(gaussian, count, found * 0.9)
    assert delta(release, count, 0.0) <= 1


def test_exact_formulas_and_distributions_are_out_of_reach() -> None:
    """Functions for Gaussians alone give infinity or None for such a release, or refuse it."""
    for release in (discrete(1.0), discrete_sampled(0.1, 1.0), discrete_replaced(1.0)):
        assert release.concentrated
        assert not release.plain
        assert release.accountant == "rdp"
        assert accounting.without_sampling(release, 10, DELTA) == math.inf
        assert accounting.by_participation(release, 10, DELTA) == math.inf
        assert accounting.pld_step(release, 10, accounting.FINE) is None
    with pytest.raises(UnsupportedEventError):
        PLDAccountant().compose(discrete(1.0).event)
    assert not unamplified(1.0).concentrated
    assert not poisson_sampled(0.1, 1.0).concentrated


def test_a_replaced_member_moves_a_sum_twice_as_far() -> None:
    assert discrete_replaced(2.0).adjacency == "replace-one"
    assert rdp(discrete_replaced(2.0), 1, WHOLE) == rdp(discrete(1.0), 1, WHOLE)
    assert discrete_replaced(2.0).multiplier == pytest.approx(replaced(2.0).multiplier)
    assert discrete_sampled(1.0, 2.0) == discrete(2.0)


@pytest.mark.parametrize(
    ("release_at", "count", "target"),
    [
        (discrete, 1, 0.02),
        (discrete, 20, 3.0),
        (discrete, 1000, 50.0),
        (discrete_replaced, 5, 8.0),
        (lambda z: discrete_sampled(0.1, z), 50, 3.0),
        (lambda z: discrete_sampled(0.01, z), 1000, 0.1),
        (lambda z: discrete_sampled(0.9, z), 5, 20.0),
    ],
)
def test_calibration_never_exceeds_and_wastes_little(
    release_at: Callable[[float], Release], count: int, target: float
) -> None:
    z = calibrate(release_at, count, target, DELTA)
    assert 0.99 * target < epsilon(release_at(z), count, DELTA) <= target
    assert epsilon(release_at(calibrate(release_at, count, target, DELTA, coarse=True)), count, DELTA) <= target
    assert epsilon(release_at(0.97 * z), count, DELTA) > target


@pytest.mark.parametrize("release", [discrete(5.0), discrete_sampled(0.05, 1.0)])
def test_as_many_releases_as_fit_and_no_more(release: Release) -> None:
    count = largest_count(release, 4.0, DELTA)
    assert epsilon(release, count, DELTA) <= 4.0 < epsilon(release, count + 1 + count // 500, DELTA)
    assert epsilon(release, 0, DELTA) == 0.0
    assert largest_count(release, 1e-9, DELTA) == 0


def test_sampling_helps_and_more_rounds_cost_more() -> None:
    found = [epsilon(discrete_sampled(rate, 1.0), 20, DELTA) for rate in (0.001, 0.01, 0.1, 0.5, 0.99, 1.0)]
    assert found == sorted(found)
    found = [epsilon(discrete_sampled(0.1, 1.0), count, DELTA) for count in (1, 2, 10, 100, 10_000)]
    assert found == sorted(found)
    assert np.isfinite(found).all()


@every("z", [1e-6, 1e-3, 1e6])
@every("rate", [1e-6, 0.5, 1.0])
def test_extremes_are_answered(z: float, rate: float) -> None:
    found = epsilon(discrete_sampled(rate, z), 100, DELTA)
    assert 0 <= found < math.inf
    assert found <= epsilon(discrete(z), 100, DELTA) * 1.2 + 1e-2
    assert all(map(math.isfinite, accounting.concentrated_divergences(0.5 / z**2, rate, accounting.WHOLE_ORDERS)))


@every(
    ("ask", "says"),
    [
        (lambda: discrete(0.0), "noise multiplier is 0"),
        (lambda: discrete_sampled(0.0, 1.0), "sampling rate is 0"),
        (lambda: discrete_sampled(1.5, 1.0), "at most 1"),
        (lambda: discrete_replaced(math.nan), "noise multiplier is nan"),
        (lambda: epsilon(discrete(1.0), 1, 0.0), "delta is 0"),
    ],
)
def test_what_cannot_be_is_refused(ask: Callable[[], object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        ask()
