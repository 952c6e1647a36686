"""Four adversaries, by their view of a run. Each sees everything that the one before it sees, and more.

    outsider        the final adapter
    fellow_client   the global state of every round, as a client that took part in every round
    secure_server   also the sum of every pass that a server decodes under secure aggregation, before its own noise
    server          also every single update

A vantage is a filter over a recording. In a recording without masks, `secure_server` gets the sums that it would have seen with
masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import torch

from secure_fed.runs.recording import Recorded, Summed, Update
from secure_fed.tensors.layout import Layout
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Tensors


@dataclass(frozen=True)
class Vantage:
    """title, sees: texts for readers of the report."""

    name: str
    title: str
    sees: str


VANTAGES = {
    one.name: one
    for one in (
        Vantage("outsider", "Outsider", "the final adapter"),
        Vantage("fellow_client", "Fellow client", "the shared model after every round"),
        Vantage("secure_server", "Server behind secure aggregation", "the sum of updates in every round"),
        Vantage("server", "Server without secure aggregation", "every single update"),
    )
}


@dataclass(frozen=True)
class Seen:
    """The view of an adversary. states: by number of finished rounds, from 0; lr: local learning rates, known from settings."""

    vantage: str
    final: Tensors
    states: Mapping[int, Tensors] = field(default_factory=dict)
    sums: Sequence[Summed] = ()
    updates: Sequence[Update] = ()
    lr: Mapping[int, float] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A digest of every number in this view: with the same digest before and after an attack, it changed none of them."""
        held = [
            self.final,
            *self.states.values(),
            *(one.total for one in self.sums),
            *(one.contribution for one in self.updates),
        ]
        found = sha256()
        for part in (part for tensors in held for part in tensors.parts().values()):
            found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()


def seen(vantage: str, final: Tensors, recorded: Recorded | None, *, averaged: bool = False) -> Seen:
    """This adversary's part of the recording. Without a recording, every adversary has the final adapter alone.

    averaged: the final adapter is the mean of several rounds' models, so it is not a step from the model before it.
    """
    rank = list(VANTAGES).index(vantage)
    if recorded is None or rank == 0:
        return Seen(vantage, final)
    sums = (recorded.sums or sums_of(recorded.updates)) if rank >= 2 else ()
    updates = recorded.updates if rank >= 3 else ()
    last = max(recorded.states) if averaged else None
    states = {round_: state for round_, state in recorded.states.items() if round_ != last}
    return Seen(vantage, final, states, sums, updates, recorded.lr)


def sums_of(updates: Sequence[Update]) -> list[Summed]:
    """The sums that secure aggregation would show of these updates."""
    grouped: dict[tuple[int, str], list[Update]] = {}
    for update in updates:
        grouped.setdefault((update.round, update.pass_name), []).append(update)
    return [summed(together) for together in grouped.values()]


def summed(updates: Sequence[Update]) -> Summed:
    """The sum of updates of one pass of a round."""
    first = updates[0]
    total = PlainSum(Layout.of(first.contribution))
    for update in updates:
        total.add(update.contribution, update.weight)
    return Summed(first.round, first.pass_name, total.total(), total.weight, len(updates))
