"""A program under a pseudo-terminal: what it writes, and when."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Seen:
    """What a person saw. gaps: (seconds, text before) of every silence, the one before the end too, longest first."""

    status: int
    text: str
    gaps: list[tuple[float, str]]

    @property
    def plain(self) -> str:
        """The text without the terminal's control sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)


def seen(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Seen:
    """Run a Python program with all its streams on a terminal of 100 columns, until it ends."""
    main, program = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=program,
        stdout=program,
        stderr=program,
        cwd=folder,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **(environment or {})},
    )
    os.close(program)
    text, gaps, last = b"", list[tuple[float, str]](), time.monotonic()
    try:
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # Linux's way to say that nobody has the terminal open any more
                part = b""
            now = time.monotonic()
            gaps.append((now - last, text[-200:].decode(errors="replace")))
            text, last = text + part, now
            if not part:
                break
    finally:
        os.close(main)
        status = process.wait()
    return Seen(status, text.decode(errors="replace"), sorted(gaps, reverse=True))
