"""The state of one session with all its clients in one process: messages, costs, refusals, and the plain sum to compare with.

`protocols.rig.play` carries a scene from stage to stage. The clients and the server are those of the protocol itself, so a lie
is noticed by the checks of the protocol, or not at all.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protocols.client import Client
from protocols.errors import ProtocolError
from protocols.keys import Identity
from protocols.messages import Words, word
from protocols.parameters import Parameters, stages
from protocols.policy import Policy
from protocols.server import Server

SERVER = -1  # who the server is among those that may notice something
PARAMETERS = "parameters"  # the stage before the first: what a session is to be

Inbox = dict[int, bytes]  # what the server tells, by client
METHODS = {stage: stage for stage in ("advertise", "share", "mask", "unmask")} | {"consistency": "confirm"}

Progress = Callable[[str, int, int], None]  # stage, clients that are done with it, of how many


@dataclass(frozen=True)
class Refusal:
    """Somebody, a client or SERVER, noticed something."""

    who: int
    stage: str
    error: ProtocolError


@dataclass
class Tally:
    """What one stage has cost so far."""

    name: str
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    client_seconds: list[float] = field(default_factory=list)
    server_seconds: float = 0.0
    answered: int = 0


@dataclass
class Scene:
    """A session and what happened in it. `leaving[stage]` are silent from that stage on. The roles are clients that stay."""

    parameters: Parameters
    policy: Policy
    identities: Mapping[int, Identity]
    leaving: Mapping[str, Collection[int]]
    peer: int = 0  # whom lies are about; its number is the smallest of the three
    victim: int = 0  # to whom alone the server lies, where it does not lie to all
    liar: int = 0  # the client that lies
    progress: Progress | None = None
    clients: dict[int, Client] = field(default_factory=dict)
    inbox: Inbox = field(default_factory=dict)
    answers: dict[tuple[str, int], bytes] = field(default_factory=dict)  # only of those three
    messages: dict[tuple[str, int], bytes] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    expected: Counter[tuple[int, str]] = field(default_factory=Counter)  # who has to refuse something when
    tallies: list[Tally] = field(default_factory=list)
    summed: set[int] = field(default_factory=set)
    aborted: str = ""
    believed: int = 0  # lies, of those told beside the stages, that somebody has taken for the truth
    stage: str = PARAMETERS  # the present one
    lies_in: str = ""  # the stage in which an attack is to be noticed, as `Attack.stage` names it
    kept: Any = None  # whatever an attack has to remember
    server: Server = field(init=False)  # made when the clients have joined

    def __post_init__(self) -> None:
        self.gone: set[int] = set()
        self._vectors: dict[int, Words] = {}
        self._random = np.random.default_rng()
        self.plain: Words = np.zeros(self.parameters.length, dtype=word(self.parameters))

    def stage_of(self, name: str) -> str:
        """The stage in which the roster or the survivors are shown; of any other name, itself."""
        names = stages(self.parameters)
        return {"roster": names[1], "survivors": names[names.index("mask") + 1]}.get(name, name)

    def expect(self, who: int, stage: str = "") -> None:
        """Somebody has to notice something: in the attack's stage, or else in the present one."""
        self.expected[who, stage or self.stage_of(self.lies_in) or self.stage] += 1

    def deliver(self, client: int, message: bytes, *, lie: bool = False) -> None:
        """The server gets a message, which it has to refuse if it is a lie."""
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
        """Ask a client for something beside what the stages ask for. It has to refuse."""
        self.expect(client.me, stage)
        self.believed += self.act(client, stage, message) is not None

    def act(self, client: Client, stage: str, message: bytes) -> bytes | None:
        """None if it refuses."""
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
