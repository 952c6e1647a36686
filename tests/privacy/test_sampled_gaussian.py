"""The loss distribution from array operations equals the library's, computed one loss at a time, to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

from privacy import accounting
from privacy.accounting import composed, hockey_sticks, observations, poisson_sampled
from privacy.errors import PlanError
from tests.cells import every

ADD, REMOVE = AdjacencyType.ADD, AdjacencyType.REMOVE


def library(z: float, rate: float, count: int, step: float) -> PLDAccountant:
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, step)
    return accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(z)), count)


@pytest.mark.parametrize(
    ("z", "rate", "count", "step"),
    [(0.56, 0.05, 20, 5e-3), (2.0, 0.9, 3, 1e-3), (0.8, 1e-3, 500, 2e-3), (9.0, 0.3, 1, 1e-4)],
)
def test_composed_releases_cost_what_the_library_says(z: float, rate: float, count: int, step: float) -> None:
    ours, theirs = composed(z, rate, count, step), library(z, rate, count, step)
    for delta in (1e-9, 1e-5, 0.01):
        assert ours.get_epsilon(delta) == theirs.get_epsilon(delta)
    for epsilon in (0.0, 0.1, 3.0):
        assert ours.get_delta(epsilon) == theirs.get_delta(epsilon)


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


@every("kind", [ADD, REMOVE])
def test_a_loss_lies_where_its_observation_is(kind: AdjacencyType) -> None:
    loss = GaussianPrivacyLoss(0.7, sampling_prob=0.2, adjacency_type=kind)
    losses = np.array([-0.15, -0.01, 0.0, 0.1, 0.2])
    assert [loss.privacy_loss(x) for x in observations(loss, losses)] == pytest.approx(losses, abs=1e-12)
    swapped = GaussianPrivacyLoss(0.7, sampling_prob=0.2, adjacency_type=ADD if kind == REMOVE else REMOVE)
    assert swapped.privacy_loss(observations(loss, losses)[3]) != pytest.approx(
        0.1, abs=1e-2
    )  # the other adjacency is noticed


def test_a_rate_that_rounding_hides_is_refused() -> None:
    loss = GaussianPrivacyLoss(1.0, sampling_prob=1e-9)
    with pytest.raises(PlanError, match="too close to 0 or 1"):
        hockey_sticks(loss, np.array([-9.999999999e-10]))
    with pytest.raises(ValueError, match="smaller than"):
        loss.get_delta_for_epsilon(-9.999999999e-10)


def test_the_accountant_of_record_is_that_of_the_library_where_a_member_is_replaced() -> None:
    release = accounting.Release(PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0)), "replace-one")
    assert isinstance(accounting.distribution(release, 2, 5e-3), PLDAccountant)
    assert not isinstance(accounting.distribution(poisson_sampled(0.1, 1.0), 2, 5e-3), PLDAccountant)
