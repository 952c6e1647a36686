"""Phantoms: their number beside the units of a run, computed from public numbers alone, and their coins.

A phantom is an audited unit that is nobody's data: a client beside clients, an example beside examples. A fair coin decides
whether it is a member. A member pulls the model along a random direction of its own, as far as the clip norm C allows any unit;
a non-member takes part too, and contributes zeros. So members and non-members differ as the guarantee's neighbouring data sets
do, whoever adds the noise, and no real unit is held out.

The cost of m phantoms. With R of N clients expected in a round, k = m R / N phantoms are expected beside them, half of which
send a vector of length C in a random direction. On each of d coordinates of a sum this is a variance of k C^2 / (2 d), beside
a noise of (z C)^2, so that the variance of the noise seems larger by the share

    central          k / (2 d z^2)
    distributed      the same, plus the noise shares of the dropped or colluding clients among k more, who add none
    local            k / R (1 + 1 / (2 d z^2)), since a phantom adds noise to its contribution like every client
    steps            b m / n / (2 d z^2): a step draws b of n examples (or groups), and the same share of m phantoms

By default their number is the largest that costs at most a hundredth (`COST`), at most a tenth of the units and 2,000, and 0 if
that would be fewer than 20, which are too few for an audit, or fewer than `Room.fewest`. The divisor of a mean is
the same as without phantoms.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from secure_fed.config import RunConfig
from secure_fed.learning.audit_pool.pool import AuditPool, draws, kind_of
from secure_fed.learning.audit_pool.unit import Unit
from secure_fed.learning.data.pointing import Pointing

COST = 0.01  # of the variance of the noise
FEWEST, MOST, SHARE = 20, 2000, 0.1


@dataclass(frozen=True)
class Room:
    """Public numbers of a run. units: the number of clients, or of all their examples or groups. expected: the expected number
    of units in a release: a sum's cohort, or a step's batch. numbers: the number of trained entries. noise_multiplier: z; 0
    without privacy. own_noise: whether every client noises its own contribution, phantoms too. lost: the part of a sum's noise
    shares that may be missing. fewest: the number of phantoms that is needed if every sum needs a phantom.
    """

    units: int
    expected: float
    numbers: int
    noise_multiplier: float
    own_noise: bool = False
    lost: float = 0.0
    fewest: int = 0

    def cost(self, phantoms: int) -> float:
        """The share by which these phantoms make the variance of the noise seem larger; infinite without noise."""
        if not (self.noise_multiplier and self.numbers and self.units):
            return math.inf
        share = phantoms / self.units
        pulling = share * self.expected / (2 * self.numbers * self.noise_multiplier**2)
        if self.own_noise:
            return share + pulling / self.expected
        return pulling + share * self.lost / (1 - self.lost)


@dataclass(frozen=True)
class Count:
    """The number of phantoms; why, if there are none."""

    phantoms: int = 0
    why: str = ""


def count(config: RunConfig, room: Room) -> Count:
    """The number of phantoms of a configuration, given these public numbers."""
    chosen = config.evaluation.phantoms
    if chosen is not None:
        return Count(chosen, "" if chosen else "evaluation.phantoms is 0")
    share = room.cost(1)
    fit = min(MOST, math.floor(SHARE * room.units + 1e-9), math.floor(COST / share) if share else MOST)
    if fit >= max(FEWEST, room.fewest):
        return Count(fit)
    if fit >= FEWEST:
        return Count(
            0, f"{fit} phantoms fit, and masked sums of a public order need {room.fewest} so that no sum is without one"
        )
    return Count(
        0,
        f"phantoms are at most a tenth of the {room.units:,} units and cost at most {COST:.0%} of the noise, which leaves "
        f"{fit}: too few to measure anything. evaluation.phantoms = {FEWEST} adds that many anyway, and costs "
        f"{100 * room.cost(FEWEST):.2g} %",
    )


def phantoms(config: RunConfig, count: Count, names: Sequence[str], units: Sequence[int]) -> AuditPool:
    """The phantoms of a federation of these clients, with their coins tossed. units: the number of each client's units.

    Beside clients, phantoms are separate clients, "phantom-0007". Beside examples or groups, each is an example at a client,
    "client-0003/phantom-0007", spread over the clients in proportion to their units. A coin is a keyed hash of the name under
    the seed. Neither the coin nor the direction depends on anybody's data.
    """
    kind, seed = kind_of(config), config.federation.seed
    word = "phantom"
    while any(name.startswith(f"{word}-") for name in names):
        word = f"{word}_"  # a user's client has this name
    called = [f"{word}-{number:04d}" for number in range(count.phantoms)]
    if kind == "client":
        found = [Unit(name, name, ()) for name in called]
    else:
        hosts = _hosts(count.phantoms, units)
        placed = [(names[host], f"{names[host]}/{name}") for host, name in zip(hosts, called, strict=True)]
        found = [Unit(name, client, (Pointing(None, name, seed),)) for client, name in placed]
    key = hashlib.sha256(f"phantoms of seed {seed}".encode()).digest()
    coins = np.array([draws(key, unit.name.encode())[1] < 0.5 for unit in found], dtype=bool)
    return AuditPool(
        kind, tuple(names), (), units=tuple(found), members=coins, why=count.why, of="phantoms", directions=True
    )


def _hosts(count: int, units: Sequence[int]) -> list[int]:
    """(count,) indices of clients, spread evenly over all their units."""
    if not count:
        return []
    upto = np.cumsum(units)
    at = (np.arange(count) + 0.5) / count * (upto[-1] if len(upto) else 0)
    return [int(host) for host in np.searchsorted(upto, at, side="right")]
