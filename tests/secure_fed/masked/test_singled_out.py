"""A lying server that keeps all clients but one from learning anything, to read that client's change from the sum."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from protocols.errors import ProtocolError
from secure_fed.rounds.masked import checks as asked
from secure_fed.rounds.request_checks import Acceptable
from secure_fed.rounds.transport import Request, Stage
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed.masked.wide_toys import MASKED, Tampered, federation, listen

VICTIM = 2
ACTIVE = {**MASKED, "secure_aggregation.active": True, "secure_aggregation.dropout": 0.0}
Lie = Callable[[Request], Request]


def _zeros(tensors: Tensors) -> Tensors:
    return Tensors((name, torch.zeros_like(tensors.tensor(name))) for name in tensors)


LIES: dict[str, tuple[str, Lie]] = {
    "no step": ("fedlora", lambda request: replace(request, lr=0.0)),
    "a smaller step": ("ffa_lora", lambda request: replace(request, lr=request.lr / 1e6)),
    "nothing to start from": ("fra_lora", lambda request: replace(request, tensors=_zeros(request.tensors))),
    "nothing to project on": (
        "fra_lora sketch",
        lambda request: replace(request, means={name: _zeros(mean) for name, mean in request.means.items()}),
    ),
}


def run(way: str, lie: Callable[[int, Stage], Stage]) -> Any:
    sketch = {"method.transport_form": "sketch"} if "sketch" in way else {}
    built = federation({**ACTIVE, "method.name": way.split()[0], **sketch, "federation.rounds": 1})
    heard = listen(built)
    built.assembly = replace(built.assembly, transport=Tampered(built.assembly.transport, lie))
    built.run()
    return heard


def told(lie: Lie, *, parameters: bool) -> Callable[[int, Stage], Stage]:
    """A transport's lie to all clients but the victim; with `parameters` the session's digest matches the lie."""

    def lied(client: int, stage: Stage) -> Stage:
        if client == VICTIM:
            return stage
        request = None if stage.request is None else lie(stage.request)
        own = stage.parameters
        if parameters:  # stages before the request get an invented digest
            own = replace(own, layout=bytes.fromhex(request.digest) if request else bytes(range(32)))
        return replace(stage, request=request, parameters=own)

    return lied


@pytest.mark.parametrize(
    ("name", "fitting"),
    chosen(
        itertools.product(LIES, (False, True)),
        [
            ("no step", True),
            ("a smaller step", False),
            ("nothing to start from", False),
            ("nothing to project on", True),
        ],
    ),
)
def test_who_is_asked_for_something_else_refuses(name: str, fitting: bool) -> None:
    way, lie = LIES[name]
    with pytest.raises(ProtocolError):
        run(way, told(lie, parameters=fitting))


def test_the_sum_would_be_one_clients_change_without_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for the comparison: all clients train and are in the sum, and only the victim's tensors change."""
    monkeypatch.setattr(asked, "_same_for_all", lambda request, stage: True)
    monkeypatch.setattr(Acceptable, "fault", lambda *given: "")
    heard = run("fedlora", told(LIES["no step"][1], parameters=False))
    moved = {client: reply.contribution.norm() for client, reply in heard.replies[0, "change"].items()}
    assert len(moved) == 4
    assert [client for client, norm in moved.items() if norm > 0] == [VICTIM]


def test_the_digest_is_of_all_that_is_asked() -> None:
    built = federation(ACTIVE)
    state = built.assembly.initial
    request = built.assembly.server.request(state, built.assembly.server.plan(state), "change", 0.1, {})
    first = next(iter(request.tensors))
    others = [
        replace(request, round=1),
        replace(request, pass_name="x"),
        replace(request, lr=0.1 + 1e-12),
        replace(request, clip_norm=1.0),
        replace(request, layout="00" * 32),
        replace(request, tensors=request.tensors.without([first])),
        replace(request, tensors=request.tensors | {first: request.tensors.tensor(first) + 1e-3}),
        replace(request, tensors=request.tensors | {first: request.tensors.tensor(first)[None]}),
        replace(request, means={"x": request.tensors}),
        replace(request, first="00" * 32),
        replace(request, plan=replace(request.plan, trainable=())),
        replace(request, plan=replace(request.plan, down=())),
    ]
    digests = {request.digest, *(other.digest for other in others)}
    assert len(digests) == len(others) + 1
    assert replace(request).digest == request.digest
