"""The privacy budget of one data set, on disk, and what runs have taken from it.

Rows of a `chain`, of three kinds:

    open      the ledger's identity, its data set, its budget and how costs compose, all fixed from then on
    reserve   the most a run may cost, admitted by the budget's filter; a later row of the same run replaces an earlier one
    charge    that the run is about to release

What holds:

- At any time the latest reservations of all runs together are within the budget, however many processes reserve at once.
- A charge is on disk before `charge` returns, so whoever charges first and releases then has, after a kill or a power cut at
  any instant, charges for at least what was released.
- Nothing is ever given back: there is no row that lowers a reservation or a charge.
- Edits are seen when the ledger is opened, and a cut or rewritten end by the `Head` kept elsewhere, save for rows after the
  newest head. Somebody who controls the ledger and all heads is not resisted.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

from privacy import chain
from privacy.book import FORMAT, Book, Head, words_of
from privacy.chain import Row
from privacy.errors import BudgetExhausted, LedgerError, PlanError
from privacy.filters import Budget, Composition, Cost

__all__ = ["Budget", "Composition", "Cost", "Head", "Ledger", "Row"]


class Ledger:
    """An open ledger. Threads may share it; so may forks, and any number of processes may open the same file."""

    def __init__(self, path: str | PathLike[str]) -> None:
        """For `create` and `open`, which say what becomes of the file."""
        self.path = Path(path).absolute()
        self._book = Book(self.path)
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
    ) -> Ledger:
        """A new ledger, None meaning no limit; LedgerError if there is such a file, PlanError for a budget that is none."""
        budget = Budget.fixed(epsilon, delta, composition)
        if not data_set:
            raise PlanError("a ledger belongs to a data set: name it in privacy.data_set")
        body = {"format": FORMAT, "ledger": str(uuid.uuid4()), "data_set": data_set, **asdict(budget), "time": _now()}
        chain.create(Path(path), chain.sealed(None, "open", "", body))
        return cls.open(path)

    @classmethod
    def open(cls, path: str | PathLike[str], *, head: Head | None = None) -> Ledger:
        """An existing ledger, every row of it verified, and that the row of `head` is in it."""
        ledger = cls(path)
        with ledger._transaction(write=False, head=head):
            return ledger

    @property
    def data_set(self) -> str:
        return self._book.data_set

    @property
    def budget(self) -> Budget:
        return self._book.budget

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
        """The orders at which `Cost.rdp` is to be given: one for `rdp`, none for `basic`."""
        return () if self.budget.order is None else (self.budget.order,)

    @property
    def head(self) -> Head:
        """The end of the ledger when it was last read or written here."""
        last = self._book.last
        return Head(self._book.ledger, last.id, last.digest)

    def reserve(
        self, run: str, cost: Cost, *, data_digest: str, terms: Mapping[str, Any], data_set: str | None = None
    ) -> Head:
        """Hold `cost` for the run, in place of what it held, or BudgetExhausted and nothing is written.

        `data_set` is the name that the user gave and has to be the ledger's. Without it, the digest of the data has to be one
        that has reserved before, if any has.

        A run may only come to hold more. A filter covers that where growing does not depend on what the run has released
        (rounds made again after a kill), or where the addition's own cost is added in full, as RDP at one order does. The
        epsilon of a longer run, asked for in view of its first results, is no cost in the sense of a filter.
        """
        with self._transaction(write=True):
            self._check_data(run, data_digest, data_set)
            return self._hold(run, cost, data_digest, terms)

    def extend(self, run: str, cost: Cost) -> Head:
        """`reserve` for a run that has reserved, on the terms it has: at least `cost`, and what it holds already."""
        with self._transaction(write=True):
            held = self._book.reservation(run)
            larger = held.cost.or_more(cost)
            if larger == held.cost:
                return self.head
            return self._hold(run, larger, held.data, held.terms)

    def admits(self, run: str, cost: Cost) -> bool:
        """Whether the run could reserve that now. Others may be quicker: only `reserve` promises."""
        with self._transaction(write=False):
            return self.budget.holds([*self._book.others(run), cost])

    def require_data(self, digest: str, name: str | None) -> None:
        """LedgerError unless a new run on data of that digest, or under that name of the data set, may reserve here."""
        with self._transaction(write=False):
            self._check_data("a new run", digest, name)

    def charge(self, run: str, who: str, releases: int, note: Mapping[str, Any], *, limit: int | None = None) -> Head:
        """Count `releases` more for `who` ("" is the whole federation); on disk when this returns. Then release, not before.

        BudgetExhausted, and nothing is written, if that would be more than `limit` in all, whoever charges for the run.
        """
        if isinstance(releases, bool) or not isinstance(releases, int) or releases < 1:
            raise PlanError(f"{releases!r} releases cannot be charged: charge a whole number from 1 on")
        with self._transaction(write=True):
            self._book.reservation(run)
            if limit is not None and self._book.charged(run).get(who, 0) + releases > limit:
                raise BudgetExhausted(
                    f"run {run!r} may make {limit} releases in all, and another process of it has charged"
                )
            return self._append("charge", run, {"who": who, "releases": releases, "note": dict(note)})

    def charged(self, run: str) -> dict[str, int]:
        """The releases charged to the run so far, by who."""
        with self._transaction(write=False):
            return self._book.charged(run)

    def reserved(self, run: str) -> Cost | None:
        """What the run holds."""
        with self._transaction(write=False):
            return self._book.cost(run)

    def spent(self) -> Cost:
        """The reservations of all runs together: what everything released so far is covered by. See `Budget.total`."""
        with self._transaction(write=False):
            return self.budget.total(self._book.others())

    def rows(self) -> list[Row]:
        """All rows, from the first, read and verified anew."""
        with self._lock, chain.transaction(self.path, write=False) as connection:
            return list(chain.rows_after(connection, self.path, None))

    @contextmanager
    def _transaction(self, *, write: bool, head: Head | None = None) -> Iterator[None]:
        """The file to oneself (`write`), or as it is at one instant; verified from where we have read to.

        The book is given a written row once it is on disk. What comes between the two costs nothing: the row is read next time.
        """
        with self._lock:
            with chain.transaction(self.path, write=write) as connection:
                self._connection, self._written = connection, []
                for row in chain.rows_after(connection, self.path, self._book.end):
                    self._book.enter(row)
                    self._check_head(row, head)
                end = self._book.last.id
                if head is not None and end < head.row:
                    text = f"has been cut: it ends at row {end}, and row {head.row} was written; {chain.RESTORE}"
                    raise LedgerError(f"{self.path} {text}")
                yield
            for row in self._written:
                self._book.enter(row)

    def _check_head(self, row: Row, head: Head | None) -> None:
        if head is None:
            return
        if self._book.ledger != head.ledger:
            text = "is a foreign ledger, not the one that was used before: put that one back, or correct privacy.ledger"
            raise LedgerError(f"{self.path} {text}")
        if row.id == head.row and row.digest != head.digest:
            raise LedgerError(
                f"{self.path} has been rewritten: row {row.id} is not the row that was written; {chain.RESTORE}"
            )

    def _append(self, kind: str, run: str, body: Mapping[str, Any]) -> Head:
        if not run or not run.isprintable():
            raise PlanError(f"a run cannot be called {run!r} in a ledger: give it a name of printable characters")
        row = chain.sealed(self._book.last, kind, run, {**body, "time": _now()})
        self._book.check(row)
        chain.append(self._connection, row)
        self._written.append(row)
        return Head(self._book.ledger, row.id, row.digest)

    def _hold(self, run: str, cost: Cost, data_digest: str, terms: Mapping[str, Any]) -> Head:
        held, others = self._book.cost(run), self._book.others(run)
        self.budget.parts(cost)  # whether it has what this ledger adds up
        if held is not None and held.or_more(cost) != cost:
            raise PlanError(
                f"run {run!r} holds {words_of(held)} in {self.path} and cannot hold {words_of(cost)}: nothing is given back"
            )
        if not self.budget.holds([*others, cost]):
            raise BudgetExhausted(self._exhausted(run, cost, others))
        return self._append("reserve", run, {"cost": asdict(cost), "data": data_digest, "terms": dict(terms)})

    def _exhausted(self, run: str, cost: Cost, others: list[Cost]) -> str:
        words, budget = self.budget.words, self.budget
        return (
            f"the privacy budget of data set {self.data_set!r} in {self.path} does not hold run {run!r}: it asks for "
            f"{words(budget.parts(cost))}, and {words(budget.left(others))} is left of {words(budget.limits)}; lower "
            "privacy.epsilon or federation.rounds, raise privacy.noise_multiplier, or set privacy.on_exhausted = 'stop'"
        )

    def _check_data(self, run: str, digest: str, name: str | None) -> None:
        if name is not None and name != self.data_set:
            text = (
                f"is foreign to data set {name!r}: it belongs to {self.data_set!r}; correct that name or privacy.ledger"
            )
            raise LedgerError(f"{self.path} {text}")
        known = self._book.digests
        if name is None and known and digest not in known:
            raise LedgerError(
                f"{self.path} is foreign to the data of run {run!r}: digest {digest[:12]!r} has never reserved in it; set "
                f"privacy.data_set to {self.data_set!r} if these are the same people's data, or name another privacy.ledger"
            )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
