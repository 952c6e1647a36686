"""Requests, replies, and the transports that carry them.

A transport has one method. `InProcess` calls client objects; the others wrap a transport: `Vanishing` loses clients,
`Recording` keeps all messages, `Told` reports the progress. Flower's is `secure_fed.flower.carrier`. Without masks a pass
is one exchange, of a `Request` for a `Reply`; with masks it is one exchange for each stage of the protocol, of a `Stage` for a
`Staged`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch

from protocols.parameters import Parameters
from secure_fed.methods.method import RoundPlan
from secure_fed.tensors.tensors import Tensors

TRAINING, TESTING = "training", "testing"
PROBING = "measuring what the noise alone does"
_STAGES = {
    "advertise": "exchanging keys",
    "share": "sharing secrets",
    "mask": TRAINING,
    "consistency": "comparing lists",
    "unmask": "taking masks off",
}
_AFTER = (_STAGES["consistency"], _STAGES["unmask"])
_VANISHING_STREAM = 2**32 - 2  # no client has this index, so no client has this randomness


@dataclass(frozen=True)
class Request:
    """The server's message in one linear pass, the same for every client of the cohort.

    tensors: the tensors sent to the client (`plan.down`; empty in a later pass, where the client still has them). layout:
    digest of the layout that the contribution must have. means: of this round's earlier passes. clip_norm: the largest norm of
    a contribution, or of a gradient. first: digest of the round's first request, which every later one carries; empty in the
    first.
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
        """SHA-256 of the whole request: two clients have equal digests only if they received the same request."""
        plan = [list(names) for names in (self.plan.trainable, self.plan.down, self.plan.passes)]
        numbers = [float(self.lr).hex(), float(self.clip_norm).hex()]
        fields = [self.round, self.pass_name, self.layout, *numbers, *plan, self.first]
        digest = hashlib.sha256(json.dumps(fields).encode())
        for whose, tensors in (("", self.tensors), *sorted(self.means.items())):
            for name, part in tensors.parts().items():
                digest.update(json.dumps([whose, name, str(part.dtype), list(part.shape)]).encode())
                if part.numel():  # an empty array of numpy has strides that no view allows
                    digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Reply:
    """A client's message: its contribution, its weight, and its mean local training loss (NaN if that is private)."""

    client: int
    contribution: Tensors
    weight: float
    loss: float


@dataclass(frozen=True)
class ContributorList:
    """The clients that contribute to a masked sum, and the request they answer. All clients of the sum get the same list.

    request: digest of the contributors' request. contributors: their numbers, ascending; the other clients send zeros.
    """

    request: str
    contributors: tuple[int, ...]

    @property
    def layout(self) -> bytes:
        """(32,) the digest that the session's parameters hold for this sum."""
        return hashlib.sha256(json.dumps([self.request, *self.contributors]).encode()).digest()

    @property
    def bytes_down(self) -> int:
        return round(self.bytes_of(len(self.contributors)))

    @staticmethod
    def bytes_of(contributors: float) -> float:
        """The bytes of a list of `contributors` contributors."""
        return 32 + 4 * contributors


@dataclass(frozen=True)
class Stage:
    """The server's message in one stage of a masked sum.

    message: of the protocol, for this client. request: in the stage that takes vectors, the pass to contribute to; a client
    without one contributes zeros. listed: in that stage, the contributors, if clients have to check them.
    """

    round: int
    name: str
    parameters: Parameters
    message: bytes
    request: Request | None = None
    listed: ContributorList | None = None

    @property
    def bytes_down(self) -> int:
        sent = len(self.message) or len(self.parameters.to_bytes())  # the first stage contains only the parameters
        return sent + sum(part.bytes_down for part in (self.request, self.listed) if part)


@dataclass(frozen=True)
class Staged:
    """A client's message in one stage of a masked sum."""

    client: int
    message: bytes | bytearray


class Transport(Protocol):
    """Carries requests to clients, and their replies back."""

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        """The replies of the clients that answer, in any order: a `Reply` to a `Request`, a `Staged` to a `Stage`."""


class Participant(Protocol):
    """An object that answers requests. None means that it leaves the round."""

    def handle(self, request: Any) -> Any: ...


