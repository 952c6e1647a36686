"""How a request reaches clients and replies come back.

A transport has one method. The in-process one calls client objects; `Recording` wraps any and keeps what passed by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from secure_fed.methods.method import RoundPlan
from secure_fed.tensors import Tensors


@dataclass(frozen=True)
class Request:
    """The server's side of one linear pass, the same for every client of the cohort.

    tensors: what travels down (`plan.down`; empty in a later pass, the client still has it). layout: digest of the layout
    the contribution must have. means: means of this round's earlier passes. clip_norm: the longest a contribution, or a
    gradient, may be.
    """

    round: int
    pass_name: str
    plan: RoundPlan
    lr: float
    layout: str
    tensors: Tensors
    means: Mapping[str, Tensors] = field(default_factory=dict)
    clip_norm: float = math.inf

    @property
    def bytes_down(self) -> int:
        return sum(t.wire_size for t in (self.tensors, *self.means.values()) if t)


@dataclass(frozen=True)
class Reply:
    """A client's side: its contribution, how much it counts, and its mean local training loss (NaN where that is private)."""

    client: int
    contribution: Tensors
    weight: float
    loss: float


class Transport(Protocol):
    """Carries requests to clients, and their replies back."""

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[Reply]:
        """The replies of those clients that answer, in any order."""


class Participant(Protocol):
    """What an in-process transport talks to."""

    def handle(self, request: Request) -> Reply: ...


@dataclass(frozen=True)
class InProcess:
    """Clients are objects of this process, asked one after the other, lazily: one contribution exists at a time."""

    clients: Sequence[Participant]

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[Reply]:
        for client, request in requests.items():
            yield self.clients[client].handle(request)


@dataclass
class Recording:
    """Keeps every request and reply that passes through another transport, in order.

    What it holds is what a server without secure aggregation sees, contributions of single clients included.
    """

    inner: Transport
    exchanges: list[tuple[Request, Reply]] = field(default_factory=list)

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[Reply]:
        for reply in self.inner.exchange(requests):
            self.exchanges.append((requests[reply.client], reply))
            yield reply
