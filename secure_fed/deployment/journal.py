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

JOURNAL, STRANGERS = "journal.jsonl", "strangers.jsonl"
_MOST = 10_000_000  # bytes, before a file is renamed: ".1" is appended to its name
_SENTENCE = 4000  # characters, above the longest sentences of errors
_NAME = 100  # characters, above the longest name of a federation or of a kind of message


@dataclass(frozen=True)
class Journal:
    """The journal in a node's folder. It contains no contribution and no key.

    Anybody on the network can send a node as many envelopes as he likes. Those that no coordinator named by the owner signed
    have a file of their own, so that they cannot push the lines about a federation out of the journal.
    """

    folder: Path

    def note(self, asked: str, federation: str, sentence: str, *, refused: bool, known: bool = True) -> None:
        """Add a line, of bounded length whatever was asked. Failure to write the journal stops nothing.

        known: a coordinator that the owner named has signed the envelope.
        """
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        names = {"federation": federation[:_NAME], "asked": asked[:_NAME]}
        line = {"time": now, **names, "refused": refused, "what": sentence[:_SENTENCE]}
        path = self.folder / (JOURNAL if known else STRANGERS)
        with suppress(OSError):
            if path.exists() and path.stat().st_size > _MOST:
                os.replace(path, path.with_name(f"{path.name}.1"))
            with open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(json.dumps(line) + "\n")

    def last(self, count: int, *, refused: bool = False, known: bool = True) -> list[dict[str, Any]]:
        """The newest lines, the oldest of them first; only refusals if `refused`. known: as in `note`."""
        name = JOURNAL if known else STRANGERS
        kept: deque[dict[str, Any]] = deque(maxlen=count)
        for path in (self.folder / f"{name}.1", self.folder / name):
            with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
                for text in file:
                    with suppress(ValueError):
                        line = json.loads(text)
                        if isinstance(line, dict) and (line.get("refused") or not refused):
                            kept.append(line)
        return list(kept)
