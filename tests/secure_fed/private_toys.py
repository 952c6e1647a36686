"""The federation of `toys` under differential privacy, and naive computations of its expected results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from privacy.entropy import Entropy, SeededEntropy
from privacy.ledger import Ledger
from privacy.participation import Poisson, Uniform
from secure_fed.federation import Federation
from secure_fed.methods.method import State
from secure_fed.rounds.engine import run_round
from secure_fed.rounds.sums import Record
from secure_fed.rounds.transport import Recording, Reply, Request
from secure_fed.tensors.tensors import LowRank, Tensors
from tests.secure_fed import toys

LR = 0.05
CLIENT: dict[str, Any] = {"privacy.unit": "client", "privacy.clip_norm": 0.1, "privacy.delta": 1e-3}
TARGET = {**CLIENT, "privacy.epsilon": 8.0, "federation.cohort": 2}
NOISE = {**CLIENT, "privacy.noise_multiplier": 1.0, "federation.cohort": 3}  # all clients take part: exact and quick
EXAMPLE: dict[str, Any] = {"privacy.unit": "example", "privacy.clip_norm": 0.1, "privacy.delta": 1e-3}


def federation(
    settings: Mapping[str, Any], seed: int | None = None, *, sizes: Sequence[int] = (5, 8, 11), **own: Any
) -> Federation:
    """The toy federation with noise and coins from the operating system, or from `seed` if given."""
    entropy: Entropy | None = None if seed is None else SeededEntropy(seed)
    return toys.federation(settings, sizes=sizes, entropy=entropy, **own)


class Nobody(Poisson):
    """A sampler that draws no client."""

    def draw(self, uniform: Uniform, round_: int = 0) -> list[int]:
        return []


@dataclass(frozen=True)
class Watched:
    """A method that records the means and the noise level passed to `apply`. As a callback it forgets the probe."""

    inner: Any
    seen: list[tuple[Mapping[str, Tensors], float]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def on_run_begin(self, *given: Any) -> None:
        self.seen.clear()

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        self.seen.append((means, noise_std))
        after: State = self.inner.apply(state, means, noise_std)
        return after


@dataclass
class Round:
    """One round made outside a run, with the mean given to its method, its exchanges and its charges."""

    federation: Federation
    after: State
    record: Record
    mean: Tensors
    noise_std: float
    exchanges: list[tuple[Request, Reply]]
    charged: list[tuple[int, str]]


def one_round(built: Federation, start: State | None = None, **changed: Any) -> Round:
    """Makes one round. changed: fields of the server that are replaced."""
    charged: list[tuple[int, str]] = []
    watched, recording = Watched(built.assembly.server.method), Recording(built.assembly.transport)
    server = replace(
        built.assembly.server,
        method=watched,
        charge=lambda round_, pass_name: charged.append((round_, pass_name)),
        **changed,
    )
    after, record = run_round(start or built.assembly.initial, server, recording, built.config.training.rate)
    means, noise_std = watched.seen[0]
    return Round(built, after, record, means["change"], noise_std, recording.exchanges, charged)


def recorded(built: Federation) -> list[tuple[Request, Reply]]:
    """Records the messages of the federation's rounds from here on, in the list that is returned."""
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    return recording.exchanges


def dense(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors in float64, with low-rank products multiplied out."""
    return {
        name: member.left.double() @ member.right.double() if isinstance(member, LowRank) else member.double()
        for name, member in tensors.items()
    }


def noise(tensors: Mapping[str, Tensor], std: float, seed: int, *label: str | int) -> dict[str, Tensor]:
    """The noise for these tensors from the stream with that label, drawn in the order of their names."""
    stream = SeededEntropy(seed).stream(*label)
    return {name: std * torch.from_numpy(stream.normal(tuple(tensors[name].shape))) for name in sorted(tensors)}


def charges(ledger: Ledger | Path) -> list[tuple[str, int]]:
    """(who, releases) of every charge in the ledger, in order."""
    opened = ledger if isinstance(ledger, Ledger) else Ledger.open(ledger)
    return [(row.body["who"], row.body["releases"]) for row in opened.rows() if row.kind == "charge"]


def own_ledger(run: Path) -> Ledger:
    """The ledger inside a run directory."""
    return Ledger.open(run / "private" / "budget.sqlite")


def charged(run: Path) -> int:
    """The number of releases charged to the ledger inside a run directory, summed over everyone charged."""
    return sum(releases for _, releases in charges(own_ledger(run)))
