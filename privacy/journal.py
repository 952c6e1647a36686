"""A ledger's rows on disk, read and verified as they grow, and its newest head kept outside too."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from privacy import chain
from privacy.book import Book
from privacy.chain import Head, Row
from privacy.heads import Heads


class Journal:
    """The rows of the ledger at `path`; `book` holds their sums. Threads and forks may share it.

    heads: a second place where the newest head is kept. The ledger must contain the head noted there whenever it is read or
    written.
    """

    def __init__(self, path: Path, heads: Heads | None) -> None:
        self.path = path
        self.book = Book(path)
        self._heads = heads
        self._prepared = heads is None
        self._written: list[Row] = []
        self._lock = threading.Lock()

    @property
    def head(self) -> Head:
        """The end of the ledger when it was last read or written here."""
        return Head(self.book.opening.ledger, self.book.last.id, self.book.last.digest)

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[None]:
        """A transaction beside which no other writes (`write`), or a snapshot of the file; rows not yet read are verified.

        A written row enters the book once it is on disk. After a kill between the two, the row is read next time.
        """
        with self._lock:
            if write:
                self._prepare()
            noted = self._newest()  # read before the ledger: a noted head is already committed to it
            with chain.transaction(self.path, write=write) as connection:
                self._connection, self._written = connection, []
                self._catch_up(connection, noted)
                yield
            for row in self._written:
                self.book.enter(row)
            if self._written:
                self._note(noted)

    def append(self, kind: str, run: str, body: Mapping[str, Any]) -> Head:
        """Add a row, inside a transaction that writes.

        A nonce makes copies of a ledger that diverge differ, even if they write the same contents in the same second.
        """
        row = chain.sealed(self.book.last, kind, run, {**body, "time": now(), "nonce": secrets.token_hex(8)})
        self.book.check(row)
        chain.append(self._connection, row)
        self._written.append(row)
        return Head(self.book.opening.ledger, row.id, row.digest)

    def rows(self) -> list[Row]:
        """All rows, from the first, read and verified anew."""
        with self._lock, chain.transaction(self.path, write=False) as connection:
            return list(chain.rows_after(connection, self.path, None))

    def _prepare(self) -> None:
        if self._heads is not None and not self._prepared:
            self._heads.prepare()
            self._prepared = True

    def _newest(self) -> Head | None:
        return None if self._heads is None or self.book.end is None else self._heads.newest(self.head.ledger)

    def _catch_up(self, connection: Connection, noted: Head | None) -> None:
        """Read the rows that others wrote, and require that the noted head is among the rows."""
        for row in chain.rows_after(connection, self.path, self.book.end):
            self.book.enter(row)
        self.book.require_begun()
        if noted is not None and self._heads is not None:
            self.book.require(noted, f", as {self._heads.path} notes")

    def _note(self, noted: Head | None) -> None:
        """Note the ledger's end, which is on disk, or check that a head noted by others since then is in this file."""
        head = self.head
        while self._heads is not None and (standing := self._heads.advance(noted, head)) != head:
            noted = standing
            if not self.book.holds(noted):
                with chain.transaction(self.path, write=False) as connection:
                    self._catch_up(connection, noted)
            if noted.row >= head.row:
                return


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
