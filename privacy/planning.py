"""The noise that a privacy target needs, and its effect on a mean, computed before training.

The error is the error of a round's raw mean, with noise N(0, (z C / cohort)^2) on every coordinate. Methods that denoise a mean
have a smaller error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from privacy import accounting
from privacy.accounting import Release
from privacy.errors import PlanError
from privacy.sampling import FixedSize, Poisson

Outlook = Literal["long", "hard", "fine"]

# Lengths of a round's noise, in units of the clip norm; no mean of clipped contributions is longer than one clip norm.
LONG, HARD = 1.0, 0.1


@dataclass(frozen=True)
class Setting:
    """The releases of a run: `rounds` noised sums over about `cohort` of `clients`, kept (epsilon, delta)-private.

    dim: the number of coordinates of a contribution, if known. sampling: each client independently ("poisson"), or exactly
    `cohort` clients ("fixed").
    """

    clients: int
    cohort: int
    rounds: int
    delta: float
    sampling: Literal["poisson", "fixed"] = "poisson"
    dim: int | None = None
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("clients", "cohort", "rounds", "dim"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise PlanError(f"{name} is {value}; it must be at least 1")
        if self.cohort > self.clients:
            raise PlanError(f"cohort is {self.cohort}, of {self.clients} clients; choose at most {self.clients}")
        if not 0 < self.delta * self.clients < 1:
            raise PlanError(
                f"delta is {self.delta:g}; choose it above 0 and well below 1/clients = {1 / self.clients:g}"
            )
        if not 0 < self.clip_norm < math.inf:
            raise PlanError(f"clip_norm is {self.clip_norm:g}; it must be a positive, finite number")

    @property
    def rate(self) -> float:
        return self.cohort / self.clients

    def release(self, noise_multiplier: float) -> Release:
        """One round, against an observer who sees only the models."""
        sampler = FixedSize(self.clients, self.cohort) if self.sampling == "fixed" else Poisson(self.clients, self.rate)
        return sampler.release(noise_multiplier)

    def seen(self, noise_multiplier: float) -> Release:
        """One round, against an observer who sees the cohort: no amplification."""
        made = accounting.replaced if self.sampling == "fixed" else accounting.unamplified
        return made(noise_multiplier)


@dataclass(frozen=True)
class Forecast:
    """A setting with its noise. noise_std: on one coordinate of a round's mean. noise_norm: expected length of it all."""

    setting: Setting
    noise_multiplier: float
    epsilon: float
    epsilon_participants: float

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.setting.clip_norm / self.setting.cohort

    @property
    def noise_norm(self) -> float | None:
        return None if self.setting.dim is None else math.sqrt(self.setting.dim) * self.noise_std

    @property
    def outlook(self) -> Outlook | None:
        """long: the noise is longer than the longest possible mean; hard: longer than a tenth of that; fine: shorter.

        Long noise may be harmless: it is spread over all directions, and a large model is flat in most of them.
        """
        if self.noise_norm is None:
            return None
        ratio = self.noise_norm / self.setting.clip_norm
        return "long" if ratio > LONG else "hard" if ratio > HARD else "fine"


def for_epsilon(setting: Setting, epsilon: float) -> Forecast:
    """The least noise that meets the target."""
    return for_noise(setting, accounting.calibrate(setting.release, setting.rounds, epsilon, setting.delta))


def for_noise(setting: Setting, noise_multiplier: float) -> Forecast:
    """The cost of a given noise."""
    release, seen = setting.release(noise_multiplier), setting.seen(noise_multiplier)
    spent = accounting.epsilon(release, setting.rounds, setting.delta)
    return Forecast(setting, noise_multiplier, spent, accounting.epsilon(seen, setting.rounds, setting.delta))


def alternatives(setting: Setting, epsilons: Iterable[float]) -> list[Forecast]:
    """Plans for other targets, and for cohorts half, as large, twice and four times. Coarse, so with slightly more noise.

    `epsilon` is the target here; the true epsilon does not exceed it.
    """
    cohorts = sorted({min(max(1, cohort), setting.clients) for cohort in _scaled(setting.cohort)})
    return [_coarse(replace(setting, cohort=cohort), target) for target in epsilons for cohort in cohorts]


def _coarse(setting: Setting, target: float) -> Forecast:
    z = accounting.calibrate(setting.release, setting.rounds, target, setting.delta, coarse=True)
    return Forecast(setting, z, target, accounting.epsilon(setting.seen(z), setting.rounds, setting.delta))


def _scaled(cohort: int) -> tuple[int, ...]:
    return cohort // 2, cohort, 2 * cohort, 4 * cohort
