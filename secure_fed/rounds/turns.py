"""The rounds in which clients, or their units, take part, as far as they are public."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from secure_fed.rounds.server import Server

Floats = NDArray[np.float64]


@dataclass
class Turns:
    """The public probability that a unit takes part in a round.

    With cohorts from the public seed it is 0 or 1; with secret coins it is their rate. draw: the participants of a round, if
    they are public. hosts: for each unit the index that must be drawn: its own, or its client's. most: the largest number of
    rounds that any unit takes part in.
    """

    rate: float
    hosts: Sequence[int]
    draw: Callable[[int], Sequence[int]] | None = None
    most: float = float("inf")
    _drawn: list[NDArray[np.bool_]] = field(default_factory=list)

    def rates(self, round_: int) -> Floats:
        """(units,)"""
        if self.draw is None:
            return np.full(len(self.hosts), self.rate)
        while len(self._drawn) <= round_:
            self._drawn.append(np.isin(self.hosts, self.draw(len(self._drawn))))
        before = np.sum(self._drawn[:round_], axis=0) if round_ else np.zeros(len(self.hosts))
        return (self._drawn[round_] & (before < self.most)).astype(float)

    def allowance(self, number: int, who: str, wanted: int, round_: int) -> int:
        """The releases that a client unit may make, with the signature of `ClientSetup.allowance`. Charges no budget."""
        return wanted if self.rates(round_)[number] > 0 else 0


def turns_of(server: Server, hosts: Sequence[int], passes: int) -> Turns:
    """hosts: an index for each unit. passes: of a round. For cohorts that the guarantee hides, only the rate is known."""
    protection, plan = server.protection, server.protection.plan
    secret = protection.hides_cohort or protection.hidden
    most = math.inf if plan is None or plan.participations is None else plan.participations
    if protection.placement.own_noise and plan is not None:
        most = min(plan.limits.values()) // passes
    return Turns(server.sampler.rate, hosts, None if secret else server.draw, most)
