"""The privacy budget of one data set, on disk, and the costs that runs have taken from it.

A run reserves its most cost in the `Ledger` and then charges every release, through its `Account`, before it makes it. The file
(`ledger_file`) is a chain of rows of five kinds (`book`):

    open      the ledger's identity, its data set, its budget and how costs compose, all fixed from then on; and its key
    reserve   the most that a run may cost and the unit it protects, admitted by the budget's filter; a later row of
              the same run replaces an earlier one
    same      the user's statement that two unit names mean one unit
    charge    releases that the run is about to make
    close     the end of a run that has charged nothing: its reservation counts no more

Guarantees:

- At any time the latest reservations of all runs together are within the budget, however many processes reserve at once.
- All reservations protect one unit, under one kind of neighbours (`book.Units`), so that their sum is meaningful.
- A charge is on disk before `charge` returns, so a caller that charges before it releases has, after a kill or a power cut at
  any instant, charges for at least the releases made.
- No row lowers a reservation or a charge. Budget is returned in one case alone: a run that has made no private step is closed,
  whole and for good (`Ledger.close` has the argument).
- Edits are detected when the ledger is opened; a cut or rewritten end, or an older copy, by a `Head` kept elsewhere: by a run,
  or by the user for all ledgers (`Heads`). An attacker who controls the ledger and all heads is not resisted.
- Digests of private rows are stored under the ledger's own key. The key is in the ledger, which only its owner can read.
"""

from __future__ import annotations

import secrets
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from privacy import ledger_file
from privacy.book import FORMAT, Book, Unit, Units
from privacy.errors import BudgetExhausted, LedgerError, PlanError
from privacy.filters import Budget, Composition, Cost
from privacy.ledger_file import Head, Heads, Row


