"""The privacy cost of noised sums, and the noise that a privacy target needs.

A `Release` is one noised sum as an accountant sees it: who is sampled, which data sets are neighbours, and how the noise is
distributed. `epsilon`, `delta` and `rdp` are the joint cost of several releases, `largest_count` is the number of releases
that a target admits, and `calibrate` finds the noise for it. Noise multipliers z are in units of the clip norm C.

    everybody takes part  exact: count Gaussians of z equal one of z / sqrt(count); so for turns in a public order
    Poisson sampling      privacy loss distributions (PLD) of dp_accounting, discretised pessimistically
    samples of one size   Renyi privacy (RDP) of dp_accounting, or the bound without amplification where that is lower
    shares of noise       as Gaussian noise (`distributed.DistributedGaussian` has the proof)
    other noise           PLD of the event that its mechanism states

Every number is an upper bound: a grid, a rounding or a shortcut may only make it larger, and noise is rounded up.
`dp_accounting` assumes a Gaussian of sensitivity one. Where neighbours have one member *replaced*, a sum moves by up to 2 C,
so an accountant that assumes add-remove neighbours gets z / 2.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.dp_event import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.pld_pmf import PLDPmf, create_pmf_pessimistic_connect_dots_fixed_gap
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, identity
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant, compute_delta, compute_epsilon
from scipy.special import log_ndtr
from scipy.stats import binom

from privacy.entropy import Floats
from privacy.errors import PlanError

Adjacency = Literal["add-remove", "replace-one"]

FINE, COARSE, COARSEST = 1e-4, 5e-4, 2e-3  # steps of the privacy loss: of record, for first guesses, and for tables

# Orders of Renyi divergences: of record, and of those that take milliseconds.
ORDERS = tuple(map(float, (*range(2, 33), 36, 40, 48, 56, 64, 80, 96, 128, 192, 256)))
FEW_ORDERS = tuple(map(float, (2, 3, 4, 6, 8, 11, 16, 24, 32, 48, 64)))

_RELATIONS = {"add-remove": NeighboringRelation.ADD_OR_REMOVE_ONE, "replace-one": NeighboringRelation.REPLACE_ONE}
_LEAST_NOISE, _LARGEST_NOISE = 1e-6, 1e12
_MOST_NOISE = 1e9
_MOST_RELEASES = 10_000_000
_MOST_BY_PLD = 1e4  # beyond this epsilon a distribution is too wide to compute
_FEW_ORDERS_DO = 0.3  # small epsilons need high orders, which the quick bound lacks


@dataclass(frozen=True)
class Release:
    """One release as an accountant sees it: its event, its neighbours, and 'pld' or 'rdp'."""

    event: DpEvent
    adjacency: Adjacency
    accountant: Literal["pld", "rdp"] = "pld"

    @property
    def plain(self) -> bool:
        """Whether everybody takes part in a release of Gaussian noise, so that the exact formulas hold."""
        return isinstance(self.event, GaussianDpEvent)

    @property
    def gaussian(self) -> bool:
        """Whether the noise is Gaussian, sampled or not. Other noise is covered only by PLD and dp_accounting's RDP."""
        return isinstance(self._of_everybody, GaussianDpEvent)

    @property
    def rate(self) -> float:
        """The probability of Poisson sampling; 1 without Poisson sampling."""
        return float(self.event.sampling_probability) if isinstance(self.event, PoissonSampledDpEvent) else 1.0

    @property
    def multiplier(self) -> float:
        """The noise multiplier, to sensitivity one, of the same release over everybody."""
        z = float(self._of_everybody.noise_multiplier)
        without_replacement = isinstance(self.event, SampledWithoutReplacementDpEvent)  # already halved, as above
        return z / 2 if self.adjacency == "replace-one" and not without_replacement else z

    @property
    def _of_everybody(self) -> DpEvent:
        sampled = isinstance(self.event, (PoissonSampledDpEvent, SampledWithoutReplacementDpEvent))
        return self.event.event if sampled else self.event


