"""A client in a masked sum, and a server that requests more than the run's configuration allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protocols.errors import ProtocolError
from secure_fed.errors import SecureFedError, TrainingError
from secure_fed.rounds.transport import Recording, Stage, Staged
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.wide_toys import (
    CLIPPED,
    DISTRIBUTED,
    HIDDEN,
    LR,
    MASKED,
    SKETCH,
    Tampered,
    federation,
    listen,
    one_round,
)

TEN = [4] * 10
ACTIVE = {"secure_aggregation.active": True}
Any_ = (ProtocolError, SecureFedError)


def _gather(built: Any, asked: list[int], transport: Any = None, **changed: Any) -> Any:
    """One pass of the first round with these clients as contributors; `changed` replaces fields of the request."""
    server = built.assembly.server
    request = server.request(
        built.assembly.initial,
        server.plan(built.assembly.initial),
        server.plan(built.assembly.initial).passes[0],
        LR,
        {},
    )
    layout = server.layout(built.assembly.initial, request.pass_name)
    return built.assembly.masks.sums.gather(
        asked, replace(request, **changed), layout, transport or built.assembly.transport
    )


def _lying(change: Callable[[int, Stage], dict[str, Any]]) -> Callable[[int, Stage], Stage]:
    return lambda client, stage: replace(stage, **change(client, stage))


# Requests that clients refuse.


@pytest.mark.parametrize(
    "settings", [{**MASKED, **ACTIVE}, DISTRIBUTED, HIDDEN], ids=["active", "distributed", "hidden"]
)
def test_a_session_of_fewer_than_the_run_invites_is_refused(settings: dict[str, Any]) -> None:
    """A session of three of ten clients could be the victim and two colluding clients."""
    built = federation({"federation.cohort": 10, **settings}, sizes=TEN)
    heard = listen(built)
    with pytest.raises(Any_):
        _gather(built, [0, 1, 2])
    assert heard.replies == {}


@pytest.mark.parametrize("settings", [{**MASKED, **ACTIVE}, DISTRIBUTED], ids=["active", "distributed"])
def test_a_session_of_more_than_the_run_invites_is_refused(settings: dict[str, Any]) -> None:
    built = federation({**settings, "federation.cohort": 5}, sizes=TEN)
    heard = listen(built)
    with pytest.raises(Any_):
        _gather(built, list(range(10)))
    assert heard.replies == {}


@pytest.mark.parametrize(
    "weaker",
    [
        {"threshold": 1},
        {"survivors": 2},
        {"neighbours": 2},
        {"active": False, "registry": bytes(32)},
        {"registry": b"\1" * 32},
    ],
    ids=str,
)
def test_terms_weaker_than_the_run_s_are_refused(weaker: dict[str, Any]) -> None:
    built = federation({**MASKED, **ACTIVE}, sizes=TEN)

    def change(client: int, stage: Stage) -> dict[str, Any]:
        return {"parameters": replace(stage.parameters, **weaker)}

    heard = listen(built)
    with pytest.raises(ProtocolError):
        _gather(built, list(range(10)), Tampered(built.assembly.transport, _lying(change)))
    assert heard.replies == {}


@pytest.mark.parametrize("asked", [(0, 0), (1, 0), (0, 1, 2)], ids=str)
def test_no_round_is_contributed_to_twice_nor_more_of_them_than_were_planned(asked: tuple[int, ...]) -> None:
    built = federation(DISTRIBUTED)
    for member in built.assembly.masks.clients:  # type: ignore[union-attr]
        member.begin(2)
    heard = listen(built)
    for round_ in asked[:-1]:
        one_round(built, round_)
    told = set(heard.replies)
    with pytest.raises(ProtocolError, match=r"requested again|more than the run has reserved"):
        one_round(built, asked[-1])
    assert set(heard.replies) == told


@pytest.mark.parametrize("clip_norm", [1e9, 10.0, float("inf")])
def test_no_server_lengthens_what_is_noised(clip_norm: float) -> None:
    """Whatever clip norm the server sends, contributions stay within the run's clip norm, to which the noise is calibrated."""
    built = federation({**DISTRIBUTED, "training.steps": 5})
    heard = listen(built)
    try:
        _gather(built, [0, 1, 2, 3], clip_norm=clip_norm)
    except Any_:
        return
    for reply in heard.replies[0, "change"].values():
        assert reply.contribution.norm() <= 0.1 * (1 + 1e-6)


def test_central_noise_is_beside_contributions_no_longer_than_the_clip_norm() -> None:
    built = federation({**MASKED, **CLIPPED, "training.steps": 5})
    heard = listen(built)
    one_round(built)
    for reply in heard.replies[0, "change"].values():
        assert 0.09 < reply.contribution.norm() <= 0.1 * (1 + 1e-9)


