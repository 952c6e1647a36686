"""The plan of a private run, made before it starts (`run_planning`): noise multiplier, number of releases, and their cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from privacy import accounting
from privacy.accounting import Release
from privacy.correlation import INDEPENDENT, Correlation
from privacy.errors import PlanError
from privacy.ledger import Cost
from privacy.mechanisms import Mechanism


@dataclass(frozen=True)
class Plan:
    """The mechanism of a run, the releases that it may make, and their cost.

    release: one release of the client with the largest epsilon; for a federation that releases sums, all passes of one round.
    releases: the planned number, of releases or of passes. limits: the most releases of every client; empty if the federation
    as a whole is charged. participations: the most rounds that a client may take part in. passes: releases in a round of the
    federation. seen: the same release for an observer who also sees who takes part. others: the releases of all kinds of
    clients, since the client with the largest epsilon need not have the largest Renyi divergence at every order. exposures: in
    a public order, the squared sensitivity of the first 0, 1, ... rounds together, relative to `release`; else empty.
    correlation: of the noise over rounds.
    """

    mechanism: Mechanism
    delta: float
    release: Release
    releases: int
    seen: Release
    sampling_rate: float
    limits: Mapping[str, int] = field(default_factory=dict)
    participations: int | None = None
    passes: int = 1
    others: tuple[tuple[Release, int], ...] = ()
    exposures: tuple[float, ...] = ()
    correlation: Correlation = INDEPENDENT

    @property
    def noise_multiplier(self) -> float:
        return self.mechanism.noise_multiplier

    def epsilon(self, releases: int | None = None) -> float:
        """Epsilon against an observer of the models, for this number of releases or the planned one."""
        return accounting.epsilon(self.release, self._turns(releases), self.delta)

    def epsilon_participants(self, releases: int | None = None) -> float:
        """Epsilon against an observer who also sees the cohorts."""
        return accounting.epsilon(self.seen, self._turns(releases), self.delta)

    def cost(self, releases: int | None = None, orders: Sequence[float] = ()) -> Cost:
        """The cost for a ledger that composes Renyi privacy at these orders."""
        count = self._turns(releases)
        spent = [accounting.rdp(release, made, orders) for release, made in ((self.release, count), *self.others)]
        rdp = tuple(map(max, zip(*spent, strict=True))) if orders else None
        return Cost(self.epsilon(releases), self.delta if count else 0.0, rdp)

    def _turns(self, releases: int | None) -> float:
        """The number of times that `release` is made by the charged releases; a round that was begun counts in full."""
        count = self.releases if releases is None else releases
        if self.limits:
            return count
        rounds = math.ceil(count / self.passes)
        if not self.exposures:
            return rounds
        if rounds >= len(self.exposures):
            raise PlanError(
                f"round {rounds} is beyond the {len(self.exposures) - 1} that the public order was planned for"
            )
        return self.exposures[rounds]

    def sensitivity(self, releases: int | None = None) -> float:
        """In a public order, the sensitivity of all releases together to one member, in clip norms."""
        return math.sqrt(self.passes * self._turns(releases))

    def curve(self, deltas: Sequence[float], releases: int | None = None) -> list[tuple[float, float]]:
        """(delta, epsilon) pairs as in `epsilon`, for the deltas that the accountant can resolve; all pairs hold together.

        Different kinds of clients are worst at different deltas, and only at the plan's own delta were all kinds compared.
        """
        if any(other != (self.release, self._turns(releases)) for other in self.others):
            deltas = [self.delta]
        found = []
        for delta in deltas:
            with suppress(PlanError):
                found.append((delta, accounting.epsilon(self.release, self._turns(releases), delta)))
        return [(delta, epsilon) for delta, epsilon in found if epsilon < math.inf]

    def gaussian(self, releases: int | None = None) -> float | None:
        """The mu of Gaussian differential privacy (Dong, Roth and Su, 2022), where the guarantee is exactly that; else None.

        No observer then distinguishes neighbours better than N(0, 1) from N(mu, 1).
        """
        if not self.release.plain or self.others:
            return None
        return math.sqrt(self._turns(releases)) / self.release.multiplier

    def limit(self, who: str) -> int:
        return self.limits[who] if self.limits else self.releases