class Ledger:
    """An open ledger. Threads may share it; so may forks, and any number of processes may open the same file."""

    def __init__(self, path: str | PathLike[str], heads: Heads | None = None) -> None:
        """Called by `create` and `open`, which create or check the file.

        heads: a second place where the newest head is kept. The ledger must contain the head noted there whenever it is read
        or written.
        """
        self.path = Path(path).absolute()
        self._book = Book(self.path)
        self._heads = heads
        self._prepared = False  # whether a head can be noted
        self._written: list[Row] = []
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls,
        path: str | PathLike[str],
        *,
        data_set: str,
        epsilon: float | None,
        delta: float | None,
        composition: Composition = "basic",
        heads: Heads | None = None,
    ) -> Ledger:
        """A new ledger; None means no limit. LedgerError if the file exists, PlanError for an invalid budget."""
        budget = Budget.fixed(epsilon, delta, composition)
        if not (isinstance(data_set, str) and data_set):
            raise PlanError(f"the ledger's data set is {data_set!r:.40}: give its name")
        made = {"format": FORMAT, "ledger": str(uuid.uuid4()), "key": secrets.token_hex(32), "data_set": data_set}
        ledger_file.create(Path(path), ledger_file.sealed(None, "open", "", {**made, **asdict(budget), "time": _now()}))
        return cls.open(path, heads=heads)

    @classmethod
    def open(cls, path: str | PathLike[str], *, head: Head | None = None, heads: Heads | None = None) -> Ledger:
        """An existing ledger, after verifying all its rows and that it contains the row of `head`.

        heads: a second place for its newest head, checked now and at every operation, and kept up to date.
        """
        ledger = cls(path, heads)
        with ledger._transaction(write=False):
            if head is not None:
                ledger._book.require(head)
        if heads is not None:  # again: its identity, and so its noted head, is known only now
            with ledger._transaction(write=False):
                return ledger
        return ledger

    @property
    def data_set(self) -> str:
        return self._book.opening.data_set

    @property
    def budget(self) -> Budget:
        return self._book.opening.budget

    @property
    def epsilon(self) -> float | None:
        return self.budget.epsilon

    @property
    def delta(self) -> float | None:
        return self.budget.delta

    @property
    def composition(self) -> Composition:
        return self.budget.composition

    @property
    def orders(self) -> tuple[float, ...]:
        """The orders that `Cost.rdp` must cover: one for `rdp`, none for `basic`."""
        return () if self.budget.order is None else (self.budget.order,)

    @property
    def head(self) -> Head:
        """The end of the ledger when it was last read or written here."""
        return Head(self._book.opening.ledger, self._book.last.id, self._book.last.digest)

    @property
    def units(self) -> Units:
        """The units of the reservations, and the names declared the same."""
        return self._book.units

    def reserve(
        self,
        run: str,
        cost: Cost,
        *,
        data_digest: str,
        unit: Unit,
        terms: Mapping[str, Any],
        data_set: str | None = None,
    ) -> Head:
        """Reserve `cost` for the run, in place of its earlier reservation; else BudgetExhausted, and nothing is written.

        `data_set` is the user's name for the data set and must equal the ledger's. Without it, the digest of the data must be
        one that has reserved before, if any has. unit: the unit that the cost protects. Digests are passed unkeyed
        and stored under the ledger's key.

        A run's reservation may only grow. A filter covers this where the growth does not depend on the run's releases (rounds
        repeated after a kill), or where the addition's own cost is added in full, as RDP at one order does. The epsilon of a
        run that was extended in view of its first results is not a cost in the sense of a filter.
        """
        with self._transaction(write=True):
            self._require(run, data_digest, data_set, unit)
            opening = self._book.opening
            return self._hold(run, cost, self._book.keyed("data", data_digest), unit.keyed(opening.key), terms)

    def extend(self, run: str, cost: Cost) -> Head:
        """Raise a run's reservation to at least `cost` in each part, on its existing terms; it is never lowered."""
        with self._transaction(write=True):
            held = self._book.reservation(run)
            larger = held.cost.or_more(cost)
            if larger == held.cost:
                return self.head
            return self._hold(run, larger, held.data, held.unit, held.terms)

    def close(self, run: str) -> Head:
        """End a run that made no private step, and give its whole reservation back. It can never reserve or charge again.

        PlanError, and nothing is written, if the run has reserved nothing or has charged. A repeated call writes nothing. Runs
        whose private steps are not charged here one by one: the caller guarantees that there was none, and that none follows.

        Why this costs nothing. The filter admits a run if the costs of all mechanisms that have run, or still may run, stay
        within the limits. A run that is closed before any private step is the empty mechanism: its output is the same on all
        data sets, so it is (0, 0)-DP, whatever it had reserved, and no step of it can follow. The time at which it is closed,
        and what is reserved next, may depend on the releases of other runs, as a filter allows. A run that has released k of n
        results differs: it may have been stopped because of them, and the cost of k releases holds for a k fixed beforehand.
        So a run that has made any step keeps its whole reservation.
        """
        with self._transaction(write=True):
            if self._book.closed(run):
                return self.head
            self._book.reservation(run)
            if charged := sum(self._book.charged(run).values()):
                raise PlanError(
                    f"run {run!r} has charged {charged} releases in {self.path}, and its reservation is spent: only a run "
                    "without any charge is closed"
                )
            return self._append("close", run, {})

    def closed(self, run: str) -> bool:
        """Whether the run was closed, and its reservation given back."""
        with self._transaction(write=False):
            return self._book.closed(run)

    def admits(self, run: str, cost: Cost) -> bool:
        """Whether the run could reserve `cost` now. Another process may reserve first: only `reserve` guarantees it."""
        return not self.exceeded(run, cost)

    def exceeded(self, run: str, cost: Cost, limits: Budget | None = None) -> tuple[str, ...]:
        """The names of the limits that the run would exceed now with `cost`. limits: in place of the ledger's own."""
        with self._transaction(write=False):
            return (limits or self.budget).exceeded([*self._book.others(run), cost])

    def remedy(self, run: str, cost: Cost) -> str:
        """The settings to change for the run to fit."""
        with self._transaction(write=False):
            return self.budget.remedy(self._book.others(run), cost)

    def require(self, data_digest: str, data_set: str | None, unit: Unit) -> None:
        """LedgerError unless a new run on such data, for such a unit, may reserve here. Digests are passed unkeyed."""
        with self._transaction(write=False):
            self._require("a new run", data_digest, data_set, unit)

    def declare_same(self, one: str, other: str) -> Head:
        """Record the user's statement that two names mean one unit: from then on costs of both add up."""
        with self._transaction(write=True):
            self._book.units.require_declarable(self.path, one, other)
            return self._append("same", "", {"units": [one, other]})

    def charge(
        self,
        run: str,
        who: str,
        releases: int,
        note: Mapping[str, Any],
        *,
        limit: int | None = None,
        new_round: int | None = None,
    ) -> Head:
        """Charge `releases` more to `who` ("" is the whole federation); on disk when this returns. Release only after that.

        BudgetExhausted, and nothing is written, if `who` would then have more than `limit` in all, charges by other processes
        included. new_round: noted with the charge; BudgetExhausted too if a charge to `who` names this round or a later one.
        """
        _require_whole(releases)
        if not isinstance(who, str):
            raise PlanError(f"{who!r:.40} is charged, which is no name: give a client's, or an empty one")
        with self._transaction(write=True):
            self._book.reservation(run)
            if limit is not None and self._book.charged(run).get(who, 0) + releases > limit:
                raise BudgetExhausted(
                    f"run {run!r} may make {limit} releases in all, and another process of this run has charged some of them"
                )
            if new_round is not None and new_round < (following := self._book.next_round(run, who)):
                raise BudgetExhausted(
                    f"run {run!r} cannot make round {new_round + 1}: another process of this run has charged round {following}"
                )
            noted = {**note} if new_round is None else {**note, "round": new_round}
            return self._append("charge", run, {"who": who, "releases": releases, "note": noted})

    def charged(self, run: str) -> dict[str, int]:
        """The releases charged to the run so far, for each `who`."""
        with self._transaction(write=False):
            return self._book.charged(run)

    def next_round(self, run: str, who: str = "") -> int:
        """The round after the last one that the notes of the charges to `who` name, by any process; 0 before any."""
        with self._transaction(write=False):
            return self._book.next_round(run, who)

    def reserved(self, run: str) -> Cost | None:
        """The cost that a run has reserved; None if it has reserved nothing, or was closed."""
        with self._transaction(write=False):
            return self._book.cost(run)

    def spent(self) -> Cost:
        """The reservations of all runs together, which cover everything released so far. See `Budget.total`."""
        with self._transaction(write=False):
            return self.budget.total(self._book.others())

    def rows(self) -> list[Row]:
        """All rows, from the first, read and verified anew."""
        with self._lock, ledger_file.transaction(self.path, write=False) as connection:
            return list(ledger_file.rows_after(connection, self.path, None))

    def _hold(self, run: str, cost: Cost, data: str, unit: Unit, terms: Mapping[str, Any]) -> Head:
        """Reserve; the digests are keyed."""
        if not run or not run.isprintable():
            raise PlanError(f"a run cannot be called {run!r} in a ledger: give it a name of printable characters")
        self._book.require_open(run)
        held, others = self._book.cost(run), self._book.others(run)
        self.budget.parts(cost)  # raises unless it has the parts that this ledger sums
        if held is not None and held.or_more(cost) != cost:
            raise PlanError(
                f"run {run!r} reserved {_in_words(held)} in {self.path} and cannot lower that to {_in_words(cost)}"
            )
        if not self.budget.holds([*others, cost]):
            words = self.budget.words
            raise BudgetExhausted(
                f"the privacy budget of data set {self.data_set!r} in {self.path} is too small for run {run!r}: it needs "
                f"{words(self.budget.parts(cost))}, and {words(self.budget.left(others))} is left of "
                f"{words(self.budget.limits)}: {self.budget.remedy(others, cost)}"
            )
        body = {"cost": asdict(cost), "data": data, "unit": unit.to_dict(), "terms": dict(terms)}
        return self._append("reserve", run, body)

    def _require(self, run: str, data_digest: str, data_set: str | None, unit: Unit) -> None:
        if data_set is not None and data_set != self.data_set:
            raise LedgerError(
                f"{self.path} is the ledger of data set {self.data_set!r}, not of {data_set!r}: correct "
                "privacy.data_set or privacy.ledger"
            )
        if data_set is None and self._book.data and self._book.keyed("data", data_digest) not in self._book.data:
            raise LedgerError(
                f"{self.path} has no reservation for the data of run {run!r}: set privacy.data_set to "
                f"{self.data_set!r} if these are the same people's data, or name another privacy.ledger"
            )
        self._book.units.require(self.path, unit.keyed(self._book.opening.key))

    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[None]:
        """A transaction beside which no other writes (`write`), or a snapshot of the file; rows not yet read are verified.

        A written row enters the book once it is on disk. After a kill between the two, the row is read next time.
        """
        with self._lock:
            if write and self._heads is not None and not self._prepared:
                self._heads.prepare()
                self._prepared = True
            noted = None  # read before the ledger: a noted head is already committed to it
            if self._heads is not None and self._book.end is not None:
                noted = self._heads.newest(self.head.ledger)
            with ledger_file.transaction(self.path, write=write) as connection:
                self._connection, self._written = connection, []
                self._catch_up(connection, noted)
                yield
            for row in self._written:
                self._book.enter(row)
            if self._written:
                self._note(noted)

    def _append(self, kind: str, run: str, body: Mapping[str, Any]) -> Head:
        """Add a row, inside a transaction that writes.

        A nonce makes copies of a ledger that diverge differ, even if they write the same contents in the same second.
        """
        row = ledger_file.sealed(self._book.last, kind, run, {**body, "time": _now(), "nonce": secrets.token_hex(8)})
        self._book.check(row)
        ledger_file.append(self._connection, row)
        self._written.append(row)
        return Head(self._book.opening.ledger, row.id, row.digest)

    def _catch_up(self, connection: Connection, noted: Head | None) -> None:
        """Read the rows that others wrote, and require that the noted head is among the rows."""
        for row in ledger_file.rows_after(connection, self.path, self._book.end):
            self._book.enter(row)
        self._book.require_begun()
        if noted is not None and self._heads is not None:
            self._book.require(noted, f", as {self._heads.path} notes")

    def _note(self, noted: Head | None) -> None:
        """Note the ledger's end, which is on disk, or check that a head noted by others since then is in this file."""
        head = self.head
        while self._heads is not None and (standing := self._heads.advance(noted, head)) != head:
            noted = standing
            if not self._book.holds(noted):
                with ledger_file.transaction(self.path, write=False) as connection:
                    self._catch_up(connection, noted)
            if noted.row >= head.row:
                return


