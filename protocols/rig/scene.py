"""The state of one session with all its clients in one process: messages, costs, refusals, and the plain sum to compare with.

`protocols.rig.play` carries a scene from stage to stage. The clients and the server are the protocol's own, so a lie is noticed
by the protocol's checks, or not at all.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protocols.client import Client
from protocols.codec import Words
from protocols.errors import ProtocolError
from protocols.keys import Identity
from protocols.messages import word
from protocols.parameters import Parameters, stages
from protocols.policy import Policy
from protocols.server import Server

SERVER = -1  # the server's number among the parties that may notice something
PARAMETERS = "parameters"  # the stage before the first: the session's parameters

Inbox = dict[int, bytes]  # the server's messages, by client
METHODS = {stage: stage for stage in ("advertise", "share", "mask", "unmask")} | {"consistency": "confirm"}

Progress = Callable[[str, int, int], None]  # stage, number of clients finished, number of clients


@dataclass(frozen=True)
class Refusal:
    """A client or SERVER refused a message."""

    who: int
    stage: str
    error: ProtocolError


@dataclass
class Tally:
    """The cost of one stage so far."""

    name: str
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    client_seconds: list[float] = field(default_factory=list)
    server_seconds: float = 0.0
    answered: int = 0


@dataclass
class Scene:
    """A session and its events. Clients in `leaving[stage]` are silent from that stage on. The roles are clients that stay."""

    parameters: Parameters
    policy: Policy
    identities: Mapping[int, Identity]
    leaving: Mapping[str, Collection[int]]
    peer: int = 0  # the subject of lies; its number is the smallest of the three
    victim: int = 0  # the only client that the server lies to, where it does not lie to all
    liar: int = 0  # the client that lies
    progress: Progress | None = None
    clients: dict[int, Client] = field(default_factory=dict)
    inbox: Inbox = field(default_factory=dict)
    answers: dict[tuple[str, int], bytes] = field(default_factory=dict)  # only of the three roles
    messages: dict[tuple[str, int], bytes] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    expected: Counter[tuple[int, str]] = field(default_factory=Counter)  # who must refuse something, and when
    tallies: list[Tally] = field(default_factory=list)
    summed: set[int] = field(default_factory=set)
    aborted: str = ""
    believed: int = 0  # the number of lies that `deliver` and `lie` passed on and that were accepted as true
    stage: str = PARAMETERS  # the present one
    lies_in: str = ""  # the stage in which the attack must be noticed, named as in `Attack.stage`
    kept: Any = None  # an attack's own state
    server: Server = field(init=False)  # made when the clients have joined

    def __post_init__(self) -> None:
        self.gone: set[int] = set()
        self._vectors: dict[int, Words] = {}
        self._random = np.random.default_rng()
        self.plain: Words = np.zeros(self.parameters.length, dtype=word(self.parameters))

    def stage_of(self, name: str) -> str:
        """The stage in which the "roster" or the "survivors" are shown; any other name is returned as it is."""
        names = stages(self.parameters)
        return {"roster": names[1], "survivors": names[names.index("mask") + 1]}.get(name, name)

    def expect(self, who: int, stage: str = "") -> None:
        """Note that `who` must refuse something: in `stage`, else the attack's stage, else the present one."""
        self.expected[who, stage or self.stage_of(self.lies_in) or self.stage] += 1

    def deliver(self, client: int, message: bytes, *, lie: bool = False) -> None:
        """Pass the server a message, which it must refuse if it is a lie."""
        if lie:
            self.expect(SERVER, self.stage)
        start = time.perf_counter()
        try:
            self.server.receive(client, message)
        except ProtocolError as error:
            self.refusals.append(Refusal(SERVER, self.stage, error))
            return
        self.tallies[-1].server_seconds += time.perf_counter() - start
        self.believed += lie
        if self.stage == "mask" and client in self._vectors:  # each client's vector once
            self.plain += self._vectors.pop(client)
            self.summed.add(client)

    def lie(self, client: Client, stage: str, message: bytes) -> None:
        """Send a client a message outside the stages' own. It must refuse."""
        self.expect(client.me, stage)
        self.believed += self.act(client, stage, message) is not None

    def act(self, client: Client, stage: str, message: bytes) -> bytes | None:
        """The client's answer; None if it refuses."""
        arguments: tuple[Any, ...] = () if stage == "advertise" else (message,)
        if stage == "mask":
            self._vectors[client.me] = self._vector()
            arguments = (message, self._vectors[client.me])
        start = time.perf_counter()
        try:
            answer: bytes = getattr(client, METHODS[stage])(*arguments)
        except ProtocolError as error:
            self.refusals.append(Refusal(client.me, stage, error))
            return None
        self.tallies[-1].client_seconds.append(time.perf_counter() - start)
        return answer

    def _vector(self) -> Words:
        """(length,) uniform within the session's bound."""
        bound, kind = self.parameters.bound, f"i{self.parameters.bits // 8}"
        return self._random.integers(-bound, bound + 1, self.parameters.length, dtype=kind).view(word(self.parameters))