def test_a_client_asked_for_a_sum_that_it_is_not_in_says_so() -> None:
    built = federation(MASKED)
    recording = Recording(built.assembly.transport)
    one_round(built, transport=recording)
    stages = [ask for ask, reply in recording.exchanges if reply.client == 0]
    assert [stage.name for stage in stages] == ["advertise", "share", "mask", "unmask"]
    fresh = federation(MASKED).assembly.masks.clients[0]  # type: ignore[union-attr]
    for stage in stages[1:]:
        with pytest.raises(
            TrainingError, match=rf"client-0 got a request for '{stage.name}' of a sum that it is not in"
        ):
            fresh.handle(stage)


def test_nothing_is_answered_twice() -> None:
    built = federation(MASKED)
    recording = Recording(built.assembly.transport)
    one_round(built, transport=recording)
    member = built.assembly.masks.clients[0]  # type: ignore[union-attr]
    for stage in [ask for ask, reply in recording.exchanges if reply.client == 0][1:]:
        with pytest.raises(ProtocolError):
            member.handle(stage)


def test_another_client_s_message_is_refused() -> None:
    built = federation(MASKED)
    mail: dict[int, bytes] = {}

    def change(client: int, stage: Stage) -> dict[str, Any]:
        if stage.name != "mask":
            return {}
        mail[client] = stage.message
        return {"message": mail[0]} if client == 1 else {}

    with pytest.raises(ProtocolError):
        one_round(built, transport=Tampered(built.assembly.transport, _lying(change)))


def test_two_lists_of_survivors_are_noticed_in_active_mode() -> None:
    from protocols.wire import Survivors

    settings = {**MASKED, **ACTIVE, "secure_aggregation.dropout": 0.25}
    built = federation(settings, sizes=[4] * 8)

    def change(client: int, stage: Stage) -> dict[str, Any]:
        if stage.name != "consistency" or client < 4:
            return {}
        return {"message": Survivors(tuple(range(1, 8))).to_bytes(stage.parameters)}

    with pytest.raises(ProtocolError):
        one_round(built, transport=Tampered(built.assembly.transport, _lying(change)))


# What a client sends.


def test_weight_and_loss_leave_inside_the_mask_alone() -> None:
    built = federation({**MASKED, "federation.weighting": "examples"})
    recording = Recording(built.assembly.transport)
    one_round(built, transport=recording)
    assert {type(reply) for _, reply in recording.exchanges} == {Staged}
    sizes = {len(reply.message) for ask, reply in recording.exchanges if ask.name == "mask"}
    assert len(sizes) == 1


def test_who_makes_up_the_number_sends_zeros_under_its_masks() -> None:
    built = federation({**MASKED, **CLIPPED, "federation.cohort": 4}, sizes=TEN)
    heard = listen(built)
    gathered = _gather(built, [7])
    values = heard.values(0, "change")
    assert list(values) == [7]
    np.testing.assert_allclose(wide_toys.flat(gathered.total.total()), values[7], atol=1e-6)
    assert gathered.received == [7]
    assert gathered.spent.survivors == len(TEN), "a public number"


def test_the_sum_of_a_cohort_of_nobody_is_zero() -> None:
    built = federation({**MASKED, **CLIPPED, "federation.cohort": 4}, sizes=TEN)
    heard = listen(built)
    gathered = _gather(built, [])
    assert heard.replies == {}
    assert not wide_toys.flat(gathered.total.total()).any()
    assert gathered.total.weight == 0


def test_a_closed_sum_takes_nothing_more() -> None:
    built = federation(MASKED)
    gathered = _gather(built, [0, 1, 2, 3])
    with pytest.raises(TrainingError, match="closed"):
        gathered.total.add(gathered.total.total())


def test_no_two_sums_of_a_run_or_of_two_runs_are_one_session() -> None:
    sessions = []
    for _ in range(2):
        built = federation({**MASKED, **SKETCH})
        recording = Recording(built.assembly.transport)
        built.assembly = replace(built.assembly, transport=recording)
        built.run()
        sessions += [ask.parameters.session for ask, reply in recording.exchanges if reply.client == 0]
    assert len(set(sessions)) == 2 * 3 * 2
    assert len(sessions) == 4 * 2 * 3 * 2


def test_a_client_that_trains_does_so_once_in_a_round_of_two_passes() -> None:
    built = federation({**MASKED, **SKETCH})
    trained: list[tuple[int, int]] = []
    for client in built.assembly.clients:
        train = client._train

        def training(request: Any, train: Any = train, index: int = client.index) -> None:
            trained.append((request.round, index))
            train(request)

        client._train = training  # type: ignore[method-assign]
    built.run()
    assert trained == [(round_, client) for round_ in range(3) for client in range(4)]
