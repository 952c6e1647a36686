"""One session with everybody in one process: who answers, what it costs them, who refuses what, and where a lie is put in.

A `Scene` is played stage by stage. An `Attack` says what a lying server tells, or a lying client sends, in the place of what
they should; everything else is the protocol itself, so an attack is noticed by what clients and servers really check, or not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protocols import chosen, keys, opening, roster
from protocols.client import Client
from protocols.errors import ProtocolError, Tampering
from protocols.keys import Identity
from protocols.messages import Words, word
from protocols.parameters import Parameters, Policy, stages
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


def as_proposed(parameters: Parameters) -> Parameters:
    return parameters


def as_told(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    return inbox


def as_sent(scene: Scene, stage: str, client: int, answer: bytes) -> None:
    scene.hear(client, answer)


def nothing_more(scene: Scene, stage: str) -> None:
    return None


@dataclass(frozen=True)
class Attack:
    """A lie, who should notice it, when, and with which error.

    Every client that is told something false in `stage` has to refuse it, and every false message that the server is sent
    (`Scene.hear` with lie=True) has to be refused by it. `stage` is that of a session, or "roster" or "survivors" for the
    one in which these are shown, or "" for each.
    """

    kind: str
    does: str
    catcher: str  # "server" or "clients"
    stage: str
    error: type[ProtocolError]
    active: bool = False  # only an active session can notice it
    ring: bool = False  # there has to be a ring
    exact: bool = False  # the others must get their sum all the same
    propose: Callable[[Parameters], Parameters] = as_proposed  # what session the clients are asked into
    tell: Callable[[Scene, str, Inbox], Inbox] = as_told  # what the server tells, in the place of what it should
    send: Callable[[Scene, str, int, bytes], None] = as_sent  # what becomes of a client's answer
    closing: Callable[[Scene, str], None] = nothing_more  # before the server ends a stage
    outcome: Callable[[Scene], str] | None = None  # where nobody has to refuse: what came out right, "" if it did not


HONEST = Attack("", "nobody lies", "", "", ProtocolError)


@dataclass
class Scene:
    """A session and what happened in it. `leaving[stage]` are silent from that stage on. The roles are clients that stay."""

    parameters: Parameters
    policy: Policy
    identities: Mapping[int, Identity]
    leaving: Mapping[str, Collection[int]]
    attack: Attack = HONEST
    peer: int = 0  # whom lies are about; its number is the smallest of the three
    victim: int = 0  # to whom alone the server lies, where it does not lie to all
    liar: int = 0  # the client that lies
    progress: Progress | None = None
    clients: dict[int, Client] = field(default_factory=dict)
    inbox: Inbox = field(default_factory=dict)
    said: dict[tuple[str, int], bytes] = field(default_factory=dict)  # only of those three
    told: dict[tuple[str, int], bytes] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    expected: Counter[tuple[int, str]] = field(default_factory=Counter)  # who has to refuse something when
    tallies: list[Tally] = field(default_factory=list)
    summed: set[int] = field(default_factory=set)
    aborted: str = ""
    believed: int = 0  # lies, of those told beside the stages, that somebody has taken for the truth
    kept: Any = None  # whatever an attack has to remember

    def __post_init__(self) -> None:
        self.gone: set[int] = set()
        self._vectors: dict[int, Words] = {}
        self._stage = PARAMETERS
        self._random = np.random.default_rng()
        self.plain: Words = np.zeros(self.parameters.length, dtype=word(self.parameters))

    def play(self) -> None:
        """Go through all stages. What the server raises ends the session."""
        self._join()
        try:
            for stage in stages(self.parameters):
                self._play(stage)
        except ProtocolError as error:
            self.aborted = str(error)
            self.refusals.append(Refusal(SERVER, self._stage, error))
        else:
            for one in sorted(self.server.suspects):
                self.refusals.append(Refusal(SERVER, self._stage, Tampering(f"client {one} opened wrong shares")))

    def stage_of(self, name: str) -> str:
        """The stage in which the roster or the survivors are shown; of any other name, itself."""
        names = stages(self.parameters)
        return {"roster": names[1], "survivors": names[names.index("mask") + 1]}.get(name, name)

    def expect(self, who: int, stage: str = "") -> None:
        """Somebody has to notice something: in the attack's stage, or else in the present one."""
        self.expected[who, stage or self.stage_of(self.attack.stage) or self._stage] += 1

    def hear(self, client: int, message: bytes, *, lie: bool = False) -> None:
        """The server gets a message, which it has to refuse if it is a lie."""
        if lie:
            self.expect(SERVER, self._stage)
        start = time.perf_counter()
        try:
            self.server.receive(client, message)
        except ProtocolError as error:
            self.refusals.append(Refusal(SERVER, self._stage, error))
            return
        self.tallies[-1].server_seconds += time.perf_counter() - start
        self.believed += lie
        self._count(client)

    def lie(self, client: Client, stage: str, message: bytes) -> None:
        """Ask a client for something beside what the stages ask for. It has to refuse."""
        self.expect(client.me, stage)
        self.believed += self._act(client, stage, message) is not None

    def _join(self) -> None:
        """Everybody is asked into a session."""
        public = {client: identity.public for client, identity in self.identities.items()}
        invited = self.parameters.clients
        try:
            proposed = self.attack.propose(self.parameters)
        except ProtocolError as error:  # not even parameters: nobody can read them
            proposed = self.parameters
            self.refusals += [Refusal(client, PARAMETERS, error) for client in invited]
            self.expected.update((client, PARAMETERS) for client in invited)
            invited = ()
        for client in invited:
            if proposed is not self.parameters:
                self.expect(client, PARAMETERS)
            try:
                self.clients[client] = Client(proposed, client, self.policy, identity=self.identities.get(client))
            except ProtocolError as error:
                self.refusals.append(Refusal(client, PARAMETERS, error))
        try:
            self.server = Server(proposed, identities=public)
        except ProtocolError:  # identities that the liar has made up are not in the registry: it takes the true ones
            self.server = Server(self.parameters, identities=public)
        self.parameters = self.server.parameters
        self.inbox = dict.fromkeys(self.clients, proposed.to_bytes())

    def _play(self, stage: str) -> None:
        self._stage = stage
        self.tallies.append(Tally(stage))
        self.gone.update(self.leaving.get(stage, ()))
        inbox = self.attack.tell(self, stage, dict(self.inbox))
        if stage == self.stage_of(self.attack.stage):
            for client, message in inbox.items():
                if message is not self.inbox.get(client) and client not in self.gone:
                    self.expect(client)
        _forget_shared_work()
        for done, (client, message) in enumerate(inbox.items(), 1):
            self._turn(client, stage, message)
            if self.progress is not None:
                self.progress(stage, done, len(inbox))
        self.attack.closing(self, stage)
        start = time.perf_counter()
        try:
            self.inbox = self.server.close()
        finally:
            self.tallies[-1].server_seconds += time.perf_counter() - start

    def _turn(self, client: int, stage: str, message: bytes) -> None:
        """One client hears what it is told, answers, and the answer is on its way."""
        self.tallies[-1].down.append(len(message))
        if client in self.gone:
            return
        answer = self._act(self.clients[client], stage, message)
        if answer is None:
            self.gone.add(client)
            return
        tally = self.tallies[-1]
        tally.answered += 1
        tally.up.append(len(answer))
        if client in (self.peer, self.victim, self.liar):
            self.told[stage, client], self.said[stage, client] = message, answer
        self.attack.send(self, stage, client, answer)

    def _act(self, client: Client, stage: str, message: bytes) -> bytes | None:
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

    def _count(self, client: int) -> None:
        """Keep the plain sum of what the server has taken, each client's vector once."""
        if self._stage == "mask" and client in self._vectors:
            self.plain += self._vectors.pop(client)
            self.summed.add(client)


def _forget_shared_work() -> None:
    """What all clients compute alike from one message is remembered within a process: let the first one do it again, so
    that the longest time of a stage is that of a client on its own."""
    for remembered in (roster.judged, roster._chosen, chosen.choices, keys.verify, opening.listed, opening.signers):
        remembered.cache_clear()
