"""One noised sum as an accountant sees it: its sampling, its neighbours, and the distribution of its noise."""

from __future__ import annotations

import math

from dp_accounting.dp_event import (
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    ZCDpEvent,
)

from privacy.bounds import Release
from privacy.errors import PlanError

_LEAST_NOISE = 1e-6


def gaussian_event(z: float) -> DpEvent:
    """Gaussian noise of multiplier z on a sum that a member moves by at most the clip norm."""
    return GaussianDpEvent(_positive(z))


def poisson_sampled(rate: float, noise: float | DpEvent) -> Release:
    """A sum over members that each take part with probability `rate`; neighbours have one member more or less.

    noise: a Gaussian's multiplier, or the event of any mechanism over everybody; also in the functions below.
    """
    if _sampling_rate(rate) == 1:
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


def unamplified(noise: float | DpEvent) -> Release:
    """A sum over everybody; neighbours have one member more or less."""
    return Release(_event(noise), "add-remove")


def replaced(noise: float | DpEvent) -> Release:
    """A sum over everybody; neighbours have one member replaced. Of Gaussian noise alone."""
    return Release(gaussian_event(_multiplier(noise)), "replace-one")


def discrete(z: float) -> Release:
    """A sum over everybody, under noise whose Renyi divergences are at most those of a Gaussian of multiplier z."""
    return Release(_concentrated(_positive(z)), "add-remove", "rdp")


def discrete_sampled(rate: float, z: float) -> Release:
    """The same over members that each take part with probability `rate`; neighbours have one member more or less."""
    if _sampling_rate(rate) == 1:
        return discrete(z)
    return Release(PoissonSampledDpEvent(rate, _concentrated(_positive(z))), "add-remove", "rdp")


def discrete_replaced(z: float) -> Release:
    """The same over everybody, one member replaced: a sum moves twice as far, which is charged as half of z."""
    return Release(_concentrated(_positive(z) / 2), "replace-one", "rdp")


def _concentrated(z: float) -> DpEvent:
    """1 / (2 z^2)-concentrated, rounded up. No accountant that asks for exact noise takes such an event."""
    return ZCDpEvent(math.nextafter(1 / (2 * z**2), math.inf))


def _event(noise: float | DpEvent) -> DpEvent:
    plain = isinstance(noise, (float, int, GaussianDpEvent))
    return gaussian_event(_multiplier(noise)) if plain else noise


def _multiplier(noise: float | DpEvent) -> float:
    """The multiplier of Gaussian noise. With a member replaced, an event does not state the cost of other noise."""
    if isinstance(noise, DpEvent) and not isinstance(noise, GaussianDpEvent):
        raise PlanError(f"with a member replaced, only Gaussian noise is accounted for, and this is {noise}")
    return _positive(getattr(noise, "noise_multiplier", noise))


def _sampling_rate(rate: float) -> float:
    if not 0 < rate <= 1:
        raise PlanError(f"the sampling rate is {rate:g}; it must be above 0 and at most 1")
    return rate


def _positive(z: float) -> float:
    if not _LEAST_NOISE <= z < math.inf:
        raise PlanError(f"the noise multiplier is {z:g}; it must be a finite number of at least {_LEAST_NOISE:g}")
    return z
