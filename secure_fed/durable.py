"""Writing files so that a reader, or a run resumed after a kill, finds the old content or the new and nothing between."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from secure_fed.errors import StorageError, plainly


def crash_point(name: str) -> None:
    """A named instant between two durable steps. Does nothing; tests put a kill in its place."""


def atomic_write(path: Path, data: bytes | str, *, private: bool = False) -> None:
    """Replace the file by `data` in one step that survives a power cut; a refused write leaves nothing beside it.

    private: readable by its owner alone, from the first byte on.
    """
    content = data.encode() if isinstance(data, str) else data
    part = path.with_name(path.name + ".part")
    with _written(path):
        try:
            with part.open("wb") as file:
                if private:
                    part.chmod(0o600)
                file.write(content)
                crash_point(f"{path.name}:written")
                file.flush()
                os.fsync(file.fileno())
            crash_point(f"{path.name}:synced")
            os.replace(part, path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    crash_point(f"{path.name}:replaced")


def append_line(path: Path, line: str) -> None:
    """Add a line that is on disk when this returns; a kill may leave part of it at the end of the file."""
    content = line.encode() + b"\n"
    with _written(path), path.open("ab") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        crash_point(f"{path.name}:torn")
        file.write(content[len(content) // 2 :])
        file.flush()
        os.fsync(file.fileno())
    crash_point(f"{path.name}:appended")


def _written(path: Path) -> AbstractContextManager[None]:
    return plainly(StorageError, f"{path} cannot be written", "make that possible and try again, a run with --resume")


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system can open a folder, and none that cannot needs it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
