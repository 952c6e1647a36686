"""A node's journal for its owner: a line for every request that the node answers or refuses, with the outcome."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "journal.jsonl"
_MOST = 10_000_000  # bytes, before the file is renamed journal.jsonl.1
_SENTENCE = 4000  # characters, above the longest sentences of errors
_NAME = 100  # characters, above the longest name of a federation or of a kind of message


@dataclass(frozen=True)
class Journal:
    """The journal in a node's folder. It contains no contribution and no key."""

    folder: Path

    def note(self, asked: str, federation: str, sentence: str, *, refused: bool) -> None:
        """Add a line, of bounded length whatever was asked. Failure to write the journal stops nothing."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        names = {"federation": federation[:_NAME], "asked": asked[:_NAME]}
        line = {"time": now, **names, "refused": refused, "what": sentence[:_SENTENCE]}
        path = self.folder / FILE
        with suppress(OSError):
            if path.exists() and path.stat().st_size > _MOST:
                os.replace(path, path.with_name(f"{FILE}.1"))
            with open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(json.dumps(line) + "\n")

    def last(self, count: int, *, refused: bool = False) -> list[dict[str, Any]]:
        """The newest lines, the oldest of them first; only refusals if `refused`."""
        kept: deque[dict[str, Any]] = deque(maxlen=count)
        for path in (self.folder / f"{FILE}.1", self.folder / FILE):
            with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
                for text in file:
                    with suppress(ValueError):
                        line = json.loads(text)
                        if isinstance(line, dict) and (line.get("refused") or not refused):
                            kept.append(line)
        return list(kept)