def unamplified(noise: float | DpEvent) -> Release:
    """A sum over everybody; neighbours have one member more or less.

    noise: a Gaussian's multiplier, or the event of any mechanism over everybody; also in the functions below.
    """
    return Release(_event(noise), "add-remove")


def poisson_sampled(rate: float, noise: float | DpEvent) -> Release:
    """A sum over members that each take part with probability `rate`; neighbours have one member more or less."""
    if not 0 < rate <= 1:
        raise PlanError(f"the sampling rate is {rate:g}; it must be above 0 and at most 1")
    if rate == 1:
        return unamplified(noise)
    return Release(PoissonSampledDpEvent(rate, _event(noise)), "add-remove")


def sampled_without_replacement(population: int, size: int, noise: float | DpEvent) -> Release:
    """A sum over a random subset of exactly `size` members; neighbours have one member replaced. Of Gaussian noise alone."""
    if not 1 <= size <= population:
        raise PlanError(f"a sample of {size} out of {population} cannot be drawn; choose between 1 and {population}")
    if size == population:
        return replaced(noise)
    halved = GaussianDpEvent(_multiplier(noise) / 2)
    return Release(SampledWithoutReplacementDpEvent(population, size, halved), "replace-one", "rdp")


def replaced(noise: float | DpEvent) -> Release:
    """A sum over everybody; neighbours have one member replaced. Of Gaussian noise alone."""
    return Release(gaussian_event(_multiplier(noise)), "replace-one")


def gaussian_event(z: float) -> DpEvent:
    """Gaussian noise of multiplier z on a sum that a member moves by at most the clip norm."""
    return GaussianDpEvent(_positive(z))


def _event(noise: float | DpEvent) -> DpEvent:
    plain = isinstance(noise, (float, int, GaussianDpEvent))
    return gaussian_event(_multiplier(noise)) if plain else noise


def _multiplier(noise: float | DpEvent) -> float:
    """The multiplier of Gaussian noise. With a member replaced, an event does not state the cost of other noise."""
    if isinstance(noise, DpEvent) and not isinstance(noise, GaussianDpEvent):
        raise PlanError(f"with a member replaced, only Gaussian noise is accounted for, and this is {noise}")
    return _positive(getattr(noise, "noise_multiplier", noise))


def _positive(z: float) -> float:
    if not _LEAST_NOISE <= z <= _LARGEST_NOISE:
        raise PlanError(f"the noise multiplier is {z:g}; it must be from {_LEAST_NOISE:g} to {_LARGEST_NOISE:g}")
    return z


def epsilon(release: Release, count: float, delta: float, *, discretization: float = FINE) -> float:
    """An epsilon such that `count` such releases together are (epsilon, delta)-private.

    `discretization` is the widest step of the privacy loss: many releases or small losses use finer steps, and uselessly large
    epsilons coarser ones. Where a quick bound on epsilon exceeds ten thousand, PLD is out of reach, and epsilon is the least of
    the other bounds.

    A count that is not a whole number is allowed for plain Gaussians: it means one release of squared sensitivity `count`.
    """
    _checked(count, delta)
    return _epsilon(release, count, delta, discretization) if count else 0.0


def delta(release: Release, count: float, epsilon: float) -> float:
    """A delta such that `count` such releases are together (epsilon, delta)-private; never below its rounding error."""
    if not (epsilon >= 0 and count >= 0):
        raise PlanError(f"epsilon {epsilon:g} and {count} releases must not be negative")
    if count == 0:
        return 0.0
    everybody = 1.0
    if release.gaussian:  # Balle and Wang's equation 6: Phi(1 / 2z - epsilon z) - exp(epsilon) Phi(-1 / 2z - epsilon z)
        z = release.multiplier / math.sqrt(count)
        first, second = log_ndtr(0.5 / z - epsilon * z), epsilon + log_ndtr(-0.5 / z - epsilon * z)
        everybody = float(-np.exp(first) * np.expm1(min(second - first, 0.0)))
    if release.plain:
        return everybody
    step = pld_step(release, count, FINE)
    if step is None:
        return min(everybody, float(compute_delta(ORDERS, rdp(release, count, ORDERS), epsilon)[0]))
    found = float(distribution(release, math.ceil(count), step).get_delta(epsilon))
    return min(1.0, max(found, least_delta(count)))


