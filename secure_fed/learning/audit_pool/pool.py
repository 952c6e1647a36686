"""The audit pool of a run: units of the data, or phantoms, some of which train. `hold_out` chooses it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secure_fed.config import RunConfig
from secure_fed.learning.audit_pool.unit import Unit
from secure_fed.learning.data.encode import Encoded


@dataclass(frozen=True)
class Place:
    """The place of a unit's examples: its client, and their indices among the client's examples."""

    client: int
    at: NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """A division of the examples: the clients that train, and the examples and groups of each."""

    names: list[str]
    train: list[Sequence[Any]]
    groups: list[Sequence[str]] | None


@dataclass(frozen=True)
class AuditPool:
    """The audit pool of a run.

    kind: the kind of unit: "example", "group" or "client". members: (units,) whether each unit trains. why: the reason, if
    there is no pool. names, train, groups: of all clients, before the holding out. copies: held-out examples that occur more
    than once, which are no units. of: the origin of the units, "data", or "phantoms", which are nobody's data; directions:
    whether units pull the model along directions of their own.
    """

    kind: str
    names: Sequence[str]
    train: Sequence[Sequence[Any]]
    groups: Sequence[Sequence[str]] | None = None
    units: tuple[Unit, ...] = ()
    members: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))
    why: str = ""
    places: tuple[Place, ...] = ()
    copies: tuple[Place, ...] = ()
    of: str = "data"
    directions: bool = False

    def split(self, inside: NDArray[np.bool_]) -> Split:
        """The clients' training examples if exactly the `inside` units of the pool were members; the order stays."""
        out = [*(place for place, is_in in zip(self.places, inside, strict=True) if not is_in), *self.copies]
        if self.kind == "client":
            gone = {place.client for place in out}
            stay = [client for client in range(len(self.names)) if client not in gone]
            groups = None if self.groups is None else [self.groups[client] for client in stay]
            return Split([self.names[client] for client in stay], [self.train[client] for client in stay], groups)
        kept = [np.ones(len(own), dtype=bool) for own in self.train]
        for place in out:
            kept[place.client][place.at] = False

        def left(every: Sequence[Sequence[Any]]) -> list[Any]:
            return [taken(own, np.flatnonzero(keep)) for own, keep in zip(every, kept, strict=True)]

        return Split(list(self.names), left(self.train), None if self.groups is None else left(self.groups))

    @property
    def digest(self) -> str:
        """SHA-256 over the units and their coins: a resumed run must have the same."""
        coins = zip((unit.name for unit in self.units), self.members.tolist(), strict=True)
        return hashlib.sha256(json.dumps(list(coins)).encode()).hexdigest()

    @property
    def out(self) -> int:
        """The number of units that are not trained on, with their copies."""
        return int((~self.members).sum()) + len(self.copies)

    def held_out(self, *, counted: bool) -> str:
        """The training data that the membership figure costs, in a sentence; empty if it costs none.

        counted: whether to state the number of units, which follows from the data.
        """
        out = self.out
        if not out or self.of == "phantoms":
            return ""
        every = {"client": len(self.train), "example": sum(map(len, self.train))}.get(self.kind)
        some = f"{out:,}" + ("" if every is None else f" of {every:,}") if counted else "some"
        return (
            f"{some} {self.kind}s, chosen by coins, are not trained on, to measure membership inference"
            " (evaluation.audit_fraction; 0 trains on all)"
        )

    def record(self) -> dict[str, Any]:
        """The pool's record for the owner of a run: every unit, its client, and whether it is a member."""
        coins = zip(self.units, self.members.tolist(), strict=True)
        units = [{"unit": unit.name, "client": unit.client, "member": member} for unit, member in coins]
        return {"kind": self.kind, "why": self.why, "units": units}


def kind_of(config: RunConfig) -> str:
    """The kind of unit in the pool: `evaluation.audit_unit`, or with `auto` the unit that privacy protects."""
    chosen, protected = config.evaluation.audit_unit, config.privacy.unit
    return chosen if chosen != "auto" else {"none": "example"}.get(protected, protected)


def draws(key: bytes, content: bytes) -> tuple[float, float]:
    """Two numbers in [0, 1), uniform and independent over keys."""
    said = hashlib.blake2b(content, key=key, digest_size=16).digest()
    return int.from_bytes(said[:8], "big") / 2**64, int.from_bytes(said[8:], "big") / 2**64


def taken(own: Sequence[Any], at: NDArray[np.int64]) -> Any:
    return own.take(at) if isinstance(own, Encoded) else [own[int(i)] for i in at]
