"""A second copy of every shared ledger's newest head, in a file outside the ledgers, one per user.

A ledger's chain reveals every edit, but not missing rows at its end: an older copy of the file is a valid chain. A reader who
kept the head of a later row notices. Every run directory that charged keeps such a head; this file keeps one for runs that
start anew.

A ledger is recognised by its identity, so a moved ledger is the same ledger. Two copies that diverged are noticed as soon as
the second is written to: the noted head of the first is not a row of the second.

Order of writes: a row is committed to the ledger, then noted here, then the caller goes on and may release. A process killed in
between leaves a ledger ahead of its noted head. This raises no alarm, and the rows in between covered no release. Readers read
this file before the ledger, so every head that they find noted is already committed.

Not covered: an older copy of the ledger together with an older copy of this file, or with this file removed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from privacy import database
from privacy.chain import Head
from privacy.errors import LedgerError

_HEADS_SCHEMA = "CREATE TABLE heads (ledger TEXT PRIMARY KEY, row INTEGER NOT NULL, digest TEXT NOT NULL)"
_REMEDY = "restore an intact copy, or name another file in privacy.ledger_heads"


@dataclass(frozen=True)
class Heads:
    """The file at `path`, created before a ledger is first written to (`prepare`). Any number of processes may share it."""

    path: Path

    def prepare(self) -> None:
        """LedgerError unless a head can be noted; called before a ledger is written to."""
        self._make()
        with self._transaction("BEGIN IMMEDIATE"):
            pass

    def newest(self, ledger: str) -> Head | None:
        """The head noted of the ledger with this identity."""
        try:
            if not self.path.exists():
                return None
        except OSError as error:
            raise self._unusable(error) from error
        with self._transaction("BEGIN") as connection:
            return _noted(connection, ledger)

    def advance(self, seen: Head | None, new: Head) -> Head:
        """Replace the noted head `seen` by `new` and return it; if another head is noted by now, keep and return that head.

        Call `prepare` first.
        """
        with self._transaction("BEGIN IMMEDIATE") as connection:
            standing = _noted(connection, new.ledger)
            if standing is not None and standing != seen:
                return standing
            connection.execute("INSERT OR REPLACE INTO heads VALUES (?, ?, ?)", (new.ledger, new.row, new.digest))
            database.crash_point("noting")
        database.crash_point("noted")
        return new

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with (
            database.plainly(self.path, "file of ledgers' heads", _REMEDY),
            closing(database.connect(self.path, "rw")) as connection,
        ):
            connection.execute(begin)
            yield connection
            connection.execute("COMMIT")

    def _make(self) -> None:
        try:
            if self.path.exists():
                return
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (
                suppress(FileExistsError),
                database.plainly(self.path, "file of ledgers' heads", _REMEDY),
            ):
                database.create_file(self.path, lambda connection: connection.execute(_HEADS_SCHEMA))
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> LedgerError:
        return LedgerError(
            f"{self.path}, the file for the newest heads of ledgers, cannot be used ({error}): make it usable, or name "
            "another file in privacy.ledger_heads"
        )


def _noted(connection: sqlite3.Connection, ledger: str) -> Head | None:
    found = connection.execute("SELECT row, digest FROM heads WHERE ledger = ?", (ledger,)).fetchone()
    return None if found is None else Head.from_dict({"ledger": ledger, "row": found[0], "digest": found[1]})
