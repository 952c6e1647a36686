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
from secure_fed.rounds.request_checks import Acceptable
from secure_fed.rounds.transport import Request
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


LIES: dict[str, tuple[Callable[[Request], Request], str]] = {
    "a higher rate": (lambda r: replace(r, lr=1000.0), "the learning rate is 1000, and training.lr and its schedule say 0.05"),
    "no rate": (lambda r: replace(r, lr=math.nan), "the learning rate is nan"),
    "no step": (lambda r: replace(r, lr=0.0), "the learning rate is 0"),
    "no clip norm": (lambda r: replace(r, clip_norm=math.nan), "the clip norm is nan"),
    "not a number": (with_first(math.nan), "values that are not finite"),
    "infinite": (with_first(-math.inf), "values that are not finite"),
    "large": (with_first(-1001.0), r"has a value of 1001, above federation.largest_value = 1000"),
    "a tensor of no round": (
        lambda r: replace(r, tensors=r.tensors | {"embedding": torch.zeros(2)}),
        "tensor 'embedding' is not one that this round sends",
    ),
    "a tensor less": (lambda r: replace(r, tensors=r.tensors.without(list(r.tensors)[:1])), "is missing"),
    "another start": (with_first(0.3), "differs from the initial tensor"),
}  # fmt: skip


@pytest.mark.parametrize("what", LIES)
def test_a_client_in_the_open_refuses_in_one_sentence_and_trains_nothing(what: str) -> None:
    federation, (lie, sentence) = toys.federation({"method.name": "fedlora"}), LIES[what]
    client, request = federation.assembly.clients[0], request_of(federation, lr=LR)
    trained: list[Request] = []
    client._train = trained.append  # type: ignore[method-assign, assignment]
    assert client.job(lie(request)) is None
    with pytest.raises(RequestError, match=sentence) as refused:
        client.handle(lie(request))
    assert str(refused.value).startswith("client client-0 refuses round 1: ")
    assert not trained


@pytest.mark.parametrize("what", LIES)
def test_a_method_whose_tensors_shrink_starts_as_all_others_do(what: str) -> None:
    """FedARA's later states have fewer entries; its first one is the initial state, as with every method."""
    federation, (lie, sentence) = toys.federation({"method.name": "fedara", "federation.rounds": 8}), LIES[what]
    request = request_of(federation, lr=LR)
    assert federation.assembly.clients[0].job(request) is not None
    with pytest.raises(RequestError, match=sentence):
        federation.assembly.clients[1]._setup.acceptable.require(lie(request), "client-1")


@pytest.mark.parametrize("what", LIES)
def test_what_was_acceptable_before_does_not_excuse_a_lie(what: str) -> None:
    """A client does not check content again that passed once; it checks all other content."""
    federation = toys.federation({"method.name": "fedlora"})
    request, bounds = request_of(federation, lr=LR), federation.assembly.clients[0]._setup.acceptable
    assert bounds.fault(request) == bounds.fault(request) == ""
    assert LIES[what][1] in bounds.fault(LIES[what][0](request))
    assert bounds.fault(request) == ""


@pytest.mark.parametrize("what", ["a higher rate", "not a number", "large", "another start"])
def test_all_clients_behind_masks_refuse_alike_before_anybody_trains(what: str) -> None:
    built = wide_toys.federation({**wide_toys.MASKED})
    seen = watch(built)
    heard = session(built, LIES[what][0](request_of(built)))
    assert heard.alike
    assert {error for _, error, _ in heard.refused.values()} == {Tampering}
    assert len(heard.refused) == len(wide_toys.SIZES)
    assert not seen.trained


def test_a_later_round_may_start_from_any_bounded_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client can compute the state of a later round: `docs/lying_servers.md` says how a server can exploit that."""
    federation = toys.federation()
    request = with_first(0.3)(request_of(federation, round_=1, lr=LR))
    assert federation.assembly.clients[0].handle(request).contribution.is_finite()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_follows_the_schedule(schedule: str) -> None:
    settings = {"training.lr_schedule": schedule, "training.lr_warmup": 1, "federation.rounds": 4}
    federation = toys.federation(settings)
    federation.run()  # an honest server is not refused
    acceptable: Any = federation.assembly.clients[0]._setup.acceptable
    assert isinstance(acceptable, Acceptable)
    assert acceptable.fault(request_of(federation, round_=3, lr=LR)).startswith("the learning rate is 0.05, and")


@pytest.mark.parametrize(("unit", "refused"), [("client", True), ("example", True), ("none", False)])
def test_no_server_raises_the_clip_norm(unit: str, refused: bool) -> None:
    private = {"privacy.unit": unit, "privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3, "privacy.clip_norm": 0.5}
    federation = toys.federation({} if unit == "none" else private)
    acceptable: Any = federation.assembly.clients[0]._setup.acceptable
    request = replace(request_of(federation, lr=LR), clip_norm=0.5)
    assert "clip norm" not in acceptable.fault(request)
    assert ("the clip norm is 0.6, above the run's 0.5" in acceptable.fault(replace(request, clip_norm=0.6))) == refused
    adapts = replace(acceptable, clip_norm=None)
    assert "above the run's" not in adapts.fault(replace(request, clip_norm=0.6))


def test_the_largest_value_can_be_set() -> None:
    federation = toys.federation({"federation.largest_value": 0.25})
    with pytest.raises(RequestError, match=r"above federation.largest_value = 0.25"):
        federation.assembly.clients[0].handle(with_first(0.3)(request_of(federation, round_=1, lr=LR)))
