"""Processes under other users of this machine, by number: no account has to exist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ANYBODY = 64199  # a user without rights


def under(user: int, group: int, *others: int) -> dict[str, Any]:
    """The arguments of `subprocess` for a process of this user, with this primary group and these other ones."""
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])
    programs = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )  # Flower's are there
    environment = {
        **os.environ,
        "PATH": programs,
        "PYTHONPATH": paths,
        "HOME": "/nonexistent",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return {"user": user, "group": group, "extra_groups": list(others), "env": environment, "cwd": "/"}


def python() -> str:
    """An interpreter that other users can run: this one, or the system's of the same version, if this one is in a private
    folder. Skips the test where there is none, or this process cannot start others under two users.
    """
    found, reason = _python()
    if reason:
        pytest.skip(reason)
    return found


@cache
def _python() -> tuple[str, str]:
    if not sys.platform.startswith("linux"):
        return "", "needs Linux, which reports the user behind a connection"
    if os.getuid() != 0:
        return "", "needs root, to start processes under two users"
    reason = "other users can run no Python of this version"
    for candidate in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        with suppress(OSError):
            command = [candidate, "-c", "import numpy, secure_fed"]
            done = subprocess.run(command, **under(ANYBODY, ANYBODY), capture_output=True, text=True)
            if done.returncode == 0:
                return candidate, ""
            reason = f"other users cannot import secure-fed: {done.stderr.strip()[-200:]}"
    return "", reason


@contextmanager
def place() -> Iterator[Path]:
    """A new folder that every user may enter, with a path short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="sf", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def given_to(user: int, group: int, *paths: Path) -> None:
    """Make these files and folders, with all that is in them, this user's."""
    for path in paths:
        for one in (path, *path.rglob("*")):
            os.chown(one, user, group)
