"""When things happened in Flower's processes of this machine, as lines of JSON in a file. Needs neither torch nor Flower."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

MESSAGES, STAGES = "messages.jsonl", "stages.jsonl"  # what a node did for each message; what a server did in each stage


def note(file: Path, **what: Any) -> None:
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps(what) + "\n")


def noted(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def process_began() -> float:
    """When this process was started, by the system's word (Linux), to its hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
