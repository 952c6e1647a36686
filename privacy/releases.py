"""One noised sum as an accountant sees it: its sampling, its neighbours, and the law of its noise."""

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


def poisson_sampled(rate: float, z: float) -> Release:
    """A sum over members that each take part with probability `rate`; neighbours have one member more or less."""
    if _checked(rate) == 1:
        return unamplified(z)
    return Release(PoissonSampledDpEvent(rate, GaussianDpEvent(_positive(z))), "add-remove")


def sampled_without_replacement(population: int, size: int, z: float) -> Release:
    """A sum over a random subset of exactly `size` members; neighbours have one member replaced."""
    if not 1 <= size <= population:
        raise PlanError(f"a sample of {size} out of {population} cannot be drawn; choose between 1 and {population}")
    if size == population:
        return replaced(z)
    halved = GaussianDpEvent(_positive(z) / 2)
    return Release(SampledWithoutReplacementDpEvent(population, size, halved), "replace-one", "rdp")


def unamplified(z: float) -> Release:
    """A sum over everybody; neighbours have one member more or less."""
    return Release(GaussianDpEvent(_positive(z)), "add-remove")


def replaced(z: float) -> Release:
    """A sum over everybody; neighbours have one member replaced."""
    return Release(GaussianDpEvent(_positive(z)), "replace-one")


def discrete(z: float) -> Release:
    """A sum over everybody, under noise whose Renyi divergences are at most those of a Gaussian of multiplier z."""
    return Release(_concentrated(_positive(z)), "add-remove", "rdp")


def discrete_sampled(rate: float, z: float) -> Release:
    """The same over members that each take part with probability `rate`; neighbours have one member more or less."""
    if _checked(rate) == 1:
        return discrete(z)
    return Release(PoissonSampledDpEvent(rate, _concentrated(_positive(z))), "add-remove", "rdp")


def discrete_replaced(z: float) -> Release:
    """The same over everybody, one member replaced: a sum moves twice as far, which is charged as half of z."""
    return Release(_concentrated(_positive(z) / 2), "replace-one", "rdp")


def _concentrated(z: float) -> DpEvent:
    """1 / (2 z^2)-concentrated, rounded up. No accountant that asks for exact noise takes such an event."""
    return ZCDpEvent(math.nextafter(1 / (2 * z**2), math.inf))


def _checked(rate: float) -> float:
    if not 0 < rate <= 1:
        raise PlanError(f"the sampling rate is {rate:g}; it must be above 0 and at most 1")
    return rate


def _positive(z: float) -> float:
    if not _LEAST_NOISE <= z < math.inf:
        raise PlanError(
            f"the noise multiplier is {z:g}; no guarantee comes of less than {_LEAST_NOISE:g}, or of no number"
        )
    return z
