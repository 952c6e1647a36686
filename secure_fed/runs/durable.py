"""Writing files so that a reader, or a run resumed after a kill, finds either the old content or the new."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from privacy.ledger_file import sync_folder
from secure_fed.errors import StorageError, UsageError, plainly

_PART = re.compile(r"(.+)\.[0-9a-f]{16}\.part", re.DOTALL)


def crash_point(name: str) -> None:
    """A named point between two durable steps. Does nothing; tests replace it by a kill."""


def atomic_write(path: Path, data: bytes | str, *, private: bool = False) -> None:
    """Replace the file by `data` in one step that survives a power cut; a failed write leaves nothing behind.

    Each of several simultaneous writers uses its own temporary file until it is complete, and the last to finish wins. Only a
    kill leaves a temporary file behind: see `part_of`. private: only its owner can read it, from the first byte on.
    """
    content = data.encode() if isinstance(data, str) else data
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    with _written(path):
        try:
            with open(part, "xb", opener=owners_alone if private else None) as file:
                file.write(content)
                crash_point(f"{path.name}:written")
                file.flush()
                os.fsync(file.fileno())
            crash_point(f"{path.name}:synced")
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    crash_point(f"{path.name}:replaced")


def require_new(out: Path | None, kind: str, endings: Sequence[str]) -> None:
    """UsageError unless a command's --out, if it is set, has such an ending and can be a new file. kind: what is written."""
    if out is None:
        return
    why, limit = "", "a new file"
    with plainly(UsageError, f"{out} cannot be written", "name another file"):
        if out.suffix.lower() not in endings:
            limit = " or ".join(endings)
            why = f"--out is {out}, but {kind} are written as {limit}; give such a name"
        elif out.exists():
            why = f"{out} exists already; name a file that does not"
        elif not out.parent.is_dir():
            why = f"{out} cannot be written: there is no folder {out.parent}; make it, or name another file"
    if why:
        raise UsageError(why).about("--out", out, limit)


def require_empty(folder: Path) -> None:
    """UsageError unless a folder to export to is new or empty."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not an empty folder: give a new one to export to")


def write_new(out: Path, content: str) -> None:
    """`atomic_write` of the file that a command is to write. UsageError if that is not possible."""
    try:
        atomic_write(out, content)
    except StorageError as error:
        raise UsageError(f"{str(error).rpartition(';')[0]}; name another file") from error


def part_of(name: str) -> str:
    """The target name of a killed writer's temporary file with this name; empty for any other file."""
    found = _PART.fullmatch(name)
    return found[1] if found else ""


def clear_parts(folder: Path) -> None:
    """Remove killed writers' temporary files from the folder. Call it with the folder locked: a current writer would fail."""
    with suppress(OSError):  # leftover files do no harm
        for file in folder.iterdir():
            if part_of(file.name):
                file.unlink(missing_ok=True)


def append_line(path: Path, line: str, *, private: bool = False) -> None:
    """Add a line that is on disk when this returns; a kill may leave part of it at the end of the file.

    private: if this creates the file, only its owner can read it.
    """
    content = line.encode() + b"\n"
    with _written(path), open(path, "ab", opener=owners_alone if private else None) as file:
        file.write(content[: len(content) // 2])
        file.flush()
        crash_point(f"{path.name}:torn")
        file.write(content[len(content) // 2 :])
        file.flush()
        os.fsync(file.fileno())
    crash_point(f"{path.name}:appended")


def owners_alone(name: str, flags: int) -> int:
    """An opener of files that their owner alone can read."""
    return os.open(name, flags, 0o600)


def _written(path: Path) -> AbstractContextManager[None]:
    return plainly(StorageError, f"{path} cannot be written", "make that possible and try again")
