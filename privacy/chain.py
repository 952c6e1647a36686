"""An append-only file of rows, each chained to the row before it by a digest.

    digest_n = SHA-256(JSON [digest_(n-1), n, kind, run, body_n]),   digest_0 = ""

with `body_n` as canonical JSON text. Guarantees:

- A row whose transaction has ended survives a kill and a power cut (`database`).
- A row is written completely or not at all, and a new file appears with its first row or not at all.
- A row that was edited, removed, swapped or added by hand breaks the chain, and reading the file reports at which row.
- Cutting rows off the end, or rewriting the chain from some row on, is detected by a reader who kept the digest of a row that
  was cut or rewritten.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from privacy import database
from privacy.errors import LedgerError, PlanError

RESTORE = "restore an intact copy, or keep this file as evidence and name another in privacy.ledger"

# The triggers prevent edits by mistake. A deliberate editor can drop them; the chain detects that.
_SCHEMA = (
    "CREATE TABLE chain (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, run TEXT NOT NULL, body TEXT NOT NULL,"
    " digest TEXT NOT NULL)",
    "CREATE TRIGGER never_deleted BEFORE DELETE ON chain BEGIN SELECT RAISE(ABORT, 'rows are never deleted'); END",
    "CREATE TRIGGER never_updated BEFORE UPDATE ON chain BEGIN SELECT RAISE(ABORT, 'rows are never changed'); END",
)
_COLUMNS = "id, kind, run, body, digest"


@dataclass(frozen=True)
class Row:
    """One row: its position from 1, its kind, its run, its contents, and its digest."""

    id: int
    kind: str
    run: str
    body: Mapping[str, Any]
    digest: str


@dataclass(frozen=True)
class Head:
    """The position and digest of a ledger row, kept outside the ledger, which must contain this row unchanged for ever."""

    ledger: str
    row: int
    digest: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Head:
        """The head that `to_dict` wrote; LedgerError for anything else."""
        match kept:
            case {"ledger": str(ledger), "row": int(row), "digest": str(digest)} if len(kept) == 3 and row >= 1:
                return cls(ledger, row, digest)
        raise LedgerError(f"{kept!r} is not the head of a ledger: restore the file that it was kept in")


def canonical(body: Mapping[str, Any]) -> str:
    """The canonical JSON text of `body`; PlanError for values that JSON cannot represent, NaN and infinities included."""
    try:
        text = json.dumps(body, allow_nan=False)
        # After a round trip keys are strings, and sort as strings.
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(
            f"{body!r} cannot be stored in a ledger ({error}): use text, finite numbers, lists and dicts"
        ) from error


def sealed(previous: Row | None, kind: str, run: str, body: Mapping[str, Any]) -> Row:
    """The row that follows `previous`."""
    place = 1 if previous is None else previous.id + 1
    text = canonical(body)
    content = ["" if previous is None else previous.digest, place, kind, run, text]
    digest = hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
    return Row(place, kind, run, json.loads(text), digest)


def create(path: Path, first: Row) -> None:
    """Create the file with this first row: it appears under its name complete, and never replaces another file."""

    def fill(connection: sqlite3.Connection) -> None:
        for statement in _SCHEMA:
            connection.execute(statement)
        append(connection, first)

    try:
        with database.plainly(path, "ledger", RESTORE):
            database.create_file(path, fill)
    except FileExistsError as error:
        raise LedgerError(f"{path} exists already: open it, or choose another name for a new ledger") from error
    except OSError as error:
        text = (
            f"{path} cannot be created ({error}): choose a folder that is writable and on a file system with hard links"
        )
        raise LedgerError(text) from error


@contextmanager
def transaction(path: Path, *, write: bool) -> Iterator[sqlite3.Connection]:
    """One transaction on an existing file; a write transaction excludes all other write transactions from its beginning.

    Committed durably at the end of the block, undone by any exception in it. SQLite's errors become a LedgerError.
    """
    _check_file(path)
    with database.plainly(path, "ledger", RESTORE), closing(database.connect(path, "rw")) as connection:
        connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        try:
            _check_schema(connection, path)
            yield connection
            database.crash_point("appended")
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
    database.crash_point("committed")


def append(connection: sqlite3.Connection, row: Row) -> None:
    """Add the row; durable when its transaction has ended."""
    connection.execute(f"INSERT INTO chain ({_COLUMNS}) VALUES (?, ?, ?, ?, ?)", _stored(row))


def rows_after(connection: sqlite3.Connection, path: Path, last: Row | None) -> Iterator[Row]:
    """The rows after `last`, each verified, after checking that `last` itself is unchanged. None: all rows of the file."""
    found = connection.execute(
        f"SELECT {_COLUMNS} FROM chain WHERE ? OR id >= ? ORDER BY id", (not last, last and last.id)
    )
    if last is not None and (stored := found.fetchone()) != _stored(last):
        if stored is None:
            raise LedgerError(f"{path} has been cut: row {last.id}, read before, is gone; {RESTORE}")
        raise LedgerError(f"{path} has been tampered with: row {last.id} has changed since it was read; {RESTORE}")
    for stored in found:
        last = _verified(path, last, stored)
        yield last


def _stored(row: Row) -> tuple[int, str, str, str, str]:
    return row.id, row.kind, row.run, canonical(row.body), row.digest


def _verified(path: Path, previous: Row | None, stored: tuple[Any, ...]) -> Row:
    """The row; LedgerError if it is not as it was written."""
    place, kind, run, text, digest = stored
    expected = 1 if previous is None else previous.id + 1
    if place != expected:
        raise LedgerError(f"{path} has been tampered with: row {place} stands where row {expected} should; {RESTORE}")
    try:
        row = sealed(previous, kind, run, json.loads(text))
    except (TypeError, ValueError, RecursionError, PlanError) as error:
        raise LedgerError(f"{path} has been tampered with: row {place} is not JSON ({error}); {RESTORE}") from error
    if _stored(row) != (place, kind, run, text, digest):
        raise LedgerError(f"{path} has been tampered with: row {place} does not follow from the one before; {RESTORE}")
    return row


def _check_file(path: Path) -> None:
    try:
        if not path.exists():
            raise LedgerError(f"{path} does not exist: restore the ledger, or correct privacy.ledger")
        if not path.is_file():
            raise LedgerError(f"{path} is not a file: name a ledger's file in privacy.ledger")
        if not path.stat().st_size:
            raise LedgerError(f"{path} is empty, so it is not a ledger: {RESTORE}")
    except OSError as error:
        raise LedgerError(f"{path} cannot be read ({error}): name a readable file in privacy.ledger") from error


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Require exactly this table and its triggers, so that nothing else can change rows."""
    found = tuple(sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master ORDER BY name"))
    if found != _SCHEMA:
        raise LedgerError(f"{path} is not a ledger, or its table or triggers were changed: {RESTORE}")
