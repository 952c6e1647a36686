"""The contents of a ledger's rows: its identity, its reservations, its charges, and the runs closed without any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from privacy.chain import RESTORE, Head, Row
from privacy.errors import LedgerError, PlanError
from privacy.filters import Budget, Cost
from privacy.units import Unit, Units, keyed

FORMAT = 2  # the format version of row bodies


@dataclass(frozen=True)
class Reservation:
    """A run's reservation: its cost, its data, its unit and its terms. Digests in it are keyed."""

    cost: Cost
    data: str
    unit: Unit
    terms: Mapping[str, Any]


@dataclass(frozen=True)
class Opening:
    """The contents of the first row. key: for the digests of private data in later rows."""

    ledger: str
    key: str
    data_set: str
    budget: Budget


@dataclass(frozen=True)
class Charge:
    """The charge for releases that are about to be made. round: the round that its note names, if it names one."""

    who: str
    releases: int
    round: int | None


@dataclass(frozen=True)
class Declaration:
    """The user's statement that two names mean one unit."""

    one: str
    other: str


@dataclass(frozen=True)
class Closing:
    """The end of a run that has charged nothing: its reservation counts no more, and it never reserves or charges again."""


Entry = Opening | Reservation | Charge | Declaration | Closing


class Book:
    """The sum of all rows entered so far."""

    opening: Opening

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end: Row | None = None
        self.units = Units()
        self._seals: list[str] = []
        self._reservations: dict[str, Reservation] = {}
        self._reserving: list[tuple[Row, Reservation]] = []  # of all runs that are not closed
        self._closed: set[str] = set()
        self._charges: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._next_rounds: dict[tuple[str, str], int] = {}

    @property
    def last(self) -> Row:
        self.require_begun()
        return cast(Row, self.end)

    def keyed(self, purpose: str, digest: str) -> str:
        """The digest under this ledger's key, as its rows store it."""
        return keyed(self.opening.key, purpose, digest)

    def enter(self, row: Row) -> None:
        """Add one more row, which `chain` has verified."""
        match self.check(row):
            case Reservation() as reservation:
                self._reservations[row.run] = reservation
                self._reserving.append((row, reservation))
                self.units.enter(reservation.unit, row.id)
            case Charge(who, releases, round_):
                self._charges[row.run][who] = self._charges[row.run].get(who, 0) + releases
                if round_ is not None:
                    self._next_rounds[row.run, who] = max(self.next_round(row.run, who), round_ + 1)
            case Declaration(one, other):
                self.units.declare(one, other)
            case Closing():
                self._close(row.run)
            case Opening() as opening:
                self.opening = opening
        self._seals.append(row.digest)
        self.end = row

    def check(self, row: Row) -> Entry:
        """The entry in a row; LedgerError for a row that no ledger writes."""
        try:
            if (row.kind == "open") != (row.id == 1):
                raise ValueError("the first row of a ledger is of kind 'open', and no other row is")
            if row.run in self._closed:
                raise ValueError(f"run {row.run!r} was closed before")
            match row.kind:
                case "open":
                    return _opened(row.body)
                case "reserve":
                    return _reserved(row.run, row.body)
                case "charge":
                    return _charged(row.body)
                case "same":
                    return _declared(row.body)
                case "close":
                    if row.run not in self._reservations or row.run in self._charges:
                        raise ValueError("it closes a run that has reserved nothing, or has charged")
                    return Closing()
            raise ValueError(f"its kind is {row.kind!r}")
        except (KeyError, TypeError, ValueError, PlanError) as error:
            raise LedgerError(
                f"{self.path} has been tampered with: row {row.id} has content that no ledger writes ({error}); {RESTORE}"
            ) from error

    def holds(self, head: Head) -> bool:
        """Whether `head` is among the rows of this ledger read so far."""
        return (
            head.ledger == self.opening.ledger
            and head.row <= len(self._seals)
            and self._seals[head.row - 1] == head.digest
        )

    def require_begun(self) -> None:
        """LedgerError if no first row was entered."""
        if self.end is None:
            raise LedgerError(f"{self.path} is a ledger without a first row: {RESTORE}")

    def require(self, head: Head, source: str = "") -> None:
        """LedgerError unless `head` is a row of this ledger. source: for the message, where the head was noted."""
        if self.holds(head):
            return
        if self.opening.ledger != head.ledger:
            text = "is a different ledger from the one used before: restore that ledger, or correct privacy.ledger"
        elif head.row > self.last.id:
            ends = f"it ends at row {self.last.id}, and row {head.row} was written{source}"
            text = f"has been cut, or is an older copy: {ends}; {RESTORE}"
        else:
            text = f"has been rewritten: row {head.row} is not the row that was written{source}; {RESTORE}"
        raise LedgerError(f"{self.path} {text}")

    @property
    def data(self) -> set[str]:
        """The keyed digests of the data that have reserved, but for runs that were closed."""
        return {reservation.data for _, reservation in self._reserving}

    def closed(self, run: str) -> bool:
        """Whether the run was closed."""
        return run in self._closed

    def require_open(self, run: str) -> None:
        """PlanError for a run that was closed."""
        if run in self._closed:
            raise PlanError(f"run {run!r} was closed in {self.path}, and can neither reserve nor charge any more")

    def reservation(self, run: str) -> Reservation:
        """The reservation of a run; PlanError if it has none."""
        self.require_open(run)
        if run not in self._reservations:
            raise PlanError(f"run {run!r} has reserved nothing in {self.path}: reserve its cost before it charges")
        return self._reservations[run]

    def cost(self, run: str) -> Cost | None:
        held = self._reservations.get(run)
        return None if held is None else held.cost

    def others(self, run: str | None = None) -> list[Cost]:
        """The costs reserved by all runs except `run`."""
        return [held.cost for holder, held in self._reservations.items() if holder != run]

    def _close(self, run: str) -> None:
        """Forget the run's reservation, and its data and unit where no other run has reserved for them."""
        self._closed.add(run)
        del self._reservations[run]
        self._reserving = [(row, reservation) for row, reservation in self._reserving if row.run != run]
        self.units.used.clear()
        for row, reservation in self._reserving:
            self.units.enter(reservation.unit, row.id)

    def charged(self, run: str) -> dict[str, int]:
        return dict(self._charges.get(run, {}))

    def next_round(self, run: str, who: str) -> int:
        """The round after the last one that a charge to `who` names; 0 before any."""
        return self._next_rounds.get((run, who), 0)


