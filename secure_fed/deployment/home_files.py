"""Reading and writing the files of a deployment's folders: private folders, keys, and sections of TOML."""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from protocols.keys import Identity, Secret
from secure_fed.config.setting import coerced
from secure_fed.errors import ConfigError, UsageError, plainly
from secure_fed.runs.durable import atomic_write

Section = TypeVar("Section")


class HomeError(UsageError):
    """A folder of a deployment that is missing, damaged, or open to others."""


def new_folder(folder: Path, command: str) -> None:
    """Make a private folder; it must be new or empty."""
    with plainly(HomeError, f"{folder} cannot be made", f"give `{command}` another folder"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise HomeError(f"{folder} is not empty: give `{command}` a new folder")
        folder.chmod(0o700)


def write_key(path: Path) -> Identity:
    """A new key from the operating system's entropy, in a file that only its owner can read."""
    identity = Identity.new()
    atomic_write(path, identity.private.reveal().hex() + "\n", private=True)
    return identity


def read_key(path: Path) -> Identity:
    """The private key in a file that nobody else can read."""
    with plainly(HomeError, f"the key {path} cannot be read", "restore it, or make a new folder"):
        opened = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(opened) as file:
            mode = stat.S_IMODE(os.fstat(opened).st_mode)
            text = file.read(100).strip()
    if mode & 0o077:
        raise HomeError(f"the key {path} has mode {mode:o}, so that others can read it: `chmod 600` it, or replace it")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise HomeError(f"the key {path} is damaged: restore it, or make a new folder")
    return Identity.from_secret(Secret(key))


def require_apart(paths: Iterable[Path], group: int) -> None:
    """HomeError if one of these files or folders can be read by the users of this group, or by all users.

    A file is read by whom its mode admits, if the modes of all folders above let him in. (Access lists are not looked at.)
    """
    for path in paths:
        with plainly(HomeError, f"{path} cannot be read", "restore it"):
            first, *above = (one.stat() for one in (path.resolve(), *path.resolve().parents))
        reads = 5 if stat.S_ISDIR(first.st_mode) else 4  # who may enter a folder reads the files whose names he knows
        if _bits(first, group) & reads and all(_bits(one, group) & 1 for one in above):
            error = f"{path} can be read by the group {group} or by all users, and the SuperNode, which runs the code that its "
            error += "SuperLink sends, is one of them: `chmod go-rwx` it, or a folder above"
            raise HomeError(error).about("--group", group, "a group that cannot read the node's folder and data")


def _bits(found: os.stat_result, group: int) -> int:
    """The permissions (4: read, 2: write, 1: enter) of a user of this group who does not own the file."""
    return (found.st_mode >> 3 if found.st_gid == group else found.st_mode) & 7


def placed(folder: Path, path: str, setting: str) -> Path:
    """The absolute path that is meant: a relative one is in this folder, and ~ is the user's. HomeError for no user's ~."""
    with plainly(HomeError, f"{setting} = {path!r:.200} names no place on this machine", f"correct {setting}"):
        return (folder / Path(path).expanduser()).absolute()


def read_toml(path: Path, command: str) -> dict[str, Any]:
    with plainly(HomeError, f"{path} cannot be read", f"give a folder that `{command}` has made"):
        content = path.read_bytes()
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise HomeError(f"{path} is not valid TOML: {error}") from error


def require_known(found: Iterable[str], known: Iterable[str], place: Path, section: str = "") -> None:
    words = list(known)
    for name in found:
        if name not in words:
            near = difflib.get_close_matches(name, words, n=1, cutoff=0.4)
            meant = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(words)}"
            raise HomeError(f"{place} has the unknown name {section}{name!r}: {meant}")


def section_of(kind: type[Section], table: Any, place: Path, section: str) -> Section:
    """A section's values, each checked against its declared type."""
    if not isinstance(table, Mapping):
        raise HomeError(f"{place} has {section} = {table!r:.40}: write a section [{section}]")
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    require_known(table, known, place, f"in [{section}] ")
    try:
        return kind(**{name: coerced(f"{section}.{name}", known[name], value) for name, value in table.items()})
    except ConfigError as error:
        raise HomeError(f"{place}: {error}") from error
