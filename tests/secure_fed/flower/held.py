"""Processes of a test that stop at a named instant, until the test lets them go on or kills them.

The test names the instants by files in one folder, which the environment's variable HELD names to the processes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

HELD = "SECURE_FED_TEST_HELD"


def at(instant: str) -> None:
    """Stop here if the test asked for it: once."""
    folder = Path(os.environ[HELD])
    if (asked := folder / instant).exists():
        reached = asked.rename(folder / f"{instant} reached")
        while reached.exists():
            time.sleep(0.05)


class Holds:
    """The test's side."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder

    def ask(self, *instants: str) -> None:
        for instant in instants:
            (self.folder / instant).touch()

    def reached(self, instant: str) -> bool:
        return (self.folder / f"{instant} reached").exists()

    def let_go(self, instant: str) -> None:
        (self.folder / f"{instant} reached").unlink()
