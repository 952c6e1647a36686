"""A forecast of private training: the noise that a guarantee needs in a setting, and the ways to give the guarantee.

Everything is computed before training, from public numbers. A `Forecast` is the noise of one `Setting` whose cohorts are drawn
at random. A `Way` is one way to guarantee each client an epsilon: against whom it holds, how much noise it needs; `compared`
lists them, and `recommended` says which to choose.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from privacy import accounting
from privacy.accounting import Release
from privacy.correlation import best
from privacy.errors import PlanError
from privacy.participation import FixedSize, Poisson, PublicOrder
from privacy.plan import Plan, Target, for_contributions, for_shares, for_sums, for_turns
from privacy.statement import CLIENTS, EVERYBODY, READER, Observer

Outlook = Literal["long", "hard", "fine"]
# Lengths of a round's noise, in units of the clip norm; no mean of clipped contributions is longer than one clip norm.
LONG, HARD = 1.0, 0.1
_MOST_ROUNDS = 1_000_000  # as of federation.rounds
SMALL = 0.1  # noise on the final model, as a share of the longest distance that the model can move


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
        if self.rounds > _MOST_ROUNDS:
            raise PlanError(f"rounds is {self.rounds}; choose at most {_MOST_ROUNDS:,}")
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
    """A setting with its noise. noise_std: on one coordinate of a round's mean. noise_norm: expected length of it all.

    The error is the error of a round's raw mean, with noise N(0, (z C / cohort)^2) on every coordinate. Methods that denoise a
    mean have a smaller error.
    """

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
    """Forecasts for other targets, and for cohorts half, as large, twice and four times. Coarse, so with slightly more noise.

    `epsilon` is the target here; the true epsilon does not exceed it.
    """
    scaled = (setting.cohort // 2, setting.cohort, 2 * setting.cohort, 4 * setting.cohort)
    cohorts = sorted({min(max(1, cohort), setting.clients) for cohort in scaled})
    found = []
    for target in epsilons:
        for cohort in cohorts:
            other = replace(setting, cohort=cohort)
            z = accounting.calibrate(other.release, other.rounds, target, other.delta, coarse=True)
            seen = accounting.epsilon(other.seen(z), other.rounds, other.delta)
            found.append(Forecast(other, z, target, seen))
    return found


@dataclass(frozen=True)
class Way:
    """One way to give the guarantee.

    A run adds up the sums of its rounds. Its final noise is the standard deviation of the noise on one coordinate of the sum of
    all rounds, in clip norms, before any server momentum. The guarantee holds against

        reader         an observer of the models
        participant    an observer who also sees who takes part, and when
        server         the server too, which sees everything that is sent to it

        sampling   noise         correlation   holds against                  who could break it
        coins      central       none          reader                         whoever learns the coins
        schedule   central       none          reader, participant            the server, which adds the noise
        schedule   central       banded        reader, participant            the server, which adds the noise
        schedule   distributed   none          reader, participant, server    more colluders or dropouts than assumed
        coins      distributed   none          reader, participant, server    the same; every client sends in every round
        schedule   local         none          reader, participant, server    nobody

    noise_multiplier: as `privacy.noise_multiplier` means it, the standard deviation of independent noise on a sum (with local
    noise, on a contribution), in clip norms. final_noise: the noise on the sum of all rounds if nobody drops out, in clip
    norms.
    """

    sampling: Literal["coins", "schedule"]
    noise: Literal["central", "distributed", "local"]
    correlation: Literal["none", "banded"]
    band: int
    noise_multiplier: float
    epsilon: float
    holds_against: tuple[Observer, ...]
    final_noise: float
    recommended: bool = False

    def share(self, setting: Setting) -> float | None:
        """The length of the final model's noise, relative to the longest distance that it can move; None without `dim`.

        A mean of clipped contributions is at most a clip norm long, and a run adds up one mean in each round.
        """
        if setting.dim is None:
            return None
        return self.final_noise * math.sqrt(setting.dim) / (setting.cohort * setting.rounds)


@dataclass(frozen=True)
class Possible:
    """The protections that a federation supports beside plain sums.

    counted: the number of noise shares that the guarantee relies on in a cohort's masked sum; 0 where sums are not masked.
    counted_of_all: the same in a masked sum of all clients. correlated: whether later rounds can cancel earlier noise, which
    needs the same coordinates and the same clip norm in every round. momentum: the server's; the choice of the band uses it.
    """

    counted: int = 0
    counted_of_all: int = 0
    correlated: bool = True
    momentum: float = 0.0


def compared(setting: Setting, target: Target, possible: Possible) -> list[Way]:
    """All possible ways, weak guarantees first; the way that `recommended` returns is marked as recommended."""
    chosen = recommended(setting, target, possible)
    ways = [replace(chosen, recommended=True), *(way for way in in_turn(setting, target, possible) if way != chosen)]
    coins, rounds = Poisson(setting.clients, setting.rate), setting.rounds
    ways.append(_way(setting, for_sums(target, coins, rounds), "coins", "central", READER))
    if possible.counted_of_all >= 1:
        plan, surplus = for_shares(target, coins, rounds, hidden=True), setting.clients / possible.counted_of_all
        ways.append(_way(setting, plan, "coins", "distributed", EVERYBODY, math.sqrt(surplus)))
    return sorted(ways, key=lambda way: (len(way.holds_against), way.noise == "local", way.correlation == "banded"))


def recommended(setting: Setting, target: Target, possible: Possible) -> Way:
    """The way to choose in this setting, among the ways of a public order; computes nothing about coins."""
    return pick(setting, in_turn(setting, target, possible))


def pick(setting: Setting, ways: Iterable[Way]) -> Way:
    """The strongest guarantee among the ways with little noise on the final model, or else the way with the least noise.

    Coins are never picked: nobody can guarantee that the server's coins stay secret, and coins that clients toss make every
    client send in every round. Little noise is at most a tenth of the longest distance that the model can move. Without `dim`
    this is unknown, and the way with the least noise is picked. Among equally strong guarantees the one with less noise is
    picked.
    """
    public = [way for way in ways if way.sampling == "schedule"]
    quiet = [way for way in public if (share := way.share(setting)) is not None and share <= SMALL]
    return min(quiet or public, key=lambda way: (-len(way.holds_against) if quiet else 0, way.final_noise))


def least_cohort(setting: Setting, target: Target, *, correlated: bool = True, most: float = 1.0) -> int | None:
    """The least cohort whose central noise in a public order is at most the share `most` of the distance the model can move.

    With fewer clients a round the noise is longer, which need not harm a model. None if all clients together are too few.
    Larger cohorts give clients more turns, so the noise jumps where a turn is added: the search goes from few turns to many.
    """

    def small(cohort: int) -> bool:
        here = replace(setting, cohort=cohort)
        share = pick(here, in_turn(here, target, Possible(correlated=correlated))).share(here)
        return share is not None and share <= most

    for turns in range(1, setting.rounds + 1):
        first, end = ((count * setting.clients) // setting.rounds for count in (turns - 1, turns))
        if first < end and small(end):
            return bisect_left(range(first + 1, end + 1), True, key=small) + first + 1
    return None


def in_turn(setting: Setting, target: Target, possible: Possible) -> Iterator[Way]:
    """The ways of a public order."""
    order, rounds = PublicOrder(setting.clients, setting.cohort), setting.rounds
    turns = order.turns(rounds)
    plan = for_turns(target, order, rounds)
    yield _way(setting, plan, "schedule", "central", CLIENTS)
    if possible.correlated:
        chosen = best(rounds, order.gap, turns, possible.momentum)
        if chosen.band > 1:  # a band of one is independent noise
            banded = for_turns(target, order, rounds, correlation=chosen)
            independent = _way(setting, banded, "schedule", "central", CLIENTS)
            final = banded.noise_multiplier * float(chosen.errors(rounds)[-1])
            yield replace(independent, correlation="banded", band=chosen.band, final_noise=final)
    if possible.counted >= 1:  # shares are charged as central noise of their multiplier
        yield _way(setting, plan, "schedule", "distributed", EVERYBODY, math.sqrt(setting.cohort / possible.counted))
    local = for_contributions(target, order.rate, ("each",), 1, turns)
    yield _way(setting, local, "schedule", "local", EVERYBODY, math.sqrt(setting.cohort))


def _way(
    setting: Setting,
    plan: Plan,
    sampling: Literal["coins", "schedule"],
    noise: Literal["central", "distributed", "local"],
    against: tuple[Observer, ...],
    surplus: float = 1.0,
) -> Way:
    """surplus: the noise of a round's sum, in noise multipliers."""
    z = plan.noise_multiplier
    final = z * surplus * math.sqrt(setting.rounds)
    return Way(sampling, noise, "none", 1, z, plan.epsilon(), against, final)
