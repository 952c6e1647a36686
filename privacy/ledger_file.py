"""A ledger's file on disk: rows that are only added, each chained to the row before it, and their newest head kept elsewhere.

    digest_n = SHA-256(JSON [digest_(n-1), n, kind, run, body_n]),   digest_0 = ""

with `body_n` as canonical JSON text. Guarantees:

- A row whose transaction has ended survives a kill and a power cut.
- A row is written completely or not at all, and a new file appears with its first row or not at all.
- A row that was edited, removed, swapped or added by hand breaks the chain, and reading the file reports at which row.
- Cutting rows off the end, or rewriting the chain from some row on, is detected by a reader who kept the digest of a row that
  was cut or rewritten: a `Head`. `Heads` keeps one for every ledger of a user.

The files are SQLite's, and only their owner can read them. The rollback journal is used with `synchronous=EXTRA`: under FULL
the folder is not synced once the journal is deleted, so a power cut could bring the journal back and undo a transaction that
had ended. Every operation opens the file by its name and closes it again: no connection is carried over a fork, and no other
handle on the file is ever opened, because closing one would drop SQLite's locks.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
_HEADS_SCHEMA = "CREATE TABLE heads (ledger TEXT PRIMARY KEY, row INTEGER NOT NULL, digest TEXT NOT NULL)"
_REMEDY = "restore an intact copy, or name another file in privacy.ledger_heads"

PRAGMAS = ("journal_mode=DELETE", "synchronous=EXTRA", "fullfsync=ON", "cell_size_check=ON")
BUSY_SECONDS = 30.0  # how long one transaction waits for those of other processes


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


def create(path: Path, first: Row) -> None:
    """Create the file with this first row: it appears under its name complete, and never replaces another file."""

    def fill(connection: sqlite3.Connection) -> None:
        for statement in _SCHEMA:
            connection.execute(statement)
        append(connection, first)

    try:
        with plainly(path, "ledger", RESTORE):
            create_file(path, fill)
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
    with plainly(path, "ledger", RESTORE), closing(connect(path)) as connection:
        connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        try:
            # Exactly this table and its triggers, so that nothing else can change rows.
            found = tuple(sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master ORDER BY name"))
            if found != _SCHEMA:
                raise LedgerError(f"{path} is not a ledger, or its table or triggers were changed: {RESTORE}")
            yield connection
            crash_point("appended")
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
    crash_point("committed")


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


def _stored(row: Row) -> tuple[int, str, str, str, str]:
    return row.id, row.kind, row.run, canonical(row.body), row.digest


def sealed(previous: Row | None, kind: str, run: str, body: Mapping[str, Any]) -> Row:
    """The row that follows `previous`."""
    place = 1 if previous is None else previous.id + 1
    text = canonical(body)
    content = ["" if previous is None else previous.digest, place, kind, run, text]
    digest = hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
    return Row(place, kind, run, json.loads(text), digest)


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


@dataclass(frozen=True)
class Heads:
    """A second copy of every shared ledger's newest head, in a file outside the ledgers, one per user.

    A ledger's chain reveals every edit, but not missing rows at its end: an older copy of the file is a valid chain. A reader
    who kept the head of a later row notices. Every run directory that charged keeps such a head; this file keeps one for runs
    that start anew.

    A ledger is recognised by its identity, so a moved ledger is the same ledger. Two copies that diverged are noticed as soon
    as the second is written to: the noted head of the first is not a row of the second.

    Order of writes: a row is committed to the ledger, then noted here, then the caller goes on and may release. A process
    killed in between leaves a ledger ahead of its noted head. This raises no alarm, and the rows in between covered no release.
    Readers read this file before the ledger, so every head that they find noted is already committed.

    Not covered: an older copy of the ledger together with an older copy of this file, or with this file removed.

    The file at `path` is created before a ledger is first written to (`prepare`). Any number of processes may share it.
    """

    path: Path

    def prepare(self) -> None:
        """LedgerError unless a head can be noted; called before a ledger is written to."""
        try:
            if not self.path.exists():
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with suppress(FileExistsError), plainly(self.path, "file of ledgers' heads", _REMEDY):
                    create_file(self.path, lambda connection: connection.execute(_HEADS_SCHEMA))
        except OSError as error:
            raise self._unusable(error) from error
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
            crash_point("noting")
        crash_point("noted")
        return new

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with plainly(self.path, "file of ledgers' heads", _REMEDY), closing(connect(self.path)) as connection:
            connection.execute(begin)
            yield connection
            connection.execute("COMMIT")

    def _unusable(self, error: OSError) -> LedgerError:
        return LedgerError(
            f"{self.path}, the file for the newest heads of ledgers, cannot be used ({error}): make it usable, or name "
            "another file in privacy.ledger_heads"
        )


def _noted(connection: sqlite3.Connection, ledger: str) -> Head | None:
    found = connection.execute("SELECT row, digest FROM heads WHERE ledger = ?", (ledger,)).fetchone()
    return None if found is None else Head.from_dict({"ledger": ledger, "row": found[0], "digest": found[1]})


def connect(path: Path) -> sqlite3.Connection:
    """A connection to the existing file."""
    name = f"{path.absolute().as_uri()}?mode=rw"
    opened = sqlite3.connect(name, uri=True, isolation_level=None, timeout=BUSY_SECONDS)
    try:
        for pragma in PRAGMAS:
            opened.execute(f"PRAGMA {pragma}")
    except BaseException:
        opened.close()
        raise
    return opened


def create_file(path: Path, fill: Callable[[sqlite3.Connection], object]) -> None:
    """Create the file with the rows that `fill` writes; it appears under its name complete. FileExistsError if it exists."""
    if not path.name:
        raise LedgerError(f"{str(path)!r} names no file; give one, such as ledger.sqlite")
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with suppress(FileNotFoundError):  # a missing folder: SQLite reports it
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with closing(connect(part)) as made:
            made.execute("BEGIN IMMEDIATE")
            fill(made)
            made.execute("COMMIT")
        crash_point("built")
        os.link(part, path)  # unlike a rename, this never replaces a file
        crash_point("linked")
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    sync_folder(path.parent)
    crash_point("created")


@contextmanager
def plainly(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Report an error of SQLite in one sentence about the file, a `what`; `remedy`: the advice if it is damaged."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter: from an error that quotes a damaged name
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            text = (
                f"has been locked by another process for more than {BUSY_SECONDS:g} s: end that process, or try again"
            )
        elif code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            text = f"cannot be opened ({error}): make it and its folder readable and writable"
        elif code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            text = f"cannot be read or written ({error}): make room on its disk, or repair it, and try again"
        else:
            text = f"is damaged, or is not a {what} ({error}): {remedy}"
        raise LedgerError(f"{path} {text}") from error


def sync_folder(folder: Path) -> None:
    """Make the names of the files in a folder durable."""
    with suppress(OSError):  # systems that cannot open a folder do not need this
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def crash_point(name: str) -> None:
    """A named point between two durable steps. Does nothing; tests replace it by a kill."""
