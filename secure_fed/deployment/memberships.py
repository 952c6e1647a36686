"""The federations of a node: those that it accepted, and those that its owner has closed. Each has a folder:

    accepted.json   the federation's name, its coordinator and its cost, noted when the node accepted it
    closed.json     the node answers no request of this federation any more

An owner closes a federation with `secure-fed node release` (`releasing`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privacy.filters import Cost
from privacy.ledger import Ledger
from secure_fed.deployment.charter import Charter, fingerprint
from secure_fed.deployment.home import FEDERATIONS, Home
from secure_fed.deployment.home_files import HomeError
from secure_fed.errors import plainly
from secure_fed.runs.budget import name_in_ledger
from secure_fed.runs.directory import ATTENDANCE
from secure_fed.runs.durable import atomic_write

ACCEPTED, CLOSED = "accepted.json", "closed.json"
_SHORT = 12  # digits of a charter's digest, enough to tell federations apart


@dataclass(frozen=True)
class Membership:
    """A federation of this node. noted: what accepted.json says; empty where an earlier version accepted it."""

    folder: Path
    noted: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Membership:
        noted: Any = {}
        if (path := folder / ACCEPTED).exists():
            with plainly(HomeError, f"{path} is damaged", "remove it: it only informs the owner"):
                noted = json.loads(path.read_text(encoding="utf-8"))
        return cls(folder, noted if isinstance(noted, dict) else {})

    @property
    def digest(self) -> str:
        return self.folder.name[:_SHORT]

    @property
    def name(self) -> str:
        return str(self.noted.get("name", ""))

    @property
    def closed(self) -> bool:
        return closed(self.folder)

    def close(self) -> None:
        """Close the federation here, on disk when this returns."""
        if not self.closed:
            atomic_write(self.folder / CLOSED, json.dumps({"time": _now()}) + "\n", private=True)

    def step(self, ledger: Ledger, run: str) -> str:
        """Why this node may have made a private step; "" if it certainly made none. run: its name in the ledger."""
        if charged := sum(ledger.charged(run).values()):
            return f"this node has charged {charged} releases of it"
        try:
            if (self.folder / ATTENDANCE).stat().st_size:
                return "this node took part in a round of it, or was about to"
        except FileNotFoundError:
            return (
                f"{self.folder / ATTENDANCE}, the record of its rounds, is missing, so that a step may have been made"
            )
        return ""

    def facts(self, ledger: Ledger | None) -> dict[str, Any]:
        """For the owner: the federation, its cost, and how much of it is reserved and charged in the ledger."""
        run = name_in_ledger(self.folder)
        cost = ledger.reserved(run) if ledger and run else None
        return {
            "digest": self.digest,
            "name": self.name,
            "coordinator": self.noted.get("coordinator"),
            "accepted": self.noted.get("time"),
            "cost": self.noted.get("cost"),
            "reserved": None if cost is None else {"epsilon": cost.epsilon, "delta": cost.delta},
            "charged": sum(ledger.charged(run).values()) if ledger and run else 0,
            "closed": self.closed,
            "given_back": bool(ledger and run and ledger.closed(run)),
        }


def note_accepted(folder: Path, charter: Charter, cost: Cost | None) -> None:
    """Note the federation that the node accepts. cost: None without a guarantee."""
    if not (folder / ACCEPTED).exists():
        spent = None if cost is None else {"epsilon": cost.epsilon, "delta": cost.delta}
        noted = {"name": charter.name, "coordinator": fingerprint(charter.coordinator), "cost": spent, "time": _now()}
        atomic_write(folder / ACCEPTED, json.dumps(noted, indent=1) + "\n", private=True)


def memberships(home: Home) -> list[Membership]:
    """All federations of the node, in the order of their folders' names."""
    folders = sorted((home.folder / FEDERATIONS).glob("*"))
    return [Membership.of(one) for one in folders if (one / ACCEPTED).exists() or name_in_ledger(one)]


def closed(folder: Path) -> bool:
    """Whether the owner has closed the federation of this folder."""
    return (folder / CLOSED).exists()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
