"""A client refuses each request that an honest server of its run would not send, with and without secure aggregation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from protocols.errors import Tampering
from secure_fed.errors import RequestError
from secure_fed.learning.training.objective import Objective
from secure_fed.rounds.request_checks import Acceptable
from secure_fed.rounds.transport import Request
from tests.cells import every
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.lying import request_of, session, watch

LR = 0.05


def with_first(value: float) -> Callable[[Request], Request]:
    """Sets the first number of the first tensor of a request to `value`."""

    def changed(request: Request) -> Request:
        name = next(iter(request.tensors))
        tensor = request.tensors.tensor(name).clone()
        tensor.view(-1)[0] = value
        return replace(request, tensors=request.tensors | {name: tensor})

    return changed


LIES: dict[str, Callable[[Request], Request]] = {
    "a higher rate": lambda r: replace(r, lr=1000.0),
    "no rate": lambda r: replace(r, lr=math.nan),
    "no step": lambda r: replace(r, lr=0.0),
    "no clip norm": lambda r: replace(r, clip_norm=math.nan),
    "not a number": with_first(math.nan),
    "infinite": with_first(-math.inf),
    "large": with_first(-1001.0),
    "a tensor of no round": lambda r: replace(r, tensors=r.tensors | {"embedding": torch.zeros(2)}),
    "a tensor less": lambda r: replace(r, tensors=r.tensors.without(list(r.tensors)[:1])),
    "another start": with_first(0.3),
}


@pytest.mark.parametrize("method", ["fedlora", "fedara"])
def test_a_client_in_the_open_refuses_every_lie_and_trains_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content that passed once is not checked again; all other content is. FedARA's later states have fewer entries, and its
    first one is the initial state all the same.
    """
    federation = toys.federation({"method.name": method, "federation.rounds": 8})
    client, request = federation.assembly.clients[0], request_of(federation, lr=LR)
    monkeypatch.setattr(Objective, "losses", lambda *_: pytest.fail("it trains"))
    assert client.job(request) is not None
    for lie in LIES.values():
        assert client.job(lie(request)) is None
        with refused(RequestError):
            client.handle(lie(request))
    assert client.job(request) is not None


@pytest.mark.parametrize("what", ["a higher rate", "another start"])
def test_all_clients_behind_masks_refuse_alike_before_anybody_trains(what: str) -> None:
    built = wide_toys.federation({**wide_toys.MASKED})
    seen = watch(built)
    heard = session(built, LIES[what](request_of(built)))
    assert heard.alike
    assert {error for _, error, _ in heard.refused.values()} == {Tampering}
    assert len(heard.refused) == len(wide_toys.SIZES)
    assert not seen.trained


def test_a_later_round_may_start_from_any_bounded_state() -> None:
    """No client can compute the state of a later round: `docs/lying_servers.md` says how a server can exploit that."""
    request = with_first(0.3)(request_of(federation := toys.federation(), round_=1, lr=LR))
    assert federation.assembly.clients[0].handle(request).contribution.is_finite()
    bounded = toys.federation({"federation.largest_value": 0.25})
    with refused(RequestError):
        bounded.assembly.clients[0].handle(request)


@every("schedule", ["linear", "cosine"])
def test_the_rate_follows_the_schedule(schedule: str) -> None:
    settings = {"training.lr_schedule": schedule, "training.lr_warmup": 1, "federation.rounds": 4}
    federation = toys.federation(settings)
    federation.run()  # an honest server is not refused
    with refused(RequestError):
        federation.assembly.clients[0].handle(request_of(federation, round_=3, lr=LR))


@every(
    "settings, above",
    [
        ({"privacy.unit": "client"}, True),
        ({"privacy.unit": "example"}, True),
        ({"privacy.unit": "client", "privacy.clip_quantile": 0.5}, False),  # it adapts
        ({}, False),
    ],
)
def test_no_server_raises_the_clip_norm(settings: dict[str, Any], above: bool) -> None:
    noise = {"privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3}
    clip = {} if "privacy.clip_quantile" in settings else {"privacy.clip_norm": 0.5}
    federation = toys.federation({**settings, **noise, **clip} if settings else {})
    made = federation.assembly
    acceptable = Acceptable.of(federation.config, made.method, made.initial.tensors, ())
    request = request_of(federation, lr=LR)
    assert not acceptable.fault(replace(request, clip_norm=0.5))
    assert ("above the run's 0.5" in acceptable.fault(replace(request, clip_norm=0.6))) == above
