"""Times of events in Flower's processes on this machine, as lines of JSON in a file. Needs neither torch nor Flower."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

MESSAGES, STAGES = "messages.jsonl", "stages.jsonl"  # a node's times for each message; a server's times in each stage


def note(file: Path, **what: Any) -> None:
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps(what) + "\n")


def noted(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def process_began() -> float:
    """The start time of this process from the system (Linux), to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
