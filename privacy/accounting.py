"""The joint cost of several noised releases, and the noise that a privacy target needs.

Noise multipliers z are in units of the clip norm C. The accountants:

    everybody takes part  exact: count Gaussians of z equal one of z / sqrt(count); so for turns in a public order
    Poisson sampling      privacy loss distributions (PLD) of dp_accounting, discretised pessimistically
    samples of one size   Renyi privacy (RDP) of dp_accounting, or the bound without amplification where that is lower
    discrete noise        Renyi privacy alone, with or without Poisson sampling (`concentrated`)
    other noise           PLD of the event that its mechanism states

All of them return upper bounds, and noise is rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from scipy.special import log_ndtr

from privacy import bounds
from privacy.bounds import COARSE, COARSEST, FINE, Adjacency, Release
from privacy.errors import PlanError
from privacy.releases import (
    discrete,
    discrete_replaced,
    discrete_sampled,
    poisson_sampled,
    replaced,
    sampled_without_replacement,
    unamplified,
)

__all__ = ["COARSE", "Adjacency", "Release", "calibrate", "delta", "epsilon", "largest_count", "rdp"]
__all__ += ["discrete", "discrete_replaced", "discrete_sampled", "poisson_sampled", "replaced", "unamplified"]
__all__ += ["sampled_without_replacement"]

_MOST_RELEASES = 10_000_000
_MOST_NOISE = 1e9
_FEW_ORDERS_DO = 0.3  # small epsilons need high orders, which the quick bound lacks


def epsilon(release: Release, count: float, delta: float, *, discretization: float = FINE) -> float:
    """An epsilon such that `count` such releases together are (epsilon, delta)-private.

    `discretization` is the widest step of the privacy loss: many releases or small losses use finer steps, and uselessly large
    epsilons coarser ones. Where a quick bound on epsilon exceeds ten thousand, PLD is out of reach, and epsilon is the least of
    the other bounds.

    A count that is not a whole number is allowed for plain Gaussians and discrete noise: it means one release of squared
    sensitivity `count`.
    """
    _checked(count, delta)
    return _epsilon(release, count, delta, discretization) if count else 0.0


def delta(release: Release, count: float, epsilon: float) -> float:
    """A delta such that `count` such releases are together (epsilon, delta)-private; never below its rounding error."""
    if not (epsilon >= 0 and count >= 0):
        raise PlanError(f"epsilon {epsilon:g} and {count} releases must not be negative")
    if count == 0:
        return 0.0
    everybody = _gaussian_delta(release.multiplier / math.sqrt(count), epsilon) if release.gaussian else 1.0
    if release.plain:
        return everybody
    step = bounds.pld_step(release, count, FINE)
    if step is None:
        orders = bounds.orders_for(release)
        by_rdp = compute_delta(orders, rdp(release, count, orders), epsilon)[0]
        return min(everybody, float(by_rdp))
    found = float(bounds.distribution(release, math.ceil(count), step).get_delta(epsilon))
    return min(1.0, max(found, bounds.least_delta(count)))


def rdp(release: Release, count: float, orders: Sequence[float]) -> tuple[float, ...]:
    """The Renyi divergence of `count` such releases at each of `orders`, for composition with other runs."""
    return tuple(count * one for one in bounds.renyi(release, tuple(map(float, orders))))


def largest_count(release: Release, epsilon: float, delta: float) -> int:
    """The number of such releases that fit: never too many, exact below a thousand, and to one in a thousand above.

    At most ten million, and at most as many as still let PLD resolve `delta`.
    """
    _checked(1, delta)
    by_pld = not (release.plain or release.concentrated)
    most = min(_MOST_RELEASES, int(delta * 1e13)) if by_pld else _MOST_RELEASES
    fits, count = 0, 1
    for step in (COARSEST, FINE):
        exceeds = most + 1  # again: a fine grid may admit counts that a coarse one refused
        while exceeds - fits > 1 + fits // 1000:
            found = _epsilon(release, count, delta, step)
            fits, exceeds = (count, exceeds) if found <= epsilon else (fits, count)
            ratio = epsilon / found if found > 0 else 4.0
            count = round(count * min(max(ratio**1.5, 0.25), 4.0))
            if not fits < count < exceeds:
                count = fits + max(1, min(exceeds - fits, fits // 250) // 2)
        count = fits + max(1, fits // 1000)
    return fits


def calibrate(
    release_at: Callable[[float], Release], count: float, epsilon: float, delta: float, *, coarse: bool = False
) -> float:
    """A noise multiplier, rounded up, with which `count` releases cost at most `epsilon`, and more than 0.99 of it.

    Three steps narrow the search: bounds that take milliseconds, a coarse grid, and the accountant of record. `coarse` omits
    the last step: epsilon is still never above the target, but the noise is a few percent higher than needed. The 0.99 is not
    guaranteed where epsilon jumps: above 1000, or where delta alone makes it zero.
    """
    _checked(count, delta)
    if not 0 < epsilon < math.inf:
        raise PlanError(f"epsilon is {epsilon:g}; it must be a finite number above 0")
    if not count > 0:
        raise PlanError(f"no noise multiplier exists for {count:g} releases; there must be at least one")

    first = release_at(1.0)
    if first.plain or not (first.gaussian or first.concentrated):
        return _descend(partial(_at, release_at, count, delta, FINE), epsilon, 1.0)
    if first.accountant == "pld":
        steps = [COARSEST] if coarse else [COARSE, FINE]
    else:
        steps = [] if coarse and epsilon > _FEW_ORDERS_DO else [FINE]
    found = _descend(lambda z: bounds.quick(release_at(z), count, delta), epsilon, 1.0)
    for step in steps:
        here, beyond = ((z, bounds.quick(release_at(z), count, delta)) for z in (found, 1.02 * found))
        measure = partial(_at, release_at, count, delta, step)
        found = _descend(measure, epsilon, found, _power(here, beyond))
    return found


def _at(release_at: Callable[[float], Release], count: float, delta: float, step: float, z: float) -> float:
    return _epsilon(release_at(z), count, delta, step)


def _descend(measure: Callable[[float], float], target: float, z: float, power: float = 1.5) -> float:
    """A z with 0.99 target < measure(z) <= target: secants of log epsilon over log z inside a bracket that shrinks.

    power: the first guess of p, if epsilon falls as z^-p.
    """
    low, high, before = 0.0, math.inf, (0.0, 0.0)
    for turn in range(1, 200):
        z = _rounded_up(z)
        found = measure(z)
        if 0.99 * target < found <= target:
            return z
        low, high = (z, high) if found > target else (low, z)
        if low > _MOST_NOISE:
            break
        if high < low * (1 + 1e-3):
            return high  # epsilon all but jumps here
        power = _power(before, (z, found), power)
        factor = min(max(found / target / 0.996, 1e-9), 1e9) ** (1 / power)
        before, z = (z, found), z * min(max(factor, 0.25), 4.0)
        if not low < z < high or turn % 6 == 0:
            z = 2 * low if high == math.inf else high / 2 if low == 0 else math.sqrt(low * high)
    raise PlanError(
        f"no noise multiplier up to {_MOST_NOISE:g} brings epsilon down to {target:g}; choose a larger epsilon"
    )


def _power(one: tuple[float, float], other: tuple[float, float], otherwise: float = 1.5) -> float:
    """p where epsilon falls as z^-p, from two points (z, epsilon) if they determine it."""
    if one[0] == other[0] or not (0 < one[1] < math.inf and 0 < other[1] < math.inf):
        return otherwise
    return min(max(-math.log(one[1] / other[1]) / math.log(one[0] / other[0]), 1.0), 100.0)


@lru_cache(maxsize=1024)
def _epsilon(release: Release, count: float, delta: float, discretization: float) -> float:
    everybody = bounds.without_sampling(release, count, delta)
    if release.plain:
        return everybody
    step = bounds.pld_step(release, count, discretization)
    if step is None:
        closed = min(everybody, bounds.by_participation(release, count, delta))
        return min(closed, bounds.by_rdp(release, count, delta))
    if delta < bounds.least_delta(count):
        raise PlanError(
            f"delta {delta:g} is below {bounds.least_delta(count):g}, the least that rounding lets PLD resolve "
            f"over {count} releases; choose a larger delta"
        )
    return min(everybody, float(bounds.distribution(release, math.ceil(count), step).get_epsilon(delta)))


def _gaussian_delta(z: float, epsilon: float) -> float:
    """Balle and Wang's equation 6: Phi(1 / 2z - epsilon z) - exp(epsilon) Phi(-1 / 2z - epsilon z)."""
    first, second = log_ndtr(0.5 / z - epsilon * z), epsilon + log_ndtr(-0.5 / z - epsilon * z)
    return float(-np.exp(first) * np.expm1(min(second - first, 0.0)))


def _checked(count: float, delta: float) -> None:
    if not 0 <= count < math.inf:
        raise PlanError(f"{count} releases cannot be accounted for; choose at least 0")
    if not 0 < delta < 1:
        raise PlanError(
            f"delta is {delta:g}; it must be between 0 and 1, and well below one over the number of members"
        )


def _rounded_up(z: float) -> float:
    """Round up to six digits, so that the printed and stored number is the accounted one."""
    grain = 10.0 ** (math.floor(math.log10(z)) - 5)
    return float(f"{math.ceil(z / grain - 1e-6) * grain:.6g}")
