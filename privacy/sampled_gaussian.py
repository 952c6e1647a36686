"""The privacy loss distribution of a Gaussian over Poisson samples, as in `dp_accounting`, with array operations.

The library computes in Python, for one loss at a time, the observation x that has this loss, and a grid has some 100,000
losses. Here its formulas are evaluated over arrays. With sensitivity 1, sampling rate q and L(x) = -(1/2 + x) / z^2:

    a member less    loss(x) = log(1 - q + q e^L(x))            x = L^-1(log(1 + (e^loss - 1) / q))
    a member more    loss(x) = -log(1 - q + q e^-L(x - 1))      x = 1 + L^-1(-log(1 + (e^-loss - 1) / q))

The grid, its rounding upwards and composition are the library's own, and so are the resulting numbers: upper bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from dp_accounting.pld.pld_pmf import PLDPmf, create_pmf_pessimistic_connect_dots_fixed_gap
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, identity
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from numpy.typing import NDArray

from privacy.errors import PlanError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Composed:
    """The distribution of a loss, with the queries of `PLDAccountant`."""

    pld: PrivacyLossDistribution

    def get_epsilon(self, delta: float) -> float:
        return float(self.pld.get_epsilon_for_delta(delta))

    def get_delta(self, epsilon: float) -> float:
        return float(self.pld.get_delta_for_epsilon(epsilon))


def composed(z: float, rate: float, count: int, step: float) -> Composed:
    """The composition by `PLDAccountant` of `count` Gaussians of multiplier z, each over a Poisson sample; 0 < rate < 1."""
    of_one = (
        GaussianPrivacyLoss(z, sampling_prob=rate, adjacency_type=kind)
        for kind in (AdjacencyType.REMOVE, AdjacencyType.ADD)
    )
    once = PrivacyLossDistribution(*(_on_grid(loss, step) for loss in of_one))
    return Composed(identity(step).compose(once.self_compose(count)))


def _on_grid(loss: GaussianPrivacyLoss, step: float) -> PLDPmf:
    """A distribution on multiples of `step` that dominates the loss ("connect the dots", Doroshenko et al. 2022)."""
    bounds = loss.connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / step), math.ceil(bounds.epsilon_upper / step)
    deltas = hockey_sticks(loss, np.arange(low, high + 1) * step)
    return create_pmf_pessimistic_connect_dots_fixed_gap(step, low, high, deltas)


def hockey_sticks(loss: GaussianPrivacyLoss, epsilons: Floats) -> Floats:
    """(n,) the hockey-stick divergence at each epsilon: `loss.get_delta_for_epsilon(epsilons)`."""
    bound = math.log1p(
        -loss.sampling_prob
    )  # with a member less no loss is below it, with a member more none above -bound
    if loss.adjacency_type == AdjacencyType.REMOVE:
        with np.errstate(over="ignore"):  # of a loss that large minus infinity is left out below
            reached, deltas = epsilons > bound, -np.expm1(epsilons)
    else:
        reached, deltas = epsilons < -bound, np.zeros_like(epsilons)
    within = epsilons[reached]
    x = observations(loss, within)
    deltas[reached] = loss.mu_upper_cdf(x) - np.exp(within + loss.mu_lower_log_cdf(x))
    clipped: Floats = np.clip(deltas, 0, 1)
    return clipped


def observations(loss: GaussianPrivacyLoss, losses: Floats) -> Floats:
    """(n,) the observation that has each loss: `[loss.inverse_privacy_loss(one) for one in losses]`."""
    q, sign = loss.sampling_prob, 1.0 if loss.adjacency_type == AdjacencyType.REMOVE else -1.0
    shift, least = 1 - 1 / q, math.log(1 - q)
    less = sign * losses  # log(e^less / q + shift) is the loss without sampling
    raised = less + np.log(1 / q)
    with np.errstate(divide="ignore", invalid="ignore"):
        unsampled = raised + np.log1p(-np.exp(np.log(-shift) - raised))
    unsampled[less == 0] = np.log(1 / q + shift)
    unsampled[less <= least] = np.nan
    unsampled[_close(less, least)] = -np.inf
    if np.isnan(unsampled).any():
        raise PlanError(f"a sampling rate of {q!r} is too close to 0 or 1 to be accounted for in floating point")
    x: Floats = -0.5 - sign * unsampled * loss.standard_deviation**2
    return x if sign > 0 else 1.0 + x


def _close(values: Floats, to: float) -> NDArray[np.bool_]:
    """`math.isclose` of each with one number."""
    near: NDArray[np.bool_] = np.abs(values - to) <= 1e-9 * np.maximum(np.abs(values), abs(to))
    return near
