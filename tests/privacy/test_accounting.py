"""Accounting against exact formulas, another library, and numerical integration.

The broken variants at the end of some tests are common mistakes; the test must notice each of them. Searches for noise and for
the most releases never exceed their target, and come close. The loss distribution from array operations equals the library's,
computed one loss at a time, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from privacy import accounting
from privacy.accounting import (
    Release,
    calibrate,
    composed,
    delta,
    epsilon,
    hockey_sticks,
    largest_count,
    poisson_sampled,
    rdp,
    replaced,
    sampled_without_replacement,
    unamplified,
)
from privacy.errors import PlanError
from tests.cells import every

ADD, REMOVE = AdjacencyType.ADD, AdjacencyType.REMOVE
DELTA = 1e-5
WHOLE = tuple(map(float, range(2, 17)))


def poisson_replaced(rate: float, z: float) -> Release:
    """Poisson sampling with replace-one neighbours, which no sampler of this project has."""
    return Release(PoissonSampledDpEvent(rate, GaussianDpEvent(z)), "replace-one")


def test_known_epsilons() -> None:
    assert epsilon(poisson_sampled(0.01, 1.0), 1000, DELTA) == pytest.approx(1.828, abs=0.002)
    assert epsilon(poisson_replaced(0.01, 1.0), 1000, DELTA) == pytest.approx(2.843, abs=0.002)
    assert epsilon(poisson_sampled(0.1, 0.89), 5, DELTA) == pytest.approx(3.0, abs=0.01)
    assert epsilon(unamplified(0.89), 5, DELTA) == pytest.approx(13.3, abs=0.05)


def test_a_replaced_member_moves_a_sum_twice_as_far() -> None:
    assert epsilon(replaced(1.0), 1, DELTA) == pytest.approx(10.0, abs=0.01)
    assert epsilon(replaced(1.0), 7, DELTA) == epsilon(unamplified(0.5), 7, DELTA)
    ignored = RdpAccountant(neighboring_relation=accounting._RELATIONS["replace-one"]).compose(GaussianDpEvent(1.0))
    assert float(ignored.get_epsilon(DELTA)) == pytest.approx(4.73, abs=0.01)  # the adjacency ignored: not private
    assert rdp(replaced(1.0), 3, [2.0, 8.0]) == pytest.approx((3 * 2 / 0.5, 3 * 8 / 0.5))


def test_samples_of_one_size_cost_no_less_than_their_worst_data() -> None:
    """All send -C and one sends +C instead: the sum is Poisson sampled at noise multiplier z / 2, and reaches this epsilon."""
    said = epsilon(sampled_without_replacement(1000, 10, 1.0), 1000, DELTA)
    reached = epsilon(poisson_sampled(0.01, 0.5), 1000, DELTA, discretization=accounting.COARSE)
    assert reached == pytest.approx(13.36, abs=0.01)
    assert said >= reached
    assert said == pytest.approx(20.99, abs=0.01)
    as_poisson = epsilon(poisson_replaced(0.01, 1.0), 1000, DELTA)
    assert as_poisson == pytest.approx(2.843, abs=0.002)
    assert as_poisson < reached / 4  # accounted for as Poisson samples: an epsilon that does not hold


def test_samples_of_one_size_cost_at_most_what_everybody_costs() -> None:
    almost_all = epsilon(sampled_without_replacement(10, 9, 1.0), 5, DELTA)
    assert almost_all == epsilon(replaced(1.0), 5, DELTA)
    some = epsilon(sampled_without_replacement(10, 3, 1.0), 5, DELTA)
    assert some < almost_all
    assert delta(sampled_without_replacement(10, 3, 1.0), 5, some) == pytest.approx(DELTA, rel=1e-3)


def test_one_release_against_the_integral() -> None:
    """delta is the integral of (p - e^epsilon q)+, the larger one over both orders of the two densities."""
    rate, z, at = 0.3, 2.0, 0.1
    x = np.linspace(-12 * z, 12 * z + 1, 100_001)
    as_is = norm.pdf(x, 0, z)
    one_more = (1 - rate) * as_is + rate * norm.pdf(x, 1, z)
    integrals = [
        np.trapezoid(np.maximum(0, p - math.exp(at) * q), x) for p, q in ((one_more, as_is), (as_is, one_more))
    ]
    exact = float(max(integrals))
    said = delta(poisson_sampled(rate, z), 1, at)
    assert said == pytest.approx(exact, rel=1e-3, abs=2e-10)
    assert said >= exact * (1 - 1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize(("rate", "z", "count"), [(0.1, 2.0, 10), (0.002, 0.8, 500), (0.02, 2.0, 500)])
def test_another_library_agrees(rate: float, z: float, count: int) -> None:
    prv = pytest.importorskip("opacus.accountants").PRVAccountant()
    prv.history = [(z, rate, count)]
    second = prv.get_epsilon(DELTA, eps_error=0.005)
    assert epsilon(poisson_sampled(rate, z), count, DELTA) == pytest.approx(second, rel=0.02, abs=0.006)


@every("count", [1, 40, 1000])
@every("wanted", [1e-3, 1e-6, 1e-9])
def test_everybody_every_time_is_exact(count: int, wanted: float) -> None:
    found = epsilon(unamplified(5.0), count, wanted)
    assert found == pytest.approx(get_epsilon_gaussian(5.0 / math.sqrt(count), wanted), rel=1e-9)
    if found > 0:
        assert delta(unamplified(5.0), count, found) == pytest.approx(wanted, rel=1e-6)


def test_sampling_almost_everybody_is_near_exact() -> None:
    exact = epsilon(unamplified(20.0), 100, DELTA)
    assert epsilon(poisson_sampled(1 - 1e-9, 20.0), 100, DELTA) == pytest.approx(exact, rel=1e-3)


def test_epsilon_moves_as_it_should() -> None:
    def at(rate: float = 0.01, z: float = 1.0, count: int = 200, delta: float = DELTA) -> float:
        return epsilon(poisson_sampled(rate, z), count, delta, discretization=accounting.COARSEST)

    for found in (
        [at(z=z) for z in (3.0, 1.0, 0.7, 0.3, 0.001)],
        [at(rate=rate) for rate in (0.001, 0.01, 0.1, 0.5, 1.0)],
        [at(count=count) for count in (0, 1, 10, 200, 5000)],
        [at(delta=wanted) for wanted in (1e-2, 1e-4, 1e-6, 1e-9)],
    ):
        assert found == sorted(found)
        assert all(map(math.isfinite, found))


@every("z", [1e-6, 1e-3, 0.02, 0.1])
def test_hardly_any_noise_is_answered_with_a_large_epsilon(z: float) -> None:
    found = epsilon(poisson_sampled(0.5, z), 10_000, DELTA)
    assert 1000 < found <= epsilon(unamplified(z), 10_000, DELTA) < math.inf
    assert 0 < delta(poisson_sampled(0.5, z), 10_000, 1.0) <= 1


def test_nothing_released_costs_nothing() -> None:
    for release in (poisson_sampled(0.1, 1.0), unamplified(1.0), sampled_without_replacement(10, 2, 1.0)):
        assert epsilon(release, 0, DELTA) == 0.0
        assert delta(release, 0, 1.0) == 0.0
        assert set(rdp(release, 0, [2.0, 3.0])) == {0.0}


def test_no_delta_is_claimed_that_rounding_may_hide() -> None:
    assert delta(poisson_sampled(0.01, 1.0), 1000, 100.0) == accounting.least_delta(1000)
    with pytest.raises(PlanError, match="choose a larger delta"):
        epsilon(poisson_sampled(0.01, 1.0), 1000, 1e-12)
    with pytest.raises(PlanError, match="too close to 0 or 1"):
        hockey_sticks(GaussianPrivacyLoss(1.0, sampling_prob=1e-9), np.array([-9.999999999e-10]))
    assert epsilon(unamplified(1.0), 1000, 1e-12) > 0


def test_renyi_divergence_is_an_upper_bound_of_the_accountant_of_record() -> None:
    for release in (poisson_sampled(0.01, 1.0), poisson_sampled(0.3, 3.0)):
        assert accounting.by_rdp(release, 100, DELTA) >= epsilon(release, 100, DELTA)
        assert accounting.by_participation(release, 100, DELTA) >= epsilon(release, 100, DELTA)
        one, many = rdp(release, 1, [2.0, 5.5]), rdp(release, 100, [2.0, 5.5])
        assert many == pytest.approx(tuple(100 * divergence for divergence in one))


def test_a_coarse_grid_says_more_never_less() -> None:
    for rate, z, count in ((0.01, 1.0, 1000), (0.3, 20.0, 500)):
        fine, coarse = (
            epsilon(poisson_sampled(rate, z), count, DELTA, discretization=step)
            for step in (accounting.FINE, accounting.COARSEST)
        )
        assert fine <= coarse <= 1.5 * fine


def library(z: float, rate: float, count: int, step: float) -> PLDAccountant:
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, step)
    return accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(z)), count)


@pytest.mark.parametrize(
    ("z", "rate", "count", "step"),
    [(0.56, 0.05, 20, 5e-3), (2.0, 0.9, 3, 1e-3), (0.8, 1e-3, 500, 2e-3), (9.0, 0.3, 1, 1e-4)],
)
def test_composed_releases_cost_what_the_library_says(z: float, rate: float, count: int, step: float) -> None:
    ours, theirs = composed(z, rate, count, step), library(z, rate, count, step)
    for at in (1e-9, 1e-5, 0.01):
        assert ours.get_epsilon(at) == theirs.get_epsilon(at)
    for at in (0.0, 0.1, 3.0):
        assert ours.get_delta(at) == theirs.get_delta(at)


@every("kind", [ADD, REMOVE])
@every("rate", [1e-6, 0.05, 0.5, 0.999, 1 - 1e-6])
@every("z", [0.05, 1.0, 300.0])
def test_divergences_are_the_librarys_on_the_grid_and_at_its_edges(kind: AdjacencyType, rate: float, z: float) -> None:
    """The edges are the largest and smallest losses, a loss of zero, and losses near log(1 - q), which no observation has."""
    loss = GaussianPrivacyLoss(z, sampling_prob=rate, adjacency_type=kind)
    ends, bound = loss.connect_dots_bounds(), math.log1p(-rate)
    beside = [sign * bound * (1 + away) for sign in (-1, 1) for away in (-1e-6, -1e-10, 0, 1e-10, 1e-6)]
    grid = np.linspace(ends.epsilon_lower, ends.epsilon_upper, 15)
    epsilons = np.array([*grid, *beside, 0.0, 1e-300, 5e-5, -5e-5, 700.0, -700.0])
    assert hockey_sticks(loss, epsilons).tolist() == [loss.get_delta_for_epsilon(float(one)) for one in epsilons]


def test_the_accountant_of_record_is_that_of_the_library_where_a_member_is_replaced() -> None:
    release = accounting.Release(PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0)), "replace-one")
    assert isinstance(accounting.distribution(release, 2, 5e-3), PLDAccountant)
    assert not isinstance(accounting.distribution(poisson_sampled(0.1, 1.0), 2, 5e-3), PLDAccountant)


CALIBRATED: list[tuple[Callable[[float], Release], int, float]] = [
    (lambda z: poisson_sampled(0.3, z), 5, 0.3),
    (unamplified, 20, 0.5),
    (replaced, 1, 100.0),
]


@pytest.mark.parametrize(("release_at", "count", "target"), CALIBRATED)
def test_calibration_never_exceeds_and_wastes_little(
    release_at: Callable[[float], Release], count: int, target: float
) -> None:
    z = calibrate(release_at, count, target, DELTA)
    assert 0.99 * target < epsilon(release_at(z), count, DELTA) <= target < epsilon(release_at(0.97 * z), count, DELTA)
    assert float(f"{z:.6g}") == z
    coarse = calibrate(release_at, count, target, DELTA, coarse=True)
    assert epsilon(release_at(coarse), count, DELTA) <= target
    assert z * 0.97 < coarse < 1.3 * z


FITTING = [
    (unamplified(10.0), 3.0),
    (poisson_sampled(0.2, 4.0), 1.0),
]


@pytest.mark.parametrize(("release", "limit"), FITTING)
def test_as_many_as_fit_and_not_one_more(release: Release, limit: float) -> None:
    """Of thousands, all but one in five hundred."""
    count = largest_count(release, limit, DELTA)
    assert epsilon(release, count, DELTA) <= limit < epsilon(release, count + 1 + count // 500, DELTA)
    assert epsilon(release, 0, DELTA) == 0.0
    assert largest_count(release, 1e-9, DELTA) == 0


@every(
    "ask",
    [
        *(lambda rate=rate: poisson_sampled(rate, 1.0) for rate in (0.0, 1.1)),
        *(lambda z=z: poisson_sampled(0.1, z) for z in (0.0, math.nan)),
        *(lambda one=one, z=z: one(z) for one in (unamplified, replaced) for z in (0.0, -1.0, math.nan, math.inf)),
        *(lambda size=size: sampled_without_replacement(10, size, 1.0) for size in (0, 11)),
        *(lambda at=at: epsilon(unamplified(1.0), 1, at) for at in (0.0, 1.0)),
        lambda: epsilon(unamplified(1.0), -1, DELTA),
        lambda: delta(unamplified(1.0), 1, -1.0),
        *(lambda target=target: calibrate(unamplified, 1, target, DELTA) for target in (0.0, math.inf)),
        lambda: calibrate(unamplified, 0, 1.0, DELTA),
        lambda: calibrate(lambda z: unamplified(1.0), 1, 0.1, DELTA),
    ],
)
def test_what_cannot_be_accounted_for_is_refused(ask: Callable[[], object]) -> None:
    with pytest.raises(PlanError):
        ask()


@every("z", [1e-6, 1e-3, 1e6])
@every("rate", [1e-6, 0.5, 1.0])
def test_extremes_are_answered(z: float, rate: float) -> None:
    found = epsilon(poisson_sampled(rate, z), 100, DELTA)
    assert 0 <= found < math.inf
    assert found <= epsilon(unamplified(z), 100, DELTA) * 1.2 + 1e-2
