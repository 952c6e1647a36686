"""Who takes part in a round.

A sampler is a value that says what law its draws follow, so that accounting can never be told of another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Sampler(Protocol):
    """Draws cohorts from clients 0 .. population - 1."""

    @property
    def expected(self) -> float:
        """The expected cohort size."""

    def draw(self, rng: np.random.Generator) -> list[int]:
        """One cohort, in ascending order."""


@dataclass(frozen=True)
class FixedSize:
    """A uniformly random subset of exactly `size` clients."""

    population: int
    size: int

    @property
    def expected(self) -> float:
        return float(self.size)

    def draw(self, rng: np.random.Generator) -> list[int]:
        return sorted(rng.choice(self.population, self.size, replace=False).tolist())


@dataclass(frozen=True)
class Poisson:
    """Each client by a coin of its own that lands with probability `rate`; the cohort may be empty."""

    population: int
    rate: float

    @property
    def expected(self) -> float:
        return self.population * self.rate

    def draw(self, rng: np.random.Generator) -> list[int]:
        return np.flatnonzero(rng.random(self.population) < self.rate).tolist()