def _in_words(cost: Cost) -> str:
    rdp = "" if cost.rdp is None else f", RDP {', '.join(f'{rho:.6g}' for rho in cost.rdp)}"
    return f"epsilon {cost.epsilon:.6g}, delta {cost.delta:.6g}{rdp}"


class Account:
    """The account of one run: it charges releases to the ledger, and refuses those that the run's reservation does not cover.

    When `charge` returns, the charge is on disk and `after` has kept the ledger's new head; when it raises, nothing may be
    released (a charge may have been made all the same, and stays). The count is read from the ledger each time, so a resumed
    run continues from the killed run's count.

    The ledger checks a charge against the limit in the transaction that writes it, so even two processes that act as the same
    run cannot exceed it. The sum over different runs is checked in the same way, when they reserve.
    """

    def __init__(
        self,
        ledger: Ledger,
        run: str,
        limits: Callable[[str], int],
        cost: Callable[[int], Cost] | None,
        after: Callable[[Head], None],
    ) -> None:
        """limits(who): the number of releases that the run's reservation covers. cost(count): the cost to reserve for a larger
        number; None if the run cannot exceed its plan. The run must have reserved before.
        """
        self._ledger = ledger
        self._run = run
        self._limits = limits
        self._cost = cost
        self._after = after
        self._lock = threading.Lock()

    def releases(self, who: str = "") -> int:
        """The number of releases charged so far for `who`; "" is the whole federation."""
        return self._ledger.charged(self._run).get(who, 0)

    def next_round(self) -> int:
        """The round after the last one that was charged to the federation, by any process; 0 before any."""
        return self._ledger.next_round(self._run)

    def left(self, who: str = "") -> int:
        """Releases that the plan still allows `who`, an extension not counted."""
        return max(0, self._limits(who) - self.releases(who))

    def charge(
        self, releases: int = 1, who: str = "", note: Mapping[str, Any] | None = None, new_round: int | None = None
    ) -> int:
        """Charge that many releases, about to be made, and return the number charged to `who` so far.

        BudgetExhausted if neither the plan nor the ledger has room for them.

        new_round: the round of these releases; BudgetExhausted if this round or a later one was charged to `who` before.
        """
        _require_whole(releases)
        with self._lock:
            wanted = self.releases(who) + releases
            if wanted > self._limits(who):
                self._extend(wanted, who)
            limit = max(wanted, self._limits(who))
            self._after(self._ledger.charge(self._run, who, releases, note or {}, limit=limit, new_round=new_round))
            return wanted

    def _extend(self, wanted: int, who: str) -> None:
        """Extend the reservation to `wanted` releases."""
        if self._cost is None:
            remedy = ": raise privacy.participations in a new run, or set privacy.on_exhausted = 'stop'" if who else ""
            raise BudgetExhausted(
                f"release {wanted} of run {self._run!r}{f' by client {who!r}' if who else ''} is beyond the "
                f"{self._limits(who)} planned{remedy}"
            )
        self._after(self._ledger.extend(self._run, self._cost(wanted)))


def _require_whole(releases: int) -> None:
    if isinstance(releases, bool) or not isinstance(releases, int) or releases < 1:
        raise PlanError(f"{releases!r} releases cannot be charged: charge a whole number from 1 on")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
