"""How many phantoms stand beside the units of a run, worked out from public numbers alone.

A phantom is an audited unit that is nobody's data: beside clients a client, beside examples an example. A fair coin decides
whether it is a member. A member pulls the model along a random direction of its own, as far as the clip norm C lets any unit;
one that is no member is there too, and contributes zeros. So members and non-members differ as the guarantee's neighbours do,
whoever adds the noise, and no real unit is held out.

What m phantoms cost. With R of N clients expected in a round, k = m R / N phantoms are expected beside them, half of which
send a vector of length C in a random direction. On each of d coordinates of a sum that is a variance of k C^2 / (2 d), beside
a noise of (z C)^2, so that the noise is as if its variance were larger by the share

    central          k / (2 d z^2)
    distributed      the same, and the shares of noise of those that may vanish or collude among k more, who bring none
    local            k / R (1 + 1 / (2 d z^2)), since a phantom adds noise to what it sends as everybody does
    steps            b m / n / (2 d z^2): of n examples (or groups) a step draws b, and of m phantoms as large a share

By default there are as many as cost at most a hundredth (`COST`), no more than a tenth of the units and 2,000, and none where
that would be fewer than 20: too few to tell anything. A mean is divided by what it would be divided by without them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from secure_fed.config import RunConfig

COST = 0.01  # of the variance of the noise
FEWEST, MOST, SHARE = 20, 2000, 0.1


@dataclass(frozen=True)
class Room:
    """Public numbers of a run. units: clients, or examples or groups of all of them. expected: of the units, in a release: a
    sum's cohort, or a step's batch. numbers: that train. noise_multiplier: z; 0 without privacy. own_noise: every client noises
    its own contribution, phantoms too. lost: of a sum's shares of noise, the part that may be missing.
    """

    units: int
    expected: float
    numbers: int
    noise_multiplier: float
    own_noise: bool = False
    lost: float = 0.0

    def cost(self, phantoms: int) -> float:
        """By what share of its variance so many phantoms make the noise seem larger; infinite without noise."""
        if not (self.noise_multiplier and self.numbers and self.units):
            return math.inf
        share = phantoms / self.units
        pulling = share * self.expected / (2 * self.numbers * self.noise_multiplier**2)
        if self.own_noise:
            return share + pulling / self.expected
        return pulling + share * self.lost / (1 - self.lost)


@dataclass(frozen=True)
class Count:
    """How many phantoms there are; why, if there are none."""

    phantoms: int = 0
    why: str = ""


def count(config: RunConfig, room: Room) -> Count:
    """How many a configuration asks for, in this room."""
    chosen = config.evaluation.phantoms
    if chosen is not None:
        return Count(chosen, "" if chosen else "evaluation.phantoms is 0")
    share = room.cost(1)
    fit = min(MOST, math.floor(SHARE * room.units + _ROUNDING), math.floor(COST / share) if share else MOST)
    if fit >= FEWEST:
        return Count(fit)
    return Count(
        0,
        f"phantoms are at most a tenth of the {room.units:,} units and cost at most {COST:.0%} of the noise, which leaves "
        f"{fit}: too few to tell anything. evaluation.phantoms = {FEWEST} has so many all the same, and costs "
        f"{100 * room.cost(FEWEST):.2g} %",
    )


_ROUNDING = 1e-9