def rdp(release: Release, count: float, orders: Sequence[float]) -> tuple[float, ...]:
    """The Renyi divergence of `count` such releases at each of `orders`, for composition with other runs."""
    return tuple(count * one for one in renyi(release, tuple(map(float, orders))))


def largest_count(release: Release, epsilon: float, delta: float) -> int:
    """The number of such releases that fit: never too many, exact below a thousand, and to one in a thousand above.

    At most ten million, and at most as many as still let PLD resolve `delta`.
    """
    _checked(1, delta)
    most = _MOST_RELEASES if release.plain else min(_MOST_RELEASES, int(delta * 1e13))
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

    def measure(step: float) -> Callable[[float], float]:
        return lambda z: _epsilon(release_at(z), count, delta, step)

    first = release_at(1.0)
    if first.plain or not first.gaussian:
        return _descend(measure(FINE), epsilon, 1.0)
    if first.accountant == "pld":
        steps = [COARSEST] if coarse else [COARSE, FINE]
    else:
        steps = [] if coarse and epsilon > _FEW_ORDERS_DO else [FINE]
    found = _descend(lambda z: quick(release_at(z), count, delta), epsilon, 1.0)
    for step in steps:
        here, beyond = ((z, quick(release_at(z), count, delta)) for z in (found, 1.02 * found))
        found = _descend(measure(step), epsilon, found, _power(here, beyond))
    return found


def _descend(measure: Callable[[float], float], target: float, z: float, power: float = 1.5) -> float:
    """A z with 0.99 target < measure(z) <= target: secants of log epsilon over log z inside a bracket that shrinks.

    power: the first guess of p, if epsilon falls as z^-p.
    """
    low, high, before = 0.0, math.inf, (0.0, 0.0)
    for turn in range(1, 200):
        # Rounded up to six digits, so that the printed and stored number is the accounted one.
        grain = 10.0 ** (math.floor(math.log10(z)) - 5)
        z = float(f"{math.ceil(z / grain - 1e-6) * grain:.6g}")
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


def _checked(count: float, delta: float) -> None:
    if not 0 <= count < math.inf:
        raise PlanError(f"{count} releases cannot be accounted for; choose at least 0")
    if not 0 < delta < 1:
        raise PlanError(
            f"delta is {delta:g}; it must be between 0 and 1, and well below one over the number of members"
        )


@lru_cache(maxsize=1024)
def _epsilon(release: Release, count: float, delta: float, discretization: float) -> float:
    everybody = without_sampling(release, count, delta)
    if release.plain:
        return everybody
    step = pld_step(release, count, discretization)
    if step is None:
        closed = min(everybody, by_participation(release, count, delta))
        return min(closed, by_rdp(release, count, delta))
    if delta < least_delta(count):
        raise PlanError(
            f"delta {delta:g} is below {least_delta(count):g}, the least that rounding lets PLD resolve "
            f"over {count} releases; choose a larger delta"
        )
    return min(everybody, float(distribution(release, math.ceil(count), step).get_epsilon(delta)))


def without_sampling(release: Release, count: float, delta: float) -> float:
    """Epsilon as if everybody took part: `count` Gaussians of z are one of z / sqrt(count), exactly; else infinite."""
    if not release.gaussian:
        return math.inf
    return gaussian_epsilon(release.multiplier / math.sqrt(count), delta)


@lru_cache(maxsize=1024)
def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """The exact epsilon of one Gaussian release at delta, where the noise has `multiplier` times the sensitivity.

    Balle and Wang, "Improving the Gaussian Mechanism" (2018).
    """
    with np.errstate(divide="ignore"):  # it takes the log of a difference, which is 0 for the largest multipliers
        return float(get_epsilon_gaussian(multiplier, delta))


