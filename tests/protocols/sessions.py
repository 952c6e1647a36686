"""Whole sessions for tests: a cast of clients with their parameters, and a play that goes through every stage."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols.client import Client, Keys
from protocols.errors import ProtocolError
from protocols.keys import AgreementKey, Identity, Secret, registry_digest
from protocols.parameters import Parameters, Policy, stages
from protocols.server import Server

METHODS = {"advertise": "advertise", "share": "share", "mask": "mask", "consistency": "confirm", "unmask": "unmask"}


@dataclass(frozen=True)
class Cast:
    """Clients and consistent parameters of a session. `corrupt` and `window` are the assumptions of every client's policy."""

    count: int = 5
    neighbours: int | None = None
    threshold: int | None = None
    survivors: int = 2
    active: bool = False
    bits: int = 32
    length: int = 4
    bound: int = 0
    corrupt: int = 0
    window: int = 0
    partners: int = 1
    run: str = "test"
    identities: Mapping[int, Identity] = field(default_factory=dict)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        return tuple(range(3, 3 + 2 * self.count, 2))  # ids neither start at zero nor are consecutive

    @cached_property
    def public(self) -> dict[int, bytes]:
        return {client: identity.public for client, identity in self.identities.items()}

    @property
    def chosen(self) -> bool:
        return self.active and (self.neighbours or self.count) < self.count - 1

    @property
    def least(self) -> int:
        """The least number of survivors: more than half of all clients where clients choose their neighbours."""
        return max(self.survivors, self.count // 2 + 1) if self.chosen else self.survivors

    @cached_property
    def parameters(self) -> Parameters:
        neighbours = self.neighbours or self.count - 1
        return Parameters(
            run=self.run,
            round=7,
            layout=bytes(range(32)),
            length=self.length,
            bits=self.bits,
            clients=self.ids,
            neighbours=neighbours,
            threshold=self.threshold or 2 * min(neighbours, self.count - 1) // 3 + 1,
            survivors=self.least,
            active=self.active,
            bound=self.bound,
            partners=self.partners if self.chosen else 0,
            registry=registry_digest(self.public, self.ids) if self.active else bytes(32),
        )

    @cached_property
    def policy(self) -> Policy:
        return Policy(
            threshold=self.parameters.threshold,
            survivors=self.least,
            corrupt=self.corrupt,
            window=self.window,
            partners=self.parameters.partners,
            active=self.active,
            identities=self.public,
            neighbours=self.parameters.neighbours,
        )

    def client(self, me: int, **options: Any) -> Client:
        return Client(self.parameters, me, self.policy, identity=self.identities.get(me), **options)

    def clients(self) -> dict[int, Client]:
        return {me: self.client(me) for me in self.ids}

    def server(self) -> Server:
        return Server(self.parameters, identities=self.public)

    def vectors(self, seed: int = 0) -> dict[int, NDArray[Any]]:
        rng = np.random.default_rng(seed)
        largest = self.bound or 1000
        return {
            me: rng.integers(-largest, largest + 1, self.length).astype(f"i{self.bits // 8}").view(f"u{self.bits // 8}")
            for me in self.ids
        }


def cast(**options: Any) -> Cast:
    """A cast, with identities if it is active."""
    made = Cast(**options)
    return replace(made, identities={me: Identity.new() for me in made.ids}) if made.active else made


def secret(rng: random.Random) -> Secret:
    return Secret(rng.randbytes(32))


def drawn(rng: random.Random) -> Keys:
    """A client's secrets, drawn from `rng` instead of the operating system."""

    def agreement() -> AgreementKey:
        scalar = bytearray(rng.randbytes(32))
        scalar[0] &= 248
        scalar[31] = scalar[31] & 127 | 64
        return AgreementKey.from_secret(Secret(bytes(scalar)))

    return Keys(agreement(), agreement(), secret(rng), secret(rng))


Message = Callable[[str, int, bytes], bytes]


def unaltered(stage: str, client: int, message: bytes) -> bytes:
    return message


@dataclass
class Play:
    """A session so far: the server, the clients, their errors, and every message by (stage, client).

    `told` are the messages that clients receive, `said` the messages that they send.
    """

    cast: Cast
    server: Server
    clients: dict[int, Client]
    vectors: Mapping[int, NDArray[Any]]
    told: dict[tuple[str, int], bytes] = field(default_factory=dict)
    said: dict[tuple[str, int], bytes] = field(default_factory=dict)
    errors: dict[int, ProtocolError] = field(default_factory=dict)

    def act(self, stage: str, client: int, message: bytes) -> bytes:
        """The client's answer to the message."""
        arguments = () if stage == "advertise" else (message,)
        last = (self.vectors[client],) if stage == "mask" else ()
        answer: bytes = getattr(self.clients[client], METHODS[stage])(*arguments, *last)
        return bytes(answer)

    def expected(self) -> NDArray[Any]:
        """The plain sum of the survivors' vectors, in Python's integers."""
        modulus = 2**self.cast.bits
        columns = zip(*(self.vectors[me].tolist() for me in self.server.survivors), strict=True)
        return np.array([sum(column) % modulus for column in columns], dtype=f"u{self.cast.bits // 8}")


def play(
    cast: Cast,
    *,
    silent: Mapping[str, Collection[int]] | None = None,
    tell: Message = unaltered,
    say: Message = unaltered,
    until: str = "",
    seed: int = 0,
    clients: dict[int, Client] | None = None,
    server: Server | None = None,
    after: Play | None = None,
) -> Play:
    """Play all stages, or stop before the clients act in stage `until`.

    Clients in `silent[stage]` send nothing from that stage on. `tell` may replace messages to clients, and `say` messages from
    clients. A client that raises an error sends nothing more; the server's errors are raised. `after` is a stopped play to
    continue.
    """
    scene = after or Play(cast, server or cast.server(), clients or cast.clients(), cast.vectors(seed))
    now = scene.server.stage
    inbox = {me: scene.told[now, me] for me in scene.clients if (now, me) in scene.told} if after else {}
    inbox = inbox or dict.fromkeys(scene.clients, b"")
    gone: set[int] = set()
    names = stages(cast.parameters)
    for stage in names[names.index(now) :]:
        gone.update((silent or {}).get(stage, ()))
        for client, message in inbox.items():
            scene.told[stage, client] = tell(stage, client, message)
        if stage == until:
            return scene
        for client in inbox:
            if client in gone:
                continue
            try:
                answer = scene.act(stage, client, scene.told[stage, client])
            except ProtocolError as error:
                scene.errors[client] = error
                gone.add(client)
                continue
            scene.said[stage, client] = say(stage, client, answer)
            scene.server.receive(client, scene.said[stage, client])
        inbox = scene.server.close()
    return scene
