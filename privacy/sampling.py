"""Samplers of a round's cohort or of a step's batch.

A sampler both draws and describes one release over its draws to an accountant, so that the accounted sampling is the actual
sampling. Both samplers here rely on secret coins; the privacy statement says from whom they are secret. `public_order` has a
third sampler, without coins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from privacy.accounting import Release

# uniform(n): n independent numbers in [0, 1), from a seeded generator or from a stream that nobody can predict.
Uniform = Callable[[int], NDArray[np.float64]]


class Sampler(Protocol):
    """Draws from members 0 .. population - 1."""

    @property
    def expected(self) -> float:
        """The expected number of members in a draw: public. Private means are divided by it."""

    @property
    def most(self) -> int:
        """The largest number of members that a draw can have: public."""

    @property
    def rate(self) -> float:
        """The probability with which a member is in a draw."""

    def draw(self, uniform: Uniform, round_: int = 0) -> list[int]:
        """One draw, in ascending order. round_: the round's number, used only where draws are fixed beforehand."""

    def release(self, noise: float | DpEvent) -> Release:
        """One noised sum over such a draw, every contribution bounded by C. noise: a Gaussian's multiplier, or an event."""


@dataclass(frozen=True)
class FixedSize:
    """A uniformly random subset of exactly `size` members.

    Neighbours have one member replaced, which moves the sum by up to 2 C: an accountant whose Gaussian has sensitivity one gets
    half the noise multiplier. Amplification by sampling without replacement is accounted by Renyi privacy.
    """

    population: int
    size: int

    @property
    def expected(self) -> float:
        return float(self.size)

    @property
    def most(self) -> int:
        return self.size

    @property
    def rate(self) -> float:
        return self.size / self.population

    def draw(self, uniform: Uniform, round_: int = 0) -> list[int]:
        coins = uniform(self.population)
        if self.size == self.population:
            return list(range(self.population))
        largest = np.partition(coins, self.size - 1)[self.size - 1] if self.size else -1.0
        below, equal = np.flatnonzero(coins < largest), np.flatnonzero(coins == largest)
        return sorted([*below.tolist(), *equal[: self.size - len(below)].tolist()])  # ties: the first members

    def release(self, noise: float | DpEvent) -> Release:
        from privacy.accounting import sampled_without_replacement

        return sampled_without_replacement(self.population, self.size, noise)


@dataclass(frozen=True)
class Poisson:
    """Poisson sampling: each member is drawn independently with probability `rate`, and the draw may be empty.

    Neighbours have one member more or less, which moves the sum by up to C.
    """

    population: int
    rate: float

    @property
    def expected(self) -> float:
        return self.most * self.rate

    @property
    def most(self) -> int:
        return self.population

    def seldom_exceeded(self, chance: float) -> int:
        """A size that a draw exceeds with a probability of at most `chance`; computed from `most` and `rate` alone.

        Chernoff's bound: of n coins of rate q at least m come up with a probability of at most exp(-n KL(m/n || q)), if m > n
        q.
        """
        for members in range(math.ceil(self.expected), self.most):
            if -self.most * _divergence((members + 1) / self.most, self.rate) <= math.log(chance):
                return members
        return self.most

    def draw(self, uniform: Uniform, round_: int = 0) -> list[int]:
        return np.flatnonzero(uniform(self.population) < self.rate).tolist()

    def release(self, noise: float | DpEvent) -> Release:
        from privacy.accounting import poisson_sampled

        return poisson_sampled(self.rate, noise)


def _divergence(share: float, rate: float) -> float:
    """KL(share || rate) of two coins, for a share above the rate."""
    without = (1 - share) * math.log((1 - share) / (1 - rate)) if share < 1 else 0.0
    return share * math.log(share / rate) + without