def by_participation(release: Release, count: float, delta: float) -> float:
    """Epsilon as if a member's k participations were known; more than k have probability at most delta / 2.

    Given the rounds it takes part in, the member's releases are at most k Gaussians, and mixing over those rounds keeps
    (epsilon, delta / 2). The event of more than k participations adds its probability to delta and -log(1 - its probability) to
    epsilon. Tight where noise is very small.
    """
    if not (release.gaussian and isinstance(release.event, PoissonSampledDpEvent)):
        return math.inf
    most = max(1, int(binom.isf(delta / 2, count, release.rate)))
    return without_sampling(release, min(most, count), delta / 2) - math.log1p(-delta / 2)


def by_rdp(release: Release, count: float, delta: float, at: tuple[float, ...] = ()) -> float:
    """Epsilon from Renyi divergences at some orders, by the conversion of Canonne, Kamath and Steinke (2020)."""
    at = at or ORDERS
    divergences = [count * one for one in renyi(release, at)]
    return float(compute_epsilon(at, divergences, delta)[0])


def quick(release: Release, count: float, delta: float) -> float:
    """The least of the bounds that take milliseconds."""
    closed = min(without_sampling(release, count, delta), by_participation(release, count, delta))
    return min(closed, by_rdp(release, count, delta, FEW_ORDERS))


@lru_cache(maxsize=256)
def renyi(release: Release, at: tuple[float, ...]) -> tuple[float, ...]:
    """Renyi divergences of one release: with sampling, if dp_accounting has them, or without, whichever are smaller."""
    if not release.gaussian:
        return _renyi_of_any(release, at)
    plain = np.asarray(at) / (2 * release.multiplier**2)
    unknown = isinstance(release.event, PoissonSampledDpEvent) and release.adjacency == "replace-one"
    if release.plain or unknown:
        return tuple(plain.tolist())
    with _hushed():
        accountant = RdpAccountant(at, _RELATIONS[release.adjacency]).compose(release.event)
    sampled = np.maximum(accountant.rdp, 0) + 1e-14  # its sums are rounded, and may come out below zero
    return tuple(np.minimum(plain, sampled).tolist())


def _renyi_of_any(release: Release, at: tuple[float, ...]) -> tuple[float, ...]:
    """Renyi divergences with sampling, if dp_accounting has them; else without it, which gives larger or equal ones."""
    for event in (release.event, release._of_everybody):
        accountant = RdpAccountant(at, _RELATIONS[release.adjacency])
        if accountant.supports(event):
            return tuple(np.maximum(accountant.compose(event).rdp, 0).tolist())
    raise PlanError(f"dp_accounting knows no Renyi divergence of {release.event}, which this ledger composes by")


@contextmanager
def _hushed() -> Iterator[None]:
    """Hides dp_accounting's warnings: an order at which its series does not converge counts as infinite; log(0) as well."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(divide="ignore"):
            yield
    finally:
        logger.setLevel(level)


def pld_step(release: Release, count: float, widest: float) -> float | None:
    """The discretisation step; None if PLD is not the accountant, or costs too much time and memory.

    The error of `count` steps of width h grows as count h^2, and steps wider than the losses hide them, so h is at most 0.01 /
    sqrt(count) and 1/2000 of the largest loss that matters (for the step of record, and in proportion for others). Where
    epsilon is large, h grows with it.
    """
    if release.plain or release.accountant != "pld":
        return None
    scale, rate = quick(release, count, 1e-5) if release.gaussian else 0.0, release.rate
    if scale > _MOST_BY_PLD:
        return None
    if release.gaussian:
        everybody = 0.5 / release.multiplier**2 + 10 / release.multiplier  # the loss at ten standard deviations
    else:
        everybody = 1 / getattr(release._of_everybody, "noise_multiplier", 1.0)  # Laplace's; a guess for other events
    without = math.log1p(-rate) if rate < 1 else -math.inf
    loss = float(np.logaddexp(without, math.log(rate) + everybody))
    finest = min(widest, 100 * widest / math.sqrt(count), loss / 2000 * widest / FINE)
    return max(finest, loss / 2e5, scale / 3e5)


def least_delta(count: float) -> float:
    """Below this delta, rounding in PLD's transforms *under*states epsilon; seen with Gaussians, whose epsilon is known."""
    return max(1e-10, 1e-13 * count)


