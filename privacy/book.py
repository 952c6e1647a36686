"""The contents of a ledger: the units that its costs protect, the entries in its rows, and the sum of all rows.

Costs add up for one unit, and for one kind of neighbours. An epsilon bounds how well two neighbouring data sets can be
distinguished. Where one run's neighbours differ in a patient and another's in all patients of a doctor, the sum of the two
epsilons holds for neither: without the doctor, the first run lacks many patients at once. A ledger therefore stores the unit
of every reservation: a name, the kind of unit, a keyed digest of which rows belong to which unit, and the neighbours. A
reservation for any other unit is refused.

The user states what digests cannot show: a patient with new rows is the same patient. The user gives the changed unit its own
name and declares that both names mean one unit; the declaration is a row of the ledger. Costs for different kinds of neighbours
never add up, whatever is declared. Neither do costs for examples and for their owners: a client or a person has many examples.

A holder whose ledger is about one set of people, whatever their rows, passes `SAME_UNITS` in place of the digest. Costs then
add up over all states of the data, which never counts a unit's cost too low.
"""

from __future__ import annotations

import hmac
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from privacy.errors import LedgerError, PlanError
from privacy.filters import Budget, Cost
from privacy.ledger_file import RESTORE, Head, Row

FORMAT = 2  # the format version of row bodies
# In place of the digest: whoever holds the data states that the units are the same, whatever their rows.
SAME_UNITS = ""
_KINDS = ("example", "client", "person")


@dataclass(frozen=True)
class Unit:
    """The unit whose presence a run's cost protects.

    name: chosen by the user, or the column that names a row's owner. kind: a client, an example, a person. members: a digest of
    which rows belong to which unit, or `SAME_UNITS`. neighbours: the difference between two neighbouring data sets.
    """

    name: str
    kind: str
    members: str
    neighbours: str

    def keyed(self, key: str) -> Unit:
        """With a keyed digest: without the key it confirms no guess about the rows."""
        return replace(self, members=keyed(key, "members", self.members) if self.members else SAME_UNITS)

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Unit:
        """The unit that `to_dict` wrote; ValueError for anything else."""
        match kept:
            case {"name": str(name), "kind": str(kind), "members": str(members), "neighbours": str(neighbours)}:
                if name and len(kept) == 4:
                    return cls(name, "person" if kind == "group" else kind, members, neighbours)  # as older ledgers say
        raise ValueError(f"{kept!r} is not a unit")


