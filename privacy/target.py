"""The privacy requested of a run: an epsilon, a noise multiplier, or both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from privacy import accounting
from privacy.accounting import Release
from privacy.errors import BudgetExhausted

Sampled = Callable[[float], Release]  # one release at a noise multiplier


@dataclass(frozen=True)
class Target:
    """The requested privacy: a target epsilon, a noise multiplier, or both; with both, epsilon is a limit."""

    epsilon: float | None
    noise_multiplier: float | None
    delta: float
    stop_early: bool = False

    def multiplier(self, release_at: Sampled, count: float) -> float:
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        return accounting.calibrate(release_at, count, self.epsilon or 0.0, self.delta)

    def allowed(self, release: Release, count: int) -> int:
        """The number of `count` releases that fit the limit. BudgetExhausted if not all fit, unless the run may stop early."""
        if self.epsilon is None or self.noise_multiplier is None:
            return count
        spent = accounting.epsilon(release, count, self.delta)
        if spent <= self.epsilon:
            return count
        if self.stop_early:
            return min(count, accounting.largest_count(release, self.epsilon, self.delta))
        raise BudgetExhausted(
            f"{count} releases at privacy.noise_multiplier = {self.noise_multiplier:g} cost epsilon {spent:.4g}, above "
            f"privacy.epsilon = {self.epsilon:g}: raise either, lower federation.rounds, or set privacy.on_exhausted = 'stop'"
        )

    def rounds(self, release: Release, exposures: Sequence[float]) -> int:
        """The number of rounds that fit the limit, as in `allowed`; the first r rounds cost exposures[r] releases."""
        if self.epsilon is None or self.noise_multiplier is None:
            return len(exposures) - 1
        spent = accounting.epsilon(release, exposures[-1], self.delta)
        if spent > self.epsilon and not self.stop_early:
            raise BudgetExhausted(
                f"{len(exposures) - 1} rounds at privacy.noise_multiplier = {self.noise_multiplier:g} cost epsilon "
                f"{spent:.4g}, above privacy.epsilon = {self.epsilon:g}: raise either, lower federation.rounds, or set "
                "privacy.on_exhausted = 'stop'"
            )
        fits = (r for r in range(len(exposures)) if self._admits(release, exposures[r]))
        return max(fits)

    def _admits(self, release: Release, exposure: float) -> bool:
        return not exposure or accounting.epsilon(release, exposure, self.delta) <= (self.epsilon or math.inf)

    def some(self, count: int) -> int:
        """The count; BudgetExhausted if it is zero."""
        if count:
            return count
        raise BudgetExhausted(
            f"not even one release at privacy.noise_multiplier = {self.noise_multiplier:g} fits privacy.epsilon = "
            f"{self.epsilon:g}: raise either"
        )
