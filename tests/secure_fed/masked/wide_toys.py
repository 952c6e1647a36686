"""A federation for masked sums, with matrices large enough for sketches, and helpers that observe or disturb it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secure_fed.federation import Federation
from secure_fed.methods.method import State
from secure_fed.rounds.engine import run_round
from secure_fed.rounds.sums import Record
from secure_fed.rounds.transport import Recording, Reply, Stage
from secure_fed.tensors.tensors import Layout, Tensors
from tests.secure_fed import private_toys, toys

torch.set_num_threads(1)

LR = 0.05
CHANCE = 1e-9  # p-value limit for tests of system randomness: correct noise is almost never below, wrong noise always
SIZES = (5, 8, 11, 7)
MASKED: dict[str, Any] = {"secure_aggregation.enabled": True}
CLIENT: dict[str, Any] = {"privacy.unit": "client", "privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3}
CLIPPED = {**CLIENT, "privacy.clip_norm": 0.1}
DISTRIBUTED = {**CLIPPED, **MASKED, "privacy.noise": "distributed"}
HIDDEN = {**DISTRIBUTED, "privacy.hidden_cohort": True, "federation.cohort": 3}
PRIVACY: dict[str, dict[str, Any]] = {
    "nothing": {},
    "central": CLIPPED,
    "distributed": {**CLIPPED, "privacy.noise": "distributed"},
    "hidden": {**CLIPPED, "privacy.noise": "distributed", "privacy.hidden_cohort": True, "federation.cohort": 3},
    "local": {**CLIPPED, "privacy.noise": "local"},
    "example": {**CLIENT, "privacy.unit": "example"},
}
SKETCH: dict[str, Any] = {"method.name": "fra_lora", "method.transport_form": "sketch"}
WAYS: dict[str, dict[str, Any]] = {
    "fedlora": {"method.name": "fedlora"},
    "ffa_lora": {"method.name": "ffa_lora"},
    "fra_lora": {"method.name": "fra_lora"},
    "fra_lora sketch": SKETCH,
    "fra_then_ffa": {"method.name": "fra_then_ffa", "method.switch_round": 1},
    "fra_then_ffa sketch": {**SKETCH, "method.name": "fra_then_ffa", "method.switch_round": 1},
}

PAIRS = [(way, privacy) for way in WAYS for privacy in PRIVACY if not ("sketch" in way and privacy == "hidden")]


class Wide(nn.Module):
    """A model with 24 inputs and three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(24, 20)
        self.value = nn.Linear(20, 24)
        self.classifier = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.value(self.query(x).tanh()).tanh())
        return scores


def examples(seed: int, count: int) -> list[toys.Item]:
    x = torch.randn(count, 24, generator=torch.Generator().manual_seed(seed))
    return [{"x": row, "labels": int(row[:3].argmax())} for row in x]


def federation(
    settings: Mapping[str, Any] | None = None, *, sizes: Sequence[int] = SIZES, seed: int | None = None, **own: Any
) -> Federation:
    """A federation of `Wide`; by default every client is in every cohort."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Wide()
    parts = {"model": model, "train": [examples(k + 1, size) for k, size in enumerate(sizes)], "test": examples(99, 20)}
    usual = {"federation.cohort": len(sizes), **(settings or {})}
    return private_toys.federation(usual, seed, sizes=sizes, **{**parts, **own})


def dead(count: int) -> list[toys.Item]:
    """Examples of NaN, which give a non-finite update."""
    return [{"x": torch.full((24,), math.nan), "labels": 0} for _ in range(count)]


@dataclass
class Heard:
    """Every client's reply before encoding and masks, by (round, pass) and client."""

    replies: dict[tuple[int, str], dict[int, Reply]] = field(default_factory=dict)

    def values(self, round_: int, pass_name: str) -> dict[int, np.ndarray]:
        """The contributions as float64 vectors."""
        return {client: flat(reply.contribution) for client, reply in self.replies[round_, pass_name].items()}


def listen(built: Federation) -> Heard:
    heard = Heard()
    for client in built.assembly.clients:
        client.handle = _listening(client.handle, heard)  # type: ignore[method-assign]
    return heard


def _listening(handle: Callable[[Any], Reply], heard: Heard) -> Callable[[Any], Reply]:
    def handled(request: Any) -> Reply:
        reply = handle(request)
        heard.replies.setdefault((request.round, request.pass_name), {})[reply.client] = reply
        return reply

    return handled


def flat(tensors: Tensors) -> np.ndarray:
    vector: np.ndarray = Layout.of(tensors).flatten(tensors, torch.float64).numpy()
    return vector


@dataclass
class Seen:
    """The outcome of one round outside a run."""

    after: State
    record: Record
    means: dict[str, np.ndarray]


def one_round(built: Federation, round_: int = 0, transport: Any = None) -> Seen:
    """Runs round `round_` from the initial state. Clients in masked sums refuse to repeat a round."""
    means: dict[str, np.ndarray] = {}
    server = built.assembly.server

    class Watching:
        def __getattr__(self, name: str) -> Any:
            return getattr(server.method, name)

        def apply(self, state: State, given: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
            means.update({name: flat(mean) for name, mean in given.items()})
            after: State = server.method.apply(state, given, noise_std)
            return after

    watched: Any = replace(server, method=Watching(), charge=lambda round_, pass_name: None)
    after, record = run_round(
        replace(built.assembly.initial, round=round_), watched, transport or built.assembly.transport, LR
    )
    return Seen(after, record, means)


def scale(clients: int, bound: float, bits: int = 32) -> float:
    """The largest power of two as scale at which a sum of `clients` values at the bound fits into the words."""
    found = 2.0**60
    while clients * (math.floor(bound * found) + 1) >= 2 ** (bits - 1) or bound * found > 2.0**52:
        found /= 2
    return found


@dataclass
class Tampered:
    """A transport that lies to clients: each receives `lie(client, stage)` in place of the stage."""

    inner: Any
    lie: Callable[[int, Stage], Stage]

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        return self.inner.exchange({client: self.lie(client, ask) for client, ask in requests.items()})


@dataclass
class Losing:
    """A transport that loses clients: each stops answering at stage `gone[client]` ("change" if there are no masks)."""

    inner: Any
    gone: Mapping[int, str]
    lost: set[int] = field(default_factory=set)

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        for client, ask in requests.items():
            if self.gone.get(client) == getattr(ask, "name", "change"):
                self.lost.add(client)
        return self.inner.exchange({client: ask for client, ask in requests.items() if client not in self.lost})


def without_time(records: Sequence[Record]) -> list[Record]:
    """The records without durations."""
    plain = toys.without_time(records)
    return [
        {**record, "masked": {k: v for k, v in record["masked"].items() if not k.endswith("_seconds")}}
        if "masked" in record
        else record
        for record in plain
    ]


@dataclass
class Interrupting:
    """A callback that interrupts the run after a round."""

    after: int

    def on_round_end(self, record: Record, state: State) -> None:
        if record["round"] == self.after:
            raise KeyboardInterrupt


def recorder(built: Federation) -> Recording:
    """From now on the federation's exchanges are recorded."""
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    return recording


def let_train(built: Federation, clients: Collection[int]) -> None:
    """Sets the coins of a hidden cohort, so that exactly these clients train."""
    for index, member in enumerate(built.assembly.masks.clients):  # type: ignore[union-attr]
        member._coin = 1.0 if index in clients else 0.0
