"""Plans of private runs: one function for each place where noise is added.

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
from dataclasses import replace

from privacy import accounting
from privacy.accounting import COARSE, Release
from privacy.correlation import INDEPENDENT, Correlation
from privacy.errors import PlanError
from privacy.mechanisms import Gaussian, Mechanism
from privacy.public_order import PublicOrder
from privacy.run_plan import Plan
from privacy.sampling import Sampler
from privacy.target import Sampled, Target

Made = Callable[[float], Mechanism]  # makes a mechanism from a noise multiplier


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
            return accounting.discrete_sampled(sampler.rate, z / together)
        return accounting.discrete(z / together)

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

    shares: the clients of a masked sum add the noise, so there is no such party; the noise is then discrete, and independent
    over rounds.
    """
    if shares and correlation.band > 1:
        raise PlanError(
            "shares of noise are independent over rounds: nobody knows the earlier noise that a round would subtract"
        )
    together = math.sqrt(passes)
    exposures = correlation.exposures(rounds, order.gap, order.turns(rounds))
    one = accounting.discrete if shares else accounting.unamplified
    z = target.multiplier(lambda z: one(z / together), exposures[-1])
    release = one(z / together)
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


def realised(plan: Plan, multiplier: float, releases: int, *, hidden: bool) -> float:
    """The epsilon of `releases` releases of a plan of `for_shares` at this noise multiplier."""
    z = multiplier / math.sqrt(plan.passes)
    release = accounting.discrete_sampled(plan.sampling_rate, z) if hidden else accounting.discrete(z)
    return replace(plan, release=release).epsilon(releases)


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


def usual_participations(rounds: int, rate: float) -> int:
    """The least m such that a client is drawn in more than m of the rounds with a probability of at most 1/100."""
    from scipy.stats import binom

    return max(1, int(binom.isf(_RARE, rounds, rate)))


_RARE = 0.01
_NEAREST = 3