@lru_cache(maxsize=2)  # for a whole curve of epsilon and delta
def distribution(release: Release, count: int, step: float) -> PLDAccountant | Composed:
    """The accountant of record: the distribution of the privacy loss of `count` releases, in steps, rounded up."""
    if release.gaussian and 0 < release.rate < 1 and release.adjacency == "add-remove":
        return composed(release.multiplier, release.rate, count, step)
    accountant = PLDAccountant(_RELATIONS[release.adjacency], step)
    if not accountant.supports(release.event):
        raise PlanError(f"dp_accounting knows no privacy loss distribution of {release.event}")
    return accountant.compose(release.event, count)


def composed(z: float, rate: float, count: int, step: float) -> Composed:
    """The composition by `PLDAccountant` of `count` Gaussians of multiplier z, each over a Poisson sample; 0 < rate < 1.

    The library computes in Python, for one loss at a time, the observation x that has this loss, and a grid has some 100,000
    losses. Here its formulas are evaluated over arrays. With sensitivity 1, sampling rate q and L(x) = -(1/2 + x) / z^2:

        a member less    loss(x) = log(1 - q + q e^L(x))            x = L^-1(log(1 + (e^loss - 1) / q))
        a member more    loss(x) = -log(1 - q + q e^-L(x - 1))      x = 1 + L^-1(-log(1 + (e^-loss - 1) / q))

    The grid, its rounding upwards and composition are the library's own, and so are the resulting numbers: upper bounds.
    """
    of_one = list[PLDPmf]()
    for kind in (AdjacencyType.REMOVE, AdjacencyType.ADD):
        loss = GaussianPrivacyLoss(z, sampling_prob=rate, adjacency_type=kind)
        bounds = loss.connect_dots_bounds()  # on multiples of `step` ("connect the dots", Doroshenko et al. 2022)
        low, high = math.floor(bounds.epsilon_lower / step), math.ceil(bounds.epsilon_upper / step)
        deltas = hockey_sticks(loss, np.arange(low, high + 1) * step)
        of_one.append(create_pmf_pessimistic_connect_dots_fixed_gap(step, low, high, deltas))
    return Composed(identity(step).compose(PrivacyLossDistribution(*of_one).self_compose(count)))


@dataclass(frozen=True)
class Composed:
    """The distribution of the privacy loss, with the queries of `PLDAccountant`."""

    pld: PrivacyLossDistribution

    def get_epsilon(self, delta: float) -> float:
        return float(self.pld.get_epsilon_for_delta(delta))

    def get_delta(self, epsilon: float) -> float:
        return float(self.pld.get_delta_for_epsilon(epsilon))


def hockey_sticks(loss: GaussianPrivacyLoss, epsilons: Floats) -> Floats:
    """(n,) the hockey-stick divergence at each epsilon: `loss.get_delta_for_epsilon(epsilons)`."""
    # With a member less no loss is below this bound, with a member more none above -bound.
    bound = math.log1p(-loss.sampling_prob)
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
    close = np.abs(less - least) <= 1e-9 * np.maximum(np.abs(less), abs(least))  # as `math.isclose`
    unsampled[close] = -np.inf
    if np.isnan(unsampled).any():
        raise PlanError(f"a sampling rate of {q!r} is too close to 0 or 1 to be accounted for in floating point")
    x: Floats = -0.5 - sign * unsampled * loss.standard_deviation**2
    return x if sign > 0 else 1.0 + x