def words_of(cost: Cost) -> str:
    """A cost in words, for messages."""
    rdp = "" if cost.rdp is None else f", RDP {', '.join(f'{rho:.6g}' for rho in cost.rdp)}"
    return f"epsilon {cost.epsilon:.6g}, delta {cost.delta:.6g}{rdp}"


def _opened(body: Mapping[str, Any]) -> Opening:
    if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']!r}, and this version reads {FORMAT}")
    budget = Budget(body["epsilon"], body["delta"], body["composition"], body["order"])
    if len(bytes.fromhex(_text(body["key"]))) < 16:
        raise ValueError("its key is short")
    return Opening(_text(body["ledger"]), body["key"], _text(body["data_set"]), budget)


def _reserved(run: str, body: Mapping[str, Any]) -> Reservation:
    cost = body["cost"]
    rdp = None if cost["rdp"] is None else tuple(cost["rdp"])
    if not run:
        raise ValueError("a reservation belongs to a run")
    unit = Unit.from_dict(body["unit"])
    return Reservation(Cost(cost["epsilon"], cost["delta"], rdp), _text(body["data"]), unit, dict(body["terms"]))


def _charged(body: Mapping[str, Any]) -> Charge:
    releases = body["releases"]
    if isinstance(releases, bool) or not isinstance(releases, int) or releases < 1:
        raise ValueError(f"it charges {releases!r} releases")
    round_ = dict(body["note"]).get("round")
    return Charge(_text(body["who"]), releases, round_ if isinstance(round_, int) else None)


def _declared(body: Mapping[str, Any]) -> Declaration:
    one, other = body["units"]
    return Declaration(_text(one), _text(other))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value
