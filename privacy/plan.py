"""The plan of a private run, made before it starts: its noise multiplier, the releases that it may make, and their cost.

A `Target` is the requested privacy, and a `Plan` meets it. One function makes the plans for each place where noise is added.

With noise on the sum, the federation as a whole makes the releases: one noised sum a pass. All passes of a round use one
cohort. To an observer who does not know the cohort they are a single release of a Gaussian of multiplier z / sqrt(passes), not
several independently sampled releases. With noise that each client adds to its own contribution or gradients, every client
makes a release whenever it takes part. The guarantee is that of the client with the largest epsilon; a client that has spent
its releases sits out.

In a public order a client takes part in few rounds, which are known beforehand: the whole run is one release to it, whose
squared sensitivity after each round is its exposure (`correlation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from scipy.stats import binom

from privacy import accounting
from privacy.accounting import COARSE, Release
from privacy.correlation import INDEPENDENT, Correlation
from privacy.errors import BudgetExhausted, PlanError
from privacy.filters import Cost
from privacy.mechanisms import Gaussian, Mechanism
from privacy.participation import PublicOrder, Sampler

Sampled = Callable[[float], Release]  # one release at a noise multiplier
Made = Callable[[float], Mechanism]  # makes a mechanism from a noise multiplier

_RARE = 0.01  # the probability of more rounds than `usual_participations`
_NEAREST = 3  # kinds of clients compared on the fine grid


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
        most = self.epsilon or math.inf
        cheap = (not exposure or accounting.epsilon(release, exposure, self.delta) <= most for exposure in exposures)
        return max(rounds for rounds, fits in enumerate(cheap) if fits)

    def some(self, count: int) -> int:
        """The count; BudgetExhausted if it is zero."""
        if count:
            return count
        raise BudgetExhausted(
            f"not even one release at privacy.noise_multiplier = {self.noise_multiplier:g} fits privacy.epsilon = "
            f"{self.epsilon:g}: raise either"
        )


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
        if count < 0:
            raise PlanError(f"{count} releases cannot be accounted for; choose at least 0")
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
        """The mu of Gaussian differential privacy (Dong, Roth and Su, 2022), where one is known to hold; else None.

        No observer then distinguishes neighbours better than N(0, 1) from N(mu, 1). It is exact for Gaussian noise without
        sampling, and a bound for shares of noise; of several kinds of clients, the largest.
        """
        kinds = ((self.release, self._turns(releases)), *self.others)
        if not all(release.plain for release, _ in kinds):
            return None
        return max(math.sqrt(count) / release.multiplier for release, count in kinds)

    def limit(self, who: str) -> int:
        return self.limits[who] if self.limits else self.releases


def for_sums(target: Target, sampler: Sampler, releases: int, passes: int = 1, made: Made = Gaussian) -> Plan:
    """Noise on the sum over a cohort, in rounds of `passes` releases. No amplification against an observer of the cohort.

    made: makes the mechanism; Gaussian if there are several passes. The mechanism's own event is accounted.
    """
    together = math.sqrt(passes)
    if passes > 1 and not sampler.release(made(1.0).event).gaussian:
        raise PlanError(f"a round of {passes} passes is accounted for with Gaussian noise only, not {made(1.0)}")

    def round_at(z: float) -> Release:
        return sampler.release(made(z / together).event)

    z, count = _planned(target, round_at, releases, passes)
    release = round_at(z)
    unsampled = accounting.unamplified if release.adjacency == "add-remove" else accounting.replaced
    seen = unsampled(made(z / together).event)
    return Plan(made(z), target.delta, release, count, seen, sampler.rate, passes=passes)


def for_shares(target: Target, sampler: Sampler, releases: int, passes: int = 1, *, hidden: bool) -> Plan:
    """Noise in shares, which the clients of a masked sum add.

    Neighbours differ in the presence of one client's data; without the data it sends zeros and its share of the noise. If each
    client tosses a hidden coin, sampling amplifies against everybody; otherwise everybody sees the cohort, and there is no
    amplification.
    """
    together = math.sqrt(passes)

    def round_at(z: float) -> Release:
        if hidden:
            return accounting.poisson_sampled(sampler.rate, z / together)
        return accounting.unamplified(z / together)

    z, count = _planned(target, round_at, releases, passes)
    return Plan(Gaussian(z), target.delta, round_at(z), count, round_at(z), sampler.rate, passes=passes)


def for_turns(
    target: Target,
    order: PublicOrder,
    rounds: int,
    passes: int = 1,
    made: Made = Gaussian,
    *,
    shares: bool = False,
    correlation: Correlation = INDEPENDENT,
) -> Plan:
    """Noise on the sums of a public order's rounds; holds against everybody except the party that adds the noise.

    shares: the clients of a masked sum add the noise, so there is no such party; the noise is then independent over rounds.
    """
    if shares and correlation.band > 1:
        raise PlanError(
            "shares of noise are independent over rounds: nobody knows the earlier noise that a round would subtract"
        )
    together = math.sqrt(passes)
    exposures = correlation.exposures(rounds, order.gap, order.turns(rounds))
    z = target.multiplier(lambda z: accounting.unamplified(z / together), exposures[-1])
    release = accounting.unamplified(z / together)
    releases = target.some(target.rounds(release, exposures) * passes)
    return Plan(
        made(z),
        target.delta,
        release,
        releases,
        release,
        order.rate,
        passes=passes,
        exposures=exposures,
        correlation=correlation,
    )


def _planned(target: Target, round_at: Sampled, releases: int, passes: int) -> tuple[float, int]:
    """The noise multiplier, and the number of releases that fit the target, in whole rounds."""
    rounds = releases // passes
    z = target.multiplier(round_at, rounds)
    return z, target.some(target.allowed(round_at(z), rounds)) * passes


def for_contributions(target: Target, rate: float, names: Sequence[str], passes: int, participations: int) -> Plan:
    """Noise on every client's own contribution, which the server sees: no amplification for anybody.

    Neighbours have one client's data replaced by any other data. Participation is not hidden.
    """
    z = target.multiplier(accounting.replaced, participations * passes)
    release = accounting.replaced(z)
    allowed = target.allowed(release, participations * passes)
    count = target.some(allowed - allowed % passes)
    limits = dict.fromkeys(names, count)
    return Plan(Gaussian(z), target.delta, release, count, release, rate, limits, participations)


def for_gradients(
    target: Target, names: Sequence[str], draws: Sequence[Sampler], steps: Sequence[int], participations: int
) -> Plan:
    """Noise on every step of a client's training, over batches that it draws in secret.

    draws[i]: the sampler of client i's batches. steps[i]: its steps in a round. Nobody but the client sees its batches,
    so the guarantee is the same against everybody. It is the worst client's guarantee.
    """
    kinds = {(draw.rate, count * participations): draw for draw, count in zip(draws, steps, strict=True)}
    worst = max(kinds, key=lambda kind: kind[1])  # a client without examples takes no step
    z = target.multiplier(kinds[worst].release, worst[1])
    if target.noise_multiplier is None:
        for _ in kinds:  # a client with a larger epsilon than the worst so far takes its place
            other = _worst(kinds, z, target.delta)
            if other == worst or accounting.epsilon(kinds[other].release(z), other[1], target.delta) <= (
                target.epsilon or 0
            ):
                break
            worst, z = other, target.multiplier(kinds[other].release, other[1])
    allowed = {kind: target.allowed(draw.release(z), kind[1]) for kind, draw in kinds.items()}
    planned = [(draw.rate, count * participations) for draw, count in zip(draws, steps, strict=True)]
    limits = {name: allowed[kind] for name, kind in zip(names, planned, strict=True)}
    target.some(max(allowed.values()))
    rate, count = _worst({(rate, allowed[rate, full]): draw for (rate, full), draw in kinds.items()}, z, target.delta)
    release = next(draw for draw in draws if draw.rate == rate).release(z)
    others = tuple((draw.release(z), allowed[kind]) for kind, draw in kinds.items())
    return Plan(Gaussian(z), target.delta, release, count, release, rate, limits, participations, others=others)


def _worst(kinds: Mapping[tuple[float, int], Sampler], z: float, delta: float) -> tuple[float, int]:
    """The kind of client whose epsilon is largest: compared on a coarse grid, then the largest few on the fine grid."""
    rough = {
        kind: accounting.epsilon(draw.release(z), kind[1], delta, discretization=COARSE) for kind, draw in kinds.items()
    }
    near = sorted(kinds, key=lambda kind: rough[kind], reverse=True)[:_NEAREST]
    return max(near, key=lambda kind: accounting.epsilon(kinds[kind].release(z), kind[1], delta))


def realised(plan: Plan, multiplier: float, releases: int, *, hidden: bool) -> float:
    """The epsilon of `releases` releases of a plan of `for_shares` at this noise multiplier."""
    z = multiplier / math.sqrt(plan.passes)
    release = accounting.poisson_sampled(plan.sampling_rate, z) if hidden else accounting.unamplified(z)
    return replace(plan, release=release).epsilon(releases)


def usual_participations(rounds: int, rate: float) -> int:
    """The least m such that a client is drawn in more than m of the rounds with a probability of at most 1/100."""
    return max(1, int(binom.isf(_RARE, rounds, rate)))
