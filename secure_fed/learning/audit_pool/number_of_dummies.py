"""The number of dummies (`pool.dummies`) beside the units of a run, from public numbers alone.

The cost of m dummies. With R of N clients expected in a round, k = m R / N dummies are expected beside them, half of which
send a vector of length C in a random direction. On each of d coordinates of a sum this is a variance of k C^2 / (2 d), beside
a noise of (z C)^2, so that the variance of the noise seems larger by the share

    central          k / (2 d z^2)
    distributed      the same
    local            k / R (1 + 1 / (2 d z^2)), since a dummy adds noise to its contribution like every client
    steps            b m / n / (2 d z^2): a step draws b of n examples (or persons), and the same share of m dummies

The number of a run by default. It would have `wanted` dummies: 100, whose AUC has an interval of about .1 on either side, or a
tenth as many as its units where that is more, at most 2,000, and fewer, down to 20, where a direction has so many numbers that
more of them would slow down every round. It has the largest number up to this one that costs at most a hundredth of the noise
(`COST`), and none if that is below 20, which is too few for a figure. Nothing else limits it, so there may be more dummies than
units. The divisor of a mean is the same as without dummies.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from secure_fed.config import RunConfig

COST = 0.01  # of the variance of the noise
FEWEST, ENOUGH, MOST, SHARE = 20, 100, 2000, 0.1
_NUMBERS = 1 << 28  # of all directions together: computing them takes seconds in every round


@dataclass(frozen=True)
class Room:
    """Public numbers of a run. units: the number of clients, or of all their examples or persons. expected: the expected number
    of units in a release: a sum's cohort, or a step's batch. numbers: the number of trained entries. noise_multiplier: z; 0
    without privacy. own_noise: whether every client noises its own contribution, dummies too. fewest: the number of dummies
    below which they would take part more often than clients.
    """

    units: int
    expected: float
    numbers: int
    noise_multiplier: float
    own_noise: bool = False
    fewest: int = 0

    def cost(self, dummies: int) -> float:
        """The share by which these dummies make the variance of the noise seem larger; infinite without noise."""
        if not (self.noise_multiplier and self.numbers and self.units):
            return math.inf
        share = dummies / self.units
        pulling = share * self.expected / (2 * self.numbers * self.noise_multiplier**2)
        return share + pulling / self.expected if self.own_noise else pulling

    @property
    def wanted(self) -> int:
        """The number of dummies that a run would have if they cost nothing."""
        usual = min(MOST, max(ENOUGH, math.floor(SHARE * self.units + 1e-9)))
        return max(FEWEST, min(usual, _NUMBERS // max(1, self.numbers)))

    @property
    def affordable(self) -> int:
        """The largest number up to `wanted` that costs at most `COST`."""
        return bisect_right(range(1, self.wanted + 1), COST, key=self.cost)


@dataclass(frozen=True)
class Count:
    """The number of dummies; why, if there are none."""

    dummies: int = 0
    why: str = ""


def count(config: RunConfig, room: Room) -> Count:
    """The number of dummies of a configuration, given these public numbers."""
    chosen = config.evaluation.dummies
    if chosen is not None:
        return Count(chosen, "" if chosen else "evaluation.dummies is 0")
    if (cheap := room.affordable) < FEWEST:
        cost = 100 * room.cost(FEWEST)
        return Count(
            0,
            f"dummy units, which hold nobody's data, cost at most {COST:.0%} of the noise by default, and the {FEWEST} that a "
            "figure needs would cost "
            + (f"{cost:.2g} %; evaluation.dummies = {FEWEST} adds them anyway" if math.isfinite(cost) else "all of it"),
        )
    if cheap < room.fewest:
        return Count(
            0,
            f"{cheap} dummy clients fit, and {room.fewest} are needed, so that none takes part more often than a client",
        )
    return Count(cheap)
