"""SQLite files that survive a kill and a power cut, and that only their owner can read.

The rollback journal is used with `synchronous=EXTRA`: under FULL the folder is not synced once the journal is deleted, so a
power cut could bring the journal back and undo a transaction that had ended.

Every operation opens the file by its name and closes it again: no connection is carried over a fork, and no other handle on
the file is ever opened, because closing one would drop SQLite's locks.
"""

from __future__ import annotations

import os
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from privacy.errors import LedgerError

PRAGMAS = ("journal_mode=DELETE", "synchronous=EXTRA", "fullfsync=ON", "cell_size_check=ON")
BUSY_SECONDS = 30.0  # how long one transaction waits for those of other processes


def crash_point(name: str) -> None:
    """A named point between two durable steps. Does nothing; tests replace it by a kill."""


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """A connection to the file; mode: SQLite's, "rw" or "rwc"."""
    opened = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=BUSY_SECONDS
    )
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
        with closing(connect(part, "rw")) as made:
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
