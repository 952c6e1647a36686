"""How a request reaches clients and replies come back.

A transport has one method. The in-process one calls client objects; `Recording` wraps any and keeps what passed by, `Vanishing`
wraps any and loses clients. In the clear a pass is one exchange, of a `Request` for a `Reply`; behind masks it is one for each
stage of the protocol, of a `Stage` for a `Staged`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from protocols.parameters import Parameters
from secure_fed.methods.method import RoundPlan
from secure_fed.tensors.tensors import Tensors


@dataclass(frozen=True)
class Request:
    """The server's side of one linear pass, the same for every client of the cohort.

    tensors: what travels down (`plan.down`; empty in a later pass, the client still has it). layout: digest of the layout
    the contribution must have. means: means of this round's earlier passes. clip_norm: the longest a contribution, or a
    gradient, may be. first: digest of the round's first request, which every later one carries; empty in the first.
    """

    round: int
    pass_name: str
    plan: RoundPlan
    lr: float
    layout: str
    tensors: Tensors
    means: Mapping[str, Tensors] = field(default_factory=dict)
    clip_norm: float = math.inf
    first: str = ""

    @property
    def bytes_down(self) -> int:
        return sum(t.wire_size for t in (self.tensors, *self.means.values()) if t)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that is asked: equal exactly where two clients are asked for the same, starting from the same."""
        plan = [list(names) for names in (self.plan.trainable, self.plan.down, self.plan.passes)]
        numbers = [float(self.lr).hex(), float(self.clip_norm).hex()]
        said = [self.round, self.pass_name, self.layout, *numbers, *plan, self.first]
        digest = hashlib.sha256(json.dumps(said).encode())
        for whose, tensors in (("", self.tensors), *sorted(self.means.items())):
            for name, part in tensors.parts().items():
                digest.update(json.dumps([whose, name, str(part.dtype), list(part.shape)]).encode())
                digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Reply:
    """A client's side: its contribution, how much it counts, and its mean local training loss (NaN where that is private)."""

    client: int
    contribution: Tensors
    weight: float
    loss: float


@dataclass(frozen=True)
class ContributorList:
    """Which clients of a masked sum contribute, and to what. All clients of the sum get the same.

    request: digest of the contributors' request. contributors: their numbers, ascending; the other clients send zeros.
    """

    request: str
    contributors: tuple[int, ...]

    @property
    def layout(self) -> bytes:
        """(32,) what the session's parameters hold for this sum."""
        return hashlib.sha256(json.dumps([self.request, *self.contributors]).encode()).digest()

    @property
    def bytes_down(self) -> int:
        return round(self.bytes_of(len(self.contributors)))

    @staticmethod
    def bytes_of(contributors: float) -> float:
        """What a list of so many takes."""
        return 32 + 4 * contributors


@dataclass(frozen=True)
class Stage:
    """The server's side of one stage of a masked sum.

    message: the protocol's, for this client. request: in the stage that takes vectors, the pass that this client contributes
    to; a client that gets none there contributes zeros. listed: in that stage, who contributes, where clients have to know.
    """

    round: int
    name: str
    parameters: Parameters
    message: bytes
    request: Request | None = None
    listed: ContributorList | None = None

    @property
    def bytes_down(self) -> int:
        sent = len(self.message) or len(self.parameters.to_bytes())  # the first stage brings nothing but the parameters
        return sent + sum(part.bytes_down for part in (self.request, self.listed) if part)


@dataclass(frozen=True)
class Staged:
    """A client's side: the protocol's message."""

    client: int
    message: bytes | bytearray


Ask = Request | Stage
Answer = Reply | Staged


class Transport(Protocol):
    """Carries requests to clients, and their replies back."""

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        """The replies of those clients that answer, in any order: a `Reply` to a `Request`, a `Staged` to a `Stage`."""


class Participant(Protocol):
    """What an in-process transport talks to; it answers None if it leaves the round."""

    def handle(self, request: Any) -> Any: ...


@dataclass(frozen=True)
class InProcess:
    """Clients are objects of this process, asked one after the other, lazily: one contribution exists at a time."""

    clients: Sequence[Participant]

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        for client, request in requests.items():
            if (answer := self.clients[client].handle(request)) is not None:
                yield answer


@dataclass
class Recording:
    """Keeps every request and reply that passes through another transport, in order.

    What it holds is what a server without secure aggregation sees, contributions of single clients included; with it, what
    passes by is masked.
    """

    inner: Transport
    exchanges: list[tuple[Any, Any]] = field(default_factory=list)

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        for reply in self.inner.exchange(requests):
            self.exchanges.append((requests[reply.client], reply))
            yield reply


@dataclass
class Vanishing:
    """Loses a share, rounded down, of the n clients that a round begins with, each in one of its first `stages` exchanges.

    Who goes, and when, is drawn from the seed and the round: it depends on nobody's data. With `everybody`, how many clients
    there are, the share is of all of them, asked or not: who goes then does not depend on who is asked either, so that one
    client more or less in a secret cohort moves a sum by what that client contributes, and not by those who vanish instead.
    """

    inner: Transport
    share: float
    stages: int
    seed: int
    everybody: int | None = None
    _round: int = -1
    _exchange: int = 0
    _leaves: dict[int, int] = field(default_factory=dict)

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        round_ = next((request.round for request in requests.values()), self._round)
        if round_ != self._round:
            lots = sorted(requests) if self.everybody is None else range(self.everybody)
            self._round, self._exchange, self._leaves = round_, 0, self._drawn(round_, lots)
        here = {client: ask for client, ask in requests.items() if self._leaves.get(client, math.inf) > self._exchange}
        self._exchange += 1
        return self.inner.exchange(here)

    def _drawn(self, round_: int, clients: Sequence[int]) -> dict[int, int]:
        rng = np.random.default_rng([self.seed, round_, _VANISHING_STREAM])
        gone = rng.permutation(clients)[: math.floor(Fraction(str(self.share)) * len(clients))].tolist()
        return {client: int(rng.integers(self.stages)) for client in gone}


_VANISHING_STREAM = 2**32 - 2  # no client has this index, so no client's randomness is this one
