"""Long columns of texts and token ids in files, so that the memory of a run does not grow with them.

Such a file has no name: `tempfile.TemporaryFile` makes it for this process alone (mode 0600), and the system removes it when
the process ends, however it ends. The data are private, so no copy stays, and no other process reads or writes one. Columns
share a file, since a run may read thousands of files, and the system limits how many are open.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from secure_fed.errors import DataError, plainly

LONG = 1024  # entries; shorter columns stay in memory
_PLAIN = (int, float, np.number, np.bool_, type(None))  # as small in memory as in a file
_FULL = 2**30  # bytes after which columns begin another file, so that the room of dropped columns is free again


class _File:
    """A file without a name that grows. It is gone when the last column in it is dropped."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(dir=_folder(), buffering=0)  # noqa: SIM115
        self._lock, self._process, self.end = Lock(), os.getpid(), 0

    def add(self, content: bytes) -> int:
        """Write at the end; returns the place."""
        with self._lock:
            start = self._file.seek(self.end)
            left = memoryview(content)
            while left:
                left = left[self._file.write(left) :]
            self.end += len(content)
        return start

    def read(self, start: int, end: int) -> bytes:
        if hasattr(os, "pread"):  # which does not move the place of writing, not even for a forked process
            return os.pread(self._file.fileno(), end - start, start)
        with self._lock:
            self._file.seek(start)
            return self._file.read(end - start) or b""

    @property
    def is_open(self) -> bool:
        """Whether columns may begin in it: a forked process shares the file with its parent, which writes at the same place."""
        return self.end < _FULL and self._process == os.getpid()


_last: ref[_File] | None = None


def _shared() -> _File:
    global _last
    file = _last() if _last else None
    if file is None or not file.is_open:
        file = _File()
        _last = ref(file)
    return file


class OnDisk(Sequence[Any]):
    """A column whose entries are read from its file when they are used; arrays are read-only.

    size: bytes of one number, if the entries are arrays.
    """

    __slots__ = ("_ends", "_file", "_read", "_size", "_starts")

    def __init__(
        self,
        file: _File,
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        read: Callable[[bytes], Any],
        size: int = 0,
    ) -> None:
        self._file, self._starts, self._ends, self._read, self._size = file, starts, ends, read, size

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        return self._read(self._file.read(int(self._starts[index]), int(self._ends[index])))

    def take(self, indices: Iterable[int]) -> OnDisk:
        """The entries at `indices`, in that order; the file is shared."""
        at = np.fromiter(indices, dtype=np.int64)
        return OnDisk(self._file, self._starts[at], self._ends[at], self._read, self._size)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Numbers in each array."""
        return (self._ends - self._starts) // self._size


class Column:
    """A column that grows by one entry at a time. Its entries stay in memory while they are few, or numbers alone."""

    def __init__(self) -> None:
        self._waiting: list[Any] = []
        self._plain = True
        self._file: _File | None = None
        self._starts, self._ends = array("q"), array("q")
        self._kind: np.dtype[Any] | None = None  # of arrays of one dimension, which are stored as they are

    def append(self, entry: Any) -> None:
        self._waiting.append(entry)
        self._plain = self._plain and isinstance(entry, _PLAIN)
        if len(self._waiting) >= LONG and not self._plain:
            self._write()

    def extend(self, entries: Iterable[Any]) -> None:
        for entry in entries:
            self.append(entry)

    def whole(self) -> Sequence[Any]:
        """The entries: a list, or a column on disk. Nothing can be appended afterwards."""
        if self._file is None:
            return self._waiting
        self._write()
        starts, ends = (np.array(places, dtype=np.int64) for places in (self._starts, self._ends))
        if self._kind is None:
            return OnDisk(self._file, starts, ends, pickle.loads)
        return OnDisk(self._file, starts, ends, partial(np.frombuffer, dtype=self._kind), self._kind.itemsize)

    def _write(self) -> None:
        with _room():
            if self._file is None:
                kinds = {entry.dtype if _is_flat(entry) else None for entry in self._waiting}
                self._kind = kinds.pop() if len(kinds) == 1 else None
                self._file = _shared()
            parts = [self._bytes(entry) for entry in self._waiting]
            place = self._file.add(b"".join(parts))
        for part in parts:
            self._starts.append(place)
            self._ends.append(place := place + len(part))
        self._waiting = []

    def _bytes(self, entry: Any) -> bytes:
        if self._kind is None:
            return pickle.dumps(entry, pickle.HIGHEST_PROTOCOL)
        if not _is_flat(entry) or entry.dtype != self._kind:
            raise TypeError(f"a column of arrays of {self._kind} was given {entry!r:.60}")
        return bytes(entry.tobytes())


def kept(*parts: Iterable[Any]) -> Sequence[Any]:
    """The entries of all parts, one part after the other: a tuple, or on disk if there are many. One on disk stays itself."""
    if len(parts) == 1 and isinstance(parts[0], OnDisk):
        return parts[0]
    column = Column()
    for part in parts:
        column.extend(part)
    whole = column.whole()
    return whole if isinstance(whole, OnDisk) else tuple(whole)


def taken(column: Sequence[Any], indices: Iterable[int]) -> Sequence[Any]:
    """The entries at `indices`, in that order; they are shared, not copied."""
    return column.take(indices) if isinstance(column, OnDisk) else tuple(column[i] for i in indices)


def in_parts(column: Iterable[Any]) -> Iterator[list[Any]]:
    """The entries in lists of at most `LONG`, one in memory at a time."""
    left = iter(column)
    while part := list(islice(left, LONG)):
        yield part


def _is_flat(entry: Any) -> bool:
    return isinstance(entry, np.ndarray) and entry.ndim == 1 and entry.dtype != object


def _room() -> Any:
    return plainly(
        DataError,
        f"there is no room in {_folder() or tempfile.gettempdir()} for the data's texts and token ids",
        "make room, or set the environment variable TMPDIR to another folder",
    )


def _folder() -> str | None:
    """A folder on a disk: /tmp is in memory on many systems. Where TMPDIR is set, Python's choice (None) follows it."""
    chosen = any(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    return None if chosen or not os.access("/var/tmp", os.W_OK) else "/var/tmp"