@dataclass
class Units:
    """The units with reservations in a ledger, by name, each with its first row; and the names declared the same."""

    used: dict[str, tuple[Unit, int]] = field(default_factory=dict)
    declared: list[tuple[str, str]] = field(default_factory=list)

    def enter(self, unit: Unit, row: int) -> None:
        self.used.setdefault(unit.name, (unit, row))

    def same(self, name: str) -> set[str]:
        """All names that were declared the same as this one, including itself."""
        found: set[str] = set()
        new = {name}
        while new:
            found |= new
            new = {name for pair in self.declared if found & set(pair) for name in pair} - found
        return found

    def require(self, path: Path, unit: Unit) -> None:
        """LedgerError unless the unit's costs may be added to all costs in the ledger at `path`."""
        _check_name(unit.name)
        for known, row in self.used.values():
            if known.neighbours != unit.neighbours:
                raise LedgerError(
                    f"{path} counts privacy for neighbours {known.neighbours!r}, not {unit.neighbours!r} (row {row}): use the "
                    "same privacy.noise and federation.sampling, or another ledger"
                )
        for known, row in self.used.values():
            if _differ((known.kind, unit.kind)):
                raise LedgerError(
                    f"{path} counts privacy for unit {known.name!r}, and costs of unit {unit.name!r} do not add up with it "
                    f"(row {row}) under any declaration, since privacy.unit was {known.kind!r} and is {unit.kind!r}: use "
                    "another ledger"
                )
        if unit.name in self.used:
            self._require_unchanged(path, unit, *self.used[unit.name])
        elif self.used and not self.same(unit.name) & set(self.used):
            known, row = next(iter(self.used.values()))
            raise LedgerError(
                f"{path} counts privacy for unit {known.name!r}, and costs of unit {unit.name!r} do not add up with it (row "
                f"{row}): use another ledger, or, if each {unit.name!r} is one {known.name!r}, declare it with `"
                f"{_declaring(path, known.name, unit.name)}`"
            )

    def _require_unchanged(self, path: Path, unit: Unit, known: Unit, row: int) -> None:
        if known.kind == unit.kind and unit.members in (SAME_UNITS, known.members):
            return
        how = "other rows" if known.kind == unit.kind else f"privacy.unit = {known.kind!r}, not {unit.kind!r}"
        raise LedgerError(
            f"{path} knows unit {unit.name!r} with {how} (row {row}): if they are the same people, set privacy.unit_name to a "
            f"new name and declare it with `{_declaring(path, unit.name, 'NEW-NAME')}`, else use another ledger"
        )

    def require_declarable(self, path: Path, one: str, other: str) -> None:
        """LedgerError for a statement that adds nothing, mixes kinds, or names no unit of this ledger."""
        for name in (one, other):
            _check_name(name)
        if other in self.same(one):
            raise LedgerError(f"{path} counts {one!r} and {other!r} as the same unit already: no declaration is needed")
        kinds = {  # of a unit that has reserved, or whose name is a kind (the default); "" if it is not known yet
            name: self.used[name][0].kind if name in self.used else name if name in _KINDS else ""
            for name in sorted(self.same(one) | self.same(other))
        }
        if _differ(kinds.values()):
            said = ", ".join(f"{name!r} is of kind {kind!r}" for name, kind in kinds.items() if kind)
            raise LedgerError(
                f"{path} cannot count {one!r} and {other!r} as one unit, since an example is no client and no person ({said}): "
                "use another ledger"
            )
        known = {*self.used, *(name for pair in self.declared for name in pair)}
        if not known & {one, other}:
            names = ", ".join(map(repr, sorted(known))) or "none"
            raise LedgerError(
                f"{path} knows neither unit {one!r} nor {other!r}: name at least one of its units: {names}"
            )


def _differ(kinds: Iterable[str]) -> bool:
    """Whether, among the known kinds, some are examples and others are not."""
    return len({kind == "example" for kind in kinds if kind}) > 1


def _declaring(path: Path, *names: str) -> str:
    """The command that declares two names the same unit."""
    return shlex.join(["secure-fed", "budget", "same", str(path), *names])


def _check_name(name: str) -> None:
    if not name or not name.isprintable():
        raise PlanError(
            f"a unit cannot be called {name!r} in a ledger: set privacy.unit_name to a name of printable characters"
        )


def keyed(key: str, purpose: str, digest: str) -> str:
    """HMAC-SHA-256 of a digest, separate for each purpose."""
    return hmac.new(bytes.fromhex(key), f"{purpose} {digest}".encode(), "sha256").hexdigest()


@dataclass(frozen=True)
class Opening:
    """The contents of the first row. key: for the digests of private data in later rows."""

    ledger: str
    key: str
    data_set: str
    budget: Budget


@dataclass(frozen=True)
class Reservation:
    """A run's reservation: its cost, its data, its unit and its terms. Digests in it are keyed."""

    cost: Cost
    data: str
    unit: Unit
    terms: Mapping[str, Any]


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
    """The sum of all rows of the ledger at `path` that were entered so far."""

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
        """Add one more row, which `ledger_file` has verified."""
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
                self.units.declared.append((one, other))
            case Closing():  # its data and unit are forgotten too, where no other run has reserved for them
                self._closed.add(row.run)
                del self._reservations[row.run]
                self._reserving = [(held, reservation) for held, reservation in self._reserving if held.run != row.run]
                self.units.used.clear()
                for held, reservation in self._reserving:
                    self.units.enter(reservation.unit, held.id)
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
                    one, other = row.body["units"]
                    return Declaration(_text(one), _text(other))
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

    def charged(self, run: str) -> dict[str, int]:
        return dict(self._charges.get(run, {}))

    def next_round(self, run: str, who: str) -> int:
        """The round after the last one that a charge to `who` names; 0 before any."""
        return self._next_rounds.get((run, who), 0)


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


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value
