"""A client's record of its sessions: it unmasks each only once, ever, and signs one list of survivors in each active session.

A client that answers twice for one session, on different lists of survivors, gives away both secrets of some client. So a
client makes a claim first, durably, and only then signs the list, or opens its shares.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

from protocols.errors import ParameterError, ProtocolError, Spent

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SIZE = 32  # of one entry
HEADER = b"secure-fed sessions, version 1\n".ljust(SIZE)
WAIT_SECONDS = 30.0  # for another process's lock file


class Sessions(Protocol):
    """A record of claimed sessions."""

    def claim(self, session: bytes) -> None:
        """Record the session; Spent if it is already recorded. Of any number of simultaneous claims, one succeeds."""


class InMemory:
    """A record that lasts as long as the process: for simulations, and for clients whose keys end with the process."""

    def __init__(self) -> None:
        self._claimed: set[bytes] = set()
        self._lock = threading.Lock()

    def claim(self, session: bytes) -> None:
        with self._lock:
            _check(session, session in self._claimed)
            self._claimed.add(session)


class OnDisk:
    """A file of a header and 32 bytes for each claim. Threads and processes on one machine may share it.

    When `claim` returns, the entry, and the name of the file, have been handed to the disk. A kill or power cut before that may
    leave part of an entry; it belongs to a claim that never returned, so nothing was opened under it, and the next claim
    removes it. Every earlier entry stays. A file that is deleted or restored from a copy loses entries: keep it with the keys.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def claim(self, session: bytes) -> None:
        try:
            with _locked(self.path) as file:
                claimed = self._read(file)
                _check(session, session in claimed)
                os.ftruncate(file, SIZE * (1 + len(claimed)) if claimed else 0)
                os.lseek(file, 0, os.SEEK_END)
                entry = session if claimed else HEADER + session
                while entry:
                    entry = entry[os.write(file, entry) :]
                os.fsync(file)
                _sync_folder(self.path.parent)
        except OSError as error:
            raise ProtocolError(
                f"the record of sessions {self.path} cannot be written ({error}): make it and its folder writable",
                protected="nothing was opened",
            ) from error

    def _read(self, file: int) -> list[bytes]:
        """The complete entries; ParameterError if the file is something else."""
        os.lseek(file, 0, os.SEEK_SET)
        content = b""
        while part := os.read(file, 1 << 20):
            content += part
        if content[:SIZE] != HEADER[: len(content)]:
            raise ParameterError(f"{self.path} is not a record of sessions: name another file, or a new one")
        return [content[at : at + SIZE] for at in range(SIZE, len(content) - SIZE + 1, SIZE)]


def _check(session: bytes, claimed: bool) -> None:
    if len(session) != SIZE:
        raise ParameterError(
            f"a session's number has {SIZE} bytes; this number has {len(session)}: give Parameters.session"
        )
    if claimed:
        raise Spent(
            "this session was claimed before: its list of survivors was signed, or it was unmasked",
            protected="nothing was signed or opened a second time",
        )


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file open for reading and writing, created if needed, with exclusive access."""
    with _lock_file(path) if fcntl is None else nullcontext():
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)  # a lock of the open file, not of the process: excludes threads too
            yield file
        finally:
            os.close(file)  # also releases the lock


@contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    """Mutual exclusion by a file that only one process can create. After a kill it remains, and all claims are refused."""
    lock = path.with_name(path.name + ".lock")
    until = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError as error:
            if time.monotonic() > until:
                raise ProtocolError(
                    f"{lock} has been there for more than {WAIT_SECONDS:g} s: remove it if no other process uses {path}",
                    protected="nothing was opened",
                ) from error
            time.sleep(0.01)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # systems that cannot open a folder do not need this
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
