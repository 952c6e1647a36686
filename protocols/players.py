"""Where the clients of a simulation run: in this process, or in separate processes (`workers`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from protocols.agreements import Agreements
from protocols.client import Client
from protocols.codec import Words
from protocols.keys import Identity
from protocols.parameters import Parameters
from protocols.policy import Policy
from protocols.record import InMemory, Sessions

Message = bytes | bytearray


@dataclass(frozen=True)
class Waiting:
    """A message that another process is making. send: passes the request to that process."""

    future: Future[tuple[Message, float]]
    send: Callable[[], None]

    def result(self) -> tuple[Message, float]:
        """The message, and the seconds that it took."""
        self.send()
        return self.future.result()


class Played(Protocol):
    """The interface of `client.Client`, whose messages may be made in another process."""

    @property
    def parameters(self) -> Parameters: ...

    def advertise(self) -> Message | Waiting: ...

    def share(self, message: bytes) -> Message | Waiting: ...

    def mask(self, message: bytes, vector: Words) -> Message | Waiting: ...

    def confirm(self, message: bytes) -> Message | Waiting: ...

    def unmask(self, message: bytes) -> Message | Waiting: ...


class Players(Protocol):
    """Makes clients. Each client has one record of opened sessions, for all its sessions."""

    def client(self, parameters: Parameters, me: int, policy: Policy, identity: Identity | None) -> Played:
        """A `client.Client` of a session, constructed by its first step at the latest."""


@dataclass(frozen=True)
class OneClient:
    """The only client of this machine. sessions: its record of opened sessions, on disk if it may restart."""

    sessions: Sessions

    def client(self, parameters: Parameters, me: int, policy: Policy, identity: Identity | None) -> Client:
        return Client(parameters, me, policy, identity=identity, sessions=self.sessions)


@dataclass
class Here:
    """Clients that this process plays. agreements: how they obtain their shared keys; None: each by itself."""

    agreements: Agreements | None = None
    _records: dict[int, InMemory] = field(default_factory=dict)

    def client(self, parameters: Parameters, me: int, policy: Policy, identity: Identity | None) -> Client:
        record = self._records.setdefault(me, InMemory())
        return Client(parameters, me, policy, identity=identity, sessions=record, agreements=self.agreements)
