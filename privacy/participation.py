"""Who takes part: samplers of a round's cohort or of a step's batch, and a member's own record of its turns.

A sampler both draws and describes one release over its draws to an accountant, so that the accounted sampling is the actual
sampling. `FixedSize` and `Poisson` rely on secret coins; the privacy statement says from whom they are secret. `PublicOrder`
has no coins: everybody knows whose turn it is, and every member enforces its own turns with an `Attendance`.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from privacy.entropy import SeededEntropy
from privacy.errors import LedgerError, PlanError, PrivacyError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from privacy.accounting import Release


# uniform(n): n independent numbers in [0, 1), from a seeded generator or from a stream that nobody can predict.
Uniform = Callable[[int], NDArray[np.float64]]

_TURN = struct.Struct("<II")  # of an attendance's file


class Sampler(Protocol):
    """Draws from members 0 .. population - 1."""

    @property
    def expected(self) -> float:
        """The expected number of members in a draw: public. Private means are divided by it."""

    @property
    def most(self) -> int:
        """The largest number of members that a draw can have: public."""

    @property
    def rate(self) -> float:
        """The probability with which a member is in a draw."""

    def draw(self, uniform: Uniform, round_: int = 0) -> list[int]:
        """One draw, in ascending order. round_: the round's number, used only where draws are fixed beforehand."""

    def release(self, noise: float | DpEvent) -> Release:
        """One noised sum over such a draw, every contribution bounded by C. noise: a Gaussian's multiplier, or an event."""


@dataclass(frozen=True)
class FixedSize:
    """A uniformly random subset of exactly `size` members.

    Neighbours have one member replaced, which moves the sum by up to 2 C: an accountant whose Gaussian has sensitivity one gets
    half the noise multiplier. Amplification by sampling without replacement is accounted by Renyi privacy.
    """

    population: int
    size: int

    @property
    def expected(self) -> float:
        return float(self.size)

    @property
    def most(self) -> int:
        return self.size

    @property
    def rate(self) -> float:
        return self.size / self.population

    def draw(self, uniform: Uniform, round_: int = 0) -> list[int]:
        coins = uniform(self.population)
        if self.size == self.population:
            return list(range(self.population))
        largest = np.partition(coins, self.size - 1)[self.size - 1] if self.size else -1.0
        below, equal = np.flatnonzero(coins < largest), np.flatnonzero(coins == largest)
        return sorted([*below.tolist(), *equal[: self.size - len(below)].tolist()])  # ties: the first members

    def release(self, noise: float | DpEvent) -> Release:
        from privacy.accounting import sampled_without_replacement

        return sampled_without_replacement(self.population, self.size, noise)


@dataclass(frozen=True)
class Poisson:
    """Poisson sampling: each member is drawn independently with probability `rate`, and the draw may be empty.

    Neighbours have one member more or less, which moves the sum by up to C.
    """

    population: int
    rate: float

    @property
    def expected(self) -> float:
        return self.most * self.rate

    @property
    def most(self) -> int:
        return self.population

    def seldom_exceeded(self, chance: float) -> int:
        """A size that a draw exceeds with a probability of at most `chance`; computed from `most` and `rate` alone.

        Chernoff's bound: of n coins of rate q at least m come up with a probability of at most exp(-n KL(m/n || q)), if
        m > n q.
        """
        for members in range(math.ceil(self.expected), self.most):
            share = (members + 1) / self.most
            without = (1 - share) * math.log((1 - share) / (1 - self.rate)) if share < 1 else 0.0
            divergence = share * math.log(share / self.rate) + without
            if -self.most * divergence <= math.log(chance):
                return members
        return self.most

    def draw(self, uniform: Uniform, round_: int = 0) -> list[int]:
        return np.flatnonzero(uniform(self.population) < self.rate).tolist()

    def release(self, noise: float | DpEvent) -> Release:
        from privacy.accounting import poisson_sampled

        return poisson_sampled(self.rate, noise)