@dataclass(frozen=True)
class InProcess:
    """Calls client objects of this process one after the other, lazily: one contribution exists at a time.

    prepare: called with some participants and their requests, before the first of them answers; it may do their common work.
    at_once: the number of participants in one call.
    """

    clients: Sequence[Participant]
    prepare: Callable[[Sequence[tuple[Any, Any]]], None] = lambda some: None
    at_once: int = 1

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        everybody = iter(requests.items())
        while some := [(self.clients[client], request) for client, request in islice(everybody, self.at_once)]:
            self.prepare(some)
            for participant, request in some:
                if (answer := participant.handle(request)) is not None:
                    yield answer


@dataclass
class Vanishing:
    """Loses a share, rounded down, of the n clients that a round begins with, each in one of its first `stages` exchanges.

    The lost clients, and their exchanges, are drawn from the seed and the round: they depend on nobody's data. With
    `everybody`, the number of all clients, the share is of all clients: the lost clients then do not depend on the cohort
    either, so that one client more or less in a secret cohort changes a sum only by that client's contribution.
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


@dataclass
class Recording:
    """Keeps every request and reply that passes through another transport, in order; or passes them to `note`.

    Without secure aggregation this is all that the server sees, including contributions of single clients. With it,
    contributions are masked.
    """

    inner: Transport
    exchanges: list[tuple[Any, Any]] = field(default_factory=list)
    note: Callable[[Any, Any], None] | None = None

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        note = self.note or (lambda *exchange: self.exchanges.append(exchange))
        for reply in self.inner.exchange(requests):
            note(requests[reply.client], reply)
            yield reply


@dataclass(frozen=True)
class Progress:
    """The progress of a run within a round, for displays: the stage, the number of finished clients, the bytes so far.

    round: from 0. done: the number of finished clients out of `total`, possibly fractional; total 0: not reported. sent:
    bytes of the round so far, in both directions.
    """

    round: int
    stage: str
    done: float = 0.0
    total: int = 0
    sent: int = 0

    def __str__(self) -> str:
        """The stage, and the number of finished clients, if it is reported."""
        return self.stage + (f" {int(self.done)}/{self.total}" if self.total else "")

    @property
    def share(self) -> float:
        """The finished share of the round. Training takes nearly all of it."""
        if self.stage == TRAINING:
            return self.done / self.total if self.total else 0.0
        return float(self.stage in (TESTING, *_AFTER))


@dataclass
class Told:
    """A transport that reports its exchanges. Observation changes nothing: requests and answers pass on unchanged.

    counted: whether it reports numbers, false where the guarantee requires that nobody learns the cohort size.
    """

    inner: Transport
    tell: Callable[[Progress], None]
    counted: bool = True
    _now: Progress = Progress(-1, "")
    _answered: int = 0

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        asked = next(iter(requests.values()), None)
        if asked is not None:
            alike = isinstance(asked, Request)
            sent = asked.bytes_down * len(requests) if alike else sum(one.bytes_down for one in requests.values())
            self._begin(asked, len(requests), sent)
        for reply in self.inner.exchange(requests):
            self._answered += 1
            sent = reply.contribution.wire_size if isinstance(reply, Reply) else len(reply.message)
            self._say(max(self._now.done, self._answered), sent)
            yield reply

    def ahead(self, trained: float) -> None:
        """`trained` clients beyond the clients that have answered are trained, in common passes."""
        if self._now.stage == TRAINING:
            self._say(self._answered + trained)

    def testing(self, round_: int) -> None:
        """The round's sums are complete, and its state is being evaluated."""
        sent = self._now.sent if self.counted and self._now.round == round_ else 0
        self.tell(Progress(round_, TESTING, sent=sent))

    def _begin(self, asked: Any, total: int, sent: int) -> None:
        before = self._now.sent if asked.round == self._now.round else 0
        name = _STAGES.get(asked.name, asked.name) if isinstance(asked, Stage) else TRAINING
        self._answered = 0
        self._now = Progress(asked.round, name, 0.0, total, before)
        self._say(0.0, sent)

    def _say(self, done: float, sent: int = 0) -> None:
        now = self._now
        self._now = Progress(now.round, now.stage, done, now.total, now.sent + sent)
        self.tell(self._now if self.counted else Progress(now.round, now.stage))
