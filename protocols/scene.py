"""One session played in one process with all its clients: its messages, costs and refusals, and at most one attack.

A test rig, and no part of the protocol. It reads and changes the private state of clients and servers, which no party of a
session can do: to lie like an attacker who knows everything, and to compare the sum with vectors that only the rig has seen. No
part of the protocol imports it, `lies` or `simulate`.

`Scene` is the state of the session, and `play` takes it from stage to stage. The clients and the server are the protocol's own,
so a lie is noticed by the protocol's checks, or not at all. `lies` has the attacks, and `simulate` makes scenes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protocols import roster
from protocols.client import Client, listed, signers
from protocols.errors import ProtocolError, Tampering
from protocols.keys import Identity, verify
from protocols.masking import Words
from protocols.parameters import Parameters, Policy, stages
from protocols.server import Server
from protocols.wire import word

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


@dataclass(frozen=True)
class Attack:
    """A lie, the party that should notice it, the stage, and the error.

    Every client that receives something false in `stage` must refuse it, and the server must refuse every false message that it
    receives (`Scene.deliver` with lie=True). `stage` is a stage of the session, or "parameters" for the invitation, or "roster"
    or "survivors" for the stage in which these are shown, or "" for every stage.
    """

    kind: str
    does: str
    catcher: str  # "server" or "clients"
    stage: str
    error: type[ProtocolError]
    active: bool = False  # only an active session can notice it
    ring: bool = False  # needs a graph that is not complete
    exact: bool = False  # the others must still get their sum
    propose: Callable[[Parameters], Parameters] | None = None  # the session that clients are invited to
    tell: Callable[[Scene, str, Inbox], Inbox] | None = None  # the server's messages, in place of the true ones
    send: Callable[[Scene, str, int, bytes], None] | None = None  # delivers a client's answer, another, or nothing
    closing: Callable[[Scene, str], None] | None = None  # before the server ends a stage
    outcome: Callable[[Scene], str] | None = None  # where no party must refuse: the correct outcome, "" if it failed


HONEST = Attack("", "nobody lies", "", "", ProtocolError)


def play(scene: Scene, attack: Attack = HONEST) -> None:
    """Play all stages. A `ProtocolError` of the server ends the session and is kept as `scene.aborted`."""
    scene.lies_in = attack.stage
    _join(scene, attack)
    try:
        for stage in stages(scene.parameters):
            _stage(scene, attack, stage)
    except ProtocolError as error:
        scene.aborted = str(error)
        scene.refusals.append(Refusal(SERVER, scene.stage, error))
    else:
        for one in sorted(scene.server.suspects):
            scene.refusals.append(Refusal(SERVER, scene.stage, Tampering(f"client {one} opened wrong shares")))


def _join(scene: Scene, attack: Attack) -> None:
    """Invite every client to the session, with the parameters that the attack proposes."""
    public = {client: identity.public for client, identity in scene.identities.items()}
    invited = scene.parameters.clients
    try:
        proposed = attack.propose(scene.parameters) if attack.propose else scene.parameters
    except ProtocolError as error:  # unusable parameters: nobody can read them
        proposed = scene.parameters
        scene.refusals += [Refusal(client, PARAMETERS, error) for client in invited]
        scene.expected.update((client, PARAMETERS) for client in invited)
        invited = ()
    for client in invited:
        if proposed is not scene.parameters:
            scene.expect(client, PARAMETERS)
        try:
            scene.clients[client] = Client(proposed, client, scene.policy, identity=scene.identities.get(client))
        except ProtocolError as error:
            scene.refusals.append(Refusal(client, PARAMETERS, error))
    try:
        scene.server = Server(proposed, identities=public)
    except ProtocolError:  # identities that the liar invented are not in the registry: use the true parameters
        scene.server = Server(scene.parameters, identities=public)
    scene.parameters = scene.server.parameters
    scene.inbox = dict.fromkeys(scene.clients, proposed.to_bytes())


def _stage(scene: Scene, attack: Attack, stage: str) -> None:
    scene.stage = stage
    scene.tallies.append(Tally(stage))
    scene.gone.update(scene.leaving.get(stage, ()))
    inbox = attack.tell(scene, stage, dict(scene.inbox)) if attack.tell else scene.inbox
    if stage == scene.stage_of(attack.stage):
        for client, message in inbox.items():
            if message is not scene.inbox.get(client) and client not in scene.gone:
                scene.expect(client)
    # Empty the caches of work that all clients repeat on one message, so that the first client of each stage does it anew. The
    # longest time in a stage is then the time of a client on its own machine.
    of_rosters = (roster.judged, roster._dealers_graph, roster._ring, roster.chosen_by)
    for remembered in (*of_rosters, verify, listed, signers):
        remembered.cache_clear()
    for done, (client, message) in enumerate(inbox.items(), 1):
        _turn(scene, attack, client, message)
        if scene.progress is not None:
            scene.progress(stage, done, len(inbox))
    if attack.closing:
        attack.closing(scene, stage)
    start = time.perf_counter()
    try:
        scene.inbox = scene.server.close()
    finally:
        scene.tallies[-1].server_seconds += time.perf_counter() - start


def _turn(scene: Scene, attack: Attack, client: int, message: bytes) -> None:
    """One client reads its message and answers, and the attack passes the answer on to the server."""
    stage, tally = scene.stage, scene.tallies[-1]
    tally.down.append(len(message))
    if client in scene.gone:
        return
    answer = scene.act(scene.clients[client], stage, message)
    if answer is None:
        scene.gone.add(client)
        return
    tally.answered += 1
    tally.up.append(len(answer))
    if client in (scene.peer, scene.victim, scene.liar):
        scene.messages[stage, client], scene.answers[stage, client] = message, answer
    if attack.send:
        attack.send(scene, stage, client, answer)
    else:
        scene.deliver(client, answer)
