"""What the rows of a ledger say and come to: its identity, who holds what, and who was charged how often."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from privacy.chain import RESTORE, Row
from privacy.errors import LedgerError, PlanError
from privacy.filters import Budget, Cost

FORMAT = 1  # of the rows' bodies


@dataclass(frozen=True)
class Head:
    """A row of a ledger as somebody else remembers it: that row must be in that ledger for ever, as it is."""

    ledger: str
    row: int
    digest: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Head:
        """What `to_dict` gave; LedgerError if it is not that."""
        match kept:
            case {"ledger": str(ledger), "row": int(row), "digest": str(digest)} if len(kept) == 3 and row >= 1:
                return cls(ledger, row, digest)
        raise LedgerError(f"{kept!r} is not the head of a ledger: restore the file that it was kept in")


@dataclass(frozen=True)
class Reservation:
    """What a run holds, for which data, on what terms."""

    cost: Cost
    data: str
    terms: Mapping[str, Any]


class Book:
    """The sum of all rows entered so far."""

    ledger: str
    data_set: str
    budget: Budget

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end: Row | None = None
        self.digests: set[str] = set()
        self._reservations: dict[str, Reservation] = {}
        self._charges: defaultdict[str, dict[str, int]] = defaultdict(dict)

    @property
    def last(self) -> Row:
        if self.end is None:
            raise LedgerError(f"{self.path} is a ledger without a first row: {RESTORE}")
        return self.end

    def enter(self, row: Row) -> None:
        """Add up one more row, which `chain` has verified."""
        match self.check(row):
            case Reservation() as reservation:
                self._reservations[row.run] = reservation
                self.digests.add(reservation.data)
            case (str(who), int(releases)):
                self._charges[row.run][who] = self._charges[row.run].get(who, 0) + releases
            case (str(ledger), str(data_set), Budget() as budget):
                self.ledger, self.data_set, self.budget = ledger, data_set, budget
        self.end = row

    def check(self, row: Row) -> Reservation | tuple[str, int] | tuple[str, str, Budget]:
        """What the row says; LedgerError for what no ledger writes."""
        try:
            if (row.kind == "open") != (row.id == 1):
                raise ValueError("a ledger begins with the row 'open' and has one of them")
            match row.kind:
                case "open":
                    return _opened(row.body)
                case "reserve":
                    return _reserved(row.run, row.body)
                case "charge":
                    return _charged(row.body)
            raise ValueError(f"its kind is {row.kind!r}")
        except (KeyError, TypeError, ValueError, PlanError) as error:
            raise LedgerError(
                f"{self.path} has been tampered with: row {row.id} says what no ledger writes ({error}); {RESTORE}"
            ) from error

    def reservation(self, run: str) -> Reservation:
        """What the run holds; PlanError if nothing."""
        if run not in self._reservations:
            raise PlanError(f"run {run!r} has reserved nothing in {self.path}: reserve its cost before it charges")
        return self._reservations[run]

    def cost(self, run: str) -> Cost | None:
        held = self._reservations.get(run)
        return None if held is None else held.cost

    def others(self, run: str | None = None) -> list[Cost]:
        """What all runs but that one hold."""
        return [held.cost for holder, held in self._reservations.items() if holder != run]

    def charged(self, run: str) -> dict[str, int]:
        return dict(self._charges.get(run, {}))


def words_of(cost: Cost) -> str:
    """A cost for people."""
    rdp = "" if cost.rdp is None else f", RDP {', '.join(f'{rho:.6g}' for rho in cost.rdp)}"
    return f"epsilon {cost.epsilon:.6g}, delta {cost.delta:.6g}{rdp}"


def _opened(body: Mapping[str, Any]) -> tuple[str, str, Budget]:
    if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']!r}, and this version reads {FORMAT}")
    budget = Budget(body["epsilon"], body["delta"], body["composition"], body["order"])
    return _text(body["ledger"]), _text(body["data_set"]), budget


def _reserved(run: str, body: Mapping[str, Any]) -> Reservation:
    cost = body["cost"]
    rdp = None if cost["rdp"] is None else tuple(cost["rdp"])
    if not run:
        raise ValueError("a reservation belongs to a run")
    return Reservation(Cost(cost["epsilon"], cost["delta"], rdp), _text(body["data"]), dict(body["terms"]))


def _charged(body: Mapping[str, Any]) -> tuple[str, int]:
    releases = body["releases"]
    if isinstance(releases, bool) or not isinstance(releases, int) or releases < 1:
        raise ValueError(f"it charges {releases!r} releases")
    dict(body["note"])
    return _text(body["who"]), releases


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value
