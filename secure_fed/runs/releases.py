"""The release of a private round, kept until the round's end is saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from secure_fed.methods.method import State
from secure_fed.rounds.client import Client
from secure_fed.rounds.registered import existing
from secure_fed.runs.checkpoint import read_released
from secure_fed.runs.store import RunStore
from secure_fed.tensors.tensors import Tensors


@dataclass(frozen=True)
class Releases:
    """`engine.Keeper` in a run directory."""

    store: RunStore
    clients: Sequence[Client]

    def kept(self, round_: int) -> tuple[State, dict[str, Any]] | None:
        found = read_released(self.store.path)
        if found is None or found.state.round != round_:
            return None
        for index, kept in found.personal.items():
            self.clients[index].kept = kept
        return found.state, found.record

    def keep(self, state: State, record: dict[str, Any]) -> None:
        self.store.keep(state, kept_by(self.clients), record)


def kept_by(clients: Sequence[Client]) -> dict[int, Tensors]:
    """The personal tensors of the clients that have trained any."""
    return {client.index: client.kept for client in existing(clients) if client.kept}
