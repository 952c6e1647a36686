"""Scheduled participation: a public order in which members take part, instead of secret coins.

The order is a permutation of all places, computed from a public seed alone. Round t takes the next `size` places of it, and
after the last place the order begins again. So no member takes part twice within `gap` = places // size rounds, and nothing
about a cohort is secret: everybody may know its members, its size and the times of its rounds.

Guarantee. Neighbours differ in the presence of one member's data; without the data its contributions are zeros, and the order,
the number of members and everybody's turns are the same. The number and spacing of a member's turns bound the privacy loss
(`correlation.exposures`). Amplification by sampling is not used.

A place without a member stays empty, and no other member takes it. Members that join later take empty places: their turns are
as rare as everybody's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from privacy.entropy import SeededEntropy
from privacy.errors import PlanError
from privacy.sampling import Uniform

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from privacy.accounting import Release


@dataclass(frozen=True)
class PublicOrder:
    """A `Sampler` whose draws are turns: everybody who knows the seed computes the same cohort of round t.

    population: the number of members. size: the number of places whose turn is in one round. vacant: the indices of the empty
    places; members hold the other places, in their order.
    """

    population: int
    size: int
    vacant: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        inside = set(self.vacant) <= set(range(self.places)) and len(set(self.vacant)) == len(self.vacant)
        if not (inside and 1 <= self.size <= self.places):
            raise PlanError(
                f"a public order of {self.population} members and the vacant places {self.vacant} needs 1 to "
                f"{self.population + len(self.vacant)} members a round and each vacant place once, and got {self.size} members"
            )

    @property
    def places(self) -> int:
        return self.population + len(self.vacant)

    @property
    def expected(self) -> float:
        return float(self.size)

    @property
    def most(self) -> int:
        return self.size

    @property
    def rate(self) -> float:
        return self.size / self.places

    @property
    def gap(self) -> int:
        """A member that takes part in round t does not take part again before round t + gap."""
        return self.places // self.size

    def turns(self, rounds: int) -> int:
        """The most rounds of the first `rounds` that one member takes part in."""
        return -(-rounds * self.size // self.places)

    def draw(self, uniform: Uniform, round_: int = 0) -> list[int]:
        """The members whose turn is in that round, in ascending order. Tosses no coin."""
        return self.of_round(round_)

    def of_round(self, round_: int) -> list[int]:
        """The members whose turn is in that round, in ascending order."""
        at = (round_ * self.size + np.arange(self.size)) % self.places
        members = self._members[at]
        return sorted(members[members >= 0].tolist())

    def places_of_round(self, round_: int) -> NDArray[np.int64]:
        """(size,) the places whose turn is in that round, held or empty."""
        return self._order[(round_ * self.size + np.arange(self.size)) % self.places]

    def has_turn(self, member: int, round_: int) -> bool:
        """Whether it is that member's turn."""
        return int(self._turns[member] - round_ * self.size) % self.places < self.size

    def release(self, noise: float | DpEvent) -> Release:
        """One noised sum, for a member that takes part in it; neighbours have the member's data or not."""
        from privacy.accounting import unamplified

        return unamplified(noise)

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        """(places,) the places in the order of their turns; keystreams are the same in every version."""
        words = SeededEntropy(self.seed).stream("public order").words(self.places)
        return np.argsort(words, kind="stable")

    @cached_property
    def _members(self) -> NDArray[np.int64]:
        """(places,) the members in the order of their turns, -1 for empty places."""
        held = np.ones(self.places, dtype=bool)
        held[list(self.vacant)] = False
        members = np.where(held, np.cumsum(held) - 1, -1)
        return members[self._order]

    @cached_property
    def _turns(self) -> NDArray[np.int64]:
        """(population,) where each member stands in the order."""
        found = np.empty(self.population, dtype=np.int64)
        found[self._members[self._members >= 0]] = np.flatnonzero(self._members >= 0)
        return found
