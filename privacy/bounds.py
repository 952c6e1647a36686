"""Upper bounds on epsilon, one for each kind of accountant.

Every number is an upper bound: a grid, a rounding or a shortcut may only make it larger. `dp_accounting` assumes a Gaussian of
sensitivity one. Where neighbours have one member *replaced*, a sum moves by up to 2 C, so an accountant that assumes add-remove
neighbours gets z / 2.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.dp_event import (
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    ZCDpEvent,
)
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant, compute_epsilon
from scipy.stats import binom

from privacy import concentrated, gaussian, sampled_gaussian
from privacy.errors import PlanError

Adjacency = Literal["add-remove", "replace-one"]

FINE, COARSE, COARSEST = 1e-4, 5e-4, 2e-3  # steps of the privacy loss: of record, for first guesses, and for tables
ORDERS = tuple(map(float, (*range(2, 33), 36, 40, 48, 56, 64, 80, 96, 128, 192, 256)))
FEW_ORDERS = tuple(map(float, (2, 3, 4, 6, 8, 11, 16, 24, 32, 48, 64)))
_RELATIONS = {"add-remove": NeighboringRelation.ADD_OR_REMOVE_ONE, "replace-one": NeighboringRelation.REPLACE_ONE}
_MOST_BY_PLD = 1e4  # beyond this epsilon a distribution is too wide to compute


@dataclass(frozen=True)
class Release:
    """One release as an accountant sees it: its event, its neighbours, and 'pld' or 'rdp'."""

    event: DpEvent
    adjacency: Adjacency
    accountant: Literal["pld", "rdp"] = "pld"

    @property
    def plain(self) -> bool:
        """Whether everybody takes part, so that the release is an exact Gaussian."""
        return isinstance(self.event, GaussianDpEvent)

    @property
    def concentrated(self) -> bool:
        """Whether all that is known of the noise is that its Renyi divergences are at most a Gaussian's (`concentrated`)."""
        return isinstance(self._of_everybody, ZCDpEvent)

    @property
    def gaussian(self) -> bool:
        """Whether the noise is Gaussian, sampled or not.

        Noise that is neither Gaussian nor `concentrated` is covered only by PLD and dp_accounting's RDP.
        """
        return isinstance(self._of_everybody, GaussianDpEvent)

    @property
    def rate(self) -> float:
        """The probability of Poisson sampling; 1 without Poisson sampling."""
        return float(self.event.sampling_probability) if isinstance(self.event, PoissonSampledDpEvent) else 1.0

    @property
    def multiplier(self) -> float:
        """The noise multiplier, to sensitivity one, of the same release over everybody."""
        event = self._of_everybody
        if isinstance(event, ZCDpEvent):
            return math.sqrt(0.5 / event.rho)  # already halved by its maker for replaced members
        z = float(event.noise_multiplier)
        without_replacement = isinstance(self.event, SampledWithoutReplacementDpEvent)  # already halved, as above
        return z / 2 if self.adjacency == "replace-one" and not without_replacement else z

    @property
    def _of_everybody(self) -> DpEvent:
        sampled = isinstance(self.event, (PoissonSampledDpEvent, SampledWithoutReplacementDpEvent))
        return self.event.event if sampled else self.event


def orders_for(release: Release) -> tuple[float, ...]:
    """The orders at which Renyi divergences are turned into an epsilon."""
    if not release.concentrated:
        return ORDERS
    return concentrated.EVERY_ORDER if release.rate == 1 else concentrated.WHOLE_ORDERS


def without_sampling(release: Release, count: float, delta: float) -> float:
    """Epsilon as if everybody took part: `count` Gaussians of z are one of z / sqrt(count), exactly."""
    if not release.gaussian:
        return math.inf
    return gaussian.gaussian_epsilon(release.multiplier / math.sqrt(count), delta)


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
    """From Renyi divergences at some orders, by the conversion of Canonne, Kamath and Steinke (2020)."""
    at = at or orders_for(release)
    divergences = [count * one for one in renyi(release, at)]
    return float(compute_epsilon(at, divergences, delta)[0])


def quick(release: Release, count: float, delta: float) -> float:
    """The least of the bounds that take milliseconds."""
    if release.concentrated:
        return by_rdp(release, count, delta)
    closed = min(without_sampling(release, count, delta), by_participation(release, count, delta))
    return min(closed, by_rdp(release, count, delta, FEW_ORDERS))


@lru_cache(maxsize=256)
def renyi(release: Release, at: tuple[float, ...]) -> tuple[float, ...]:
    """Renyi divergences of one release: with sampling, if dp_accounting has them, or without, whichever are smaller."""
    if release.concentrated:
        return concentrated.concentrated_divergences(release._of_everybody.rho, release.rate, at)
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


@lru_cache(maxsize=2)  # for a whole curve of epsilon and delta
def distribution(release: Release, count: int, step: float) -> PLDAccountant | sampled_gaussian.Composed:
    """The accountant of record: the distribution of the privacy loss of `count` releases, in steps, rounded up."""
    if release.gaussian and 0 < release.rate < 1 and release.adjacency == "add-remove":
        return sampled_gaussian.composed(release.multiplier, release.rate, count, step)
    accountant = PLDAccountant(_RELATIONS[release.adjacency], step)
    if not accountant.supports(release.event):
        raise PlanError(f"dp_accounting knows no privacy loss distribution of {release.event}")
    return accountant.compose(release.event, count)


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