@dataclass(frozen=True)
class PublicOrder:
    """A `Sampler` whose draws are turns: everybody who knows the seed computes the same cohort of round t.

    The order is a permutation of all places, computed from a public seed alone. Round t takes the next `size` places of it, and
    after the last place the order begins again. So no member takes part twice within `gap` = places // size rounds, and nothing
    about a cohort is secret: everybody may know its members, its size and the times of its rounds.

    Guarantee. Neighbours differ in the presence of one member's data; without the data its contributions are zeros, and the
    order, the number of members and everybody's turns are the same. The number and spacing of a member's turns bound the
    privacy loss (`Correlation.exposures`). Amplification by sampling is not used.

    A place without a member stays empty, and no other member takes it. Members that join later take empty places: their turns
    are as rare as everybody's.

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


class Attendance:
    """The turns of a public order that members of this process have taken, in a run of `rounds` rounds.

    The guarantee of a public order relies on how seldom a member takes part, so the member enforces this itself: it knows the
    order and the number of rounds, takes only its own turns, and takes no turn twice. A request for a turn that is too early,
    repeated, or after the last round gets no contribution.

    The record outlives the process: every turn is in the file before `enter` returns, and reading starts at the first turn. A
    kill loses none. In a simulation a power cut may lose the last ones; the ledger's charge of the round, which was on disk
    before any member was asked to take part, then shows that the round had begun, and an interrupted round is not repeated. On
    a machine of its own a member has no such charge, so each turn is synchronised (`durable`).

        file: for each turn, the member and the round, as two little-endian integers of 4 bytes
    """

    def __init__(self, order: PublicOrder, rounds: int) -> None:
        self._order = order
        self._rounds = rounds
        self._taken: dict[int, int] = {}
        self._file: int | None = None
        self._durable = False
        self._entered: Callable[[int], None] | None = None

    def begin(
        self,
        path: Path | None,
        *,
        begun: bool = False,
        durable: bool = False,
        entered: Callable[[int], None] | None = None,
    ) -> None:
        """Begin or resume a run with its record in `path`; with None the record is lost when the process ends.

        begun: a round of the run has been charged, so that LedgerError is raised where there is no record. durable: every turn
        is on disk before `enter` returns, for a member on a machine of its own. entered: called with the round once its turn is
        on disk, and before `enter` returns.
        """
        self.end()
        self._taken, self._durable, self._entered = {}, durable, entered
        if path is None:
            return
        if begun and not path.exists():
            raise LedgerError(
                f"{path}, the record of which client took part when, is missing, and the run has begun rounds: restore it, or "
                "start a new run"
            )
        try:
            binary = getattr(os, "O_BINARY", 0)  # else Windows writes two bytes for each byte 10
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | binary, 0o600)
            kept = path.read_bytes()
            os.ftruncate(self._file, len(kept) - len(kept) % _TURN.size)  # a record that a kill tore was never acted on
        except OSError as error:
            raise LedgerError(f"{path}, the record of which client took part when, cannot be used: {error}") from error
        for member, round_ in _TURN.iter_unpack(kept[: len(kept) - len(kept) % _TURN.size]):
            self._taken[member] = max(round_, self._taken.get(member, 0))

    def end(self) -> None:
        """Make all turns durable against a power cut too, and close the file."""
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def last(self, member: int) -> int | None:
        """The last round that this member took part in."""
        return self._taken.get(member)

    def admits(self, member: int, round_: int) -> bool:
        """Whether this round is the member's turn and its last turn was at least `gap` rounds earlier."""
        last = self._taken.get(member)
        own = 0 <= round_ < self._rounds and self._order.has_turn(member, round_)
        return own and (last is None or round_ - last >= self._order.gap)

    def enter(self, member: int, round_: int) -> None:
        """Record that the member takes part in this round. NotYourTurn unless `admits`."""
        if not self.admits(member, round_):
            last = self._taken.get(member)
            taken = "" if last is None else f"; it took part in round {last + 1}"
            raise NotYourTurn(
                f"client {member} cannot take part in round {round_ + 1}: the public order of {self._rounds} rounds gives it "
                f"no turn then, or its turn is over{taken}"
            )
        if self._file is not None:
            self._note(self._file, _TURN.pack(member, round_))
        self._taken[member] = round_
        if self._entered is not None:
            self._entered(round_)

    def _note(self, file: int, record: bytes) -> None:
        try:
            whole = os.fstat(file).st_size
            if os.write(file, record) == len(record):
                if self._durable:
                    os.fsync(file)
                return
            why = "the disk is full"
            os.ftruncate(file, whole)  # a partial record left here would garble all later ones on the next read
        except OSError as error:
            why = str(error)
        raise LedgerError(f"a client's turn could not be recorded, so it does not take part: {why}")


class NotYourTurn(PrivacyError):  # noqa: N818 - the member's answer
    """A member was asked to take part in a round that its guarantee does not allow."""
