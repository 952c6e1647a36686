"""Small federations whose clients take part in turn, and helpers that extract the noise of a whole run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secure_fed.federation import Federation
from secure_fed.rounds.transport import Reply, Request
from secure_fed.tensors.tensors import Layout, Tensors
from tests.secure_fed import private_toys
from tests.secure_fed.private_toys import NOISE, Watched

Matrix = NDArray[np.float64]
CLIP = NOISE["privacy.clip_norm"]
SIZES = (5, 8, 11, 4, 6, 7)
IN_TURN: dict[str, Any] = {**NOISE, "federation.sampling": "schedule", "federation.cohort": 2, "federation.rounds": 6}
BANDED: dict[str, Any] = {  # six clients, two a round: each takes part every 3 rounds
    **IN_TURN,
    "privacy.correlation": "banded",
    "privacy.band": 3,
    "method.rank": 6,  # for more parameters
}


def federation(settings: Mapping[str, Any], seed: int | None = None, **own: Any) -> Federation:
    return private_toys.federation(settings, seed, **{"sizes": SIZES, **own})


class Killed(BaseException):
    """Stands in for SIGKILL in tests that need no separate process."""


@dataclass
class Zeros:
    """A transport whose clients contribute zeros, so that releases are pure noise. dies_in: the round in which it is killed."""

    inner: Any
    dies_in: int | None = None
    asked: list[tuple[int, list[int]]] = field(default_factory=list)

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[Reply]:
        round_ = next((request.round for request in requests.values()), -1)
        self.asked.append((round_, sorted(requests)))
        for reply in self.inner.exchange(requests):
            if round_ == self.dies_in:
                raise Killed
            yield replace(reply, contribution=reply.contribution * 0.0)


def of_zeros(built: Federation, dies_in: int | None = None) -> tuple[Zeros, Watched]:
    """Makes the clients of the federation contribute zeros. Returns their transport, and the method that records its means."""
    assembly = built.assembly
    zeros, watched = Zeros(assembly.transport, dies_in), Watched(assembly.server.method)
    built.assembly = replace(assembly, transport=zeros, server=replace(assembly.server, method=watched))
    built.callbacks.append(watched)
    return zeros, watched


def sums(built: Federation, watched: Watched) -> Matrix:
    """(rounds, numbers) the server's releases before division by the cohort; without lost rounds, which have no noise.

    With server momentum, the steps of the server's optimizer in their place.
    """
    rows = [flat(means["change"]) for means, std in watched.seen if std]
    return np.array(rows) * built.assembly.sampler.expected


def flat(tensors: Tensors) -> NDArray[np.float64]:
    layout = Layout.of(tensors)
    return layout.flatten(tensors).double().numpy()
