"""The cost of a session: the closed forms against the bytes of real sessions, message by message."""

from __future__ import annotations

from typing import Any

import pytest

from protocols.parameters import stages
from protocols.wire import Traffic, traffic
from tests.cells import every
from tests.protocols.sessions import Cast, cast, play

SHAPES = [{"count": 2}, {"count": 3}, {"count": 7}, {"count": 9, "neighbours": 4}, {"count": 12, "neighbours": 6}]
SESSIONS = [
    {**shape, "active": active, "bits": bits, "length": length}
    for shape in SHAPES
    for active in (False, True)
    for bits, length in ((32, 1), (64, 1), (32, 333), (64, 4))
]


def measured(scene_of: Cast) -> dict[str, set[Traffic]]:
    """By stage, the different sizes of the clients' messages. In the first stage, `down` is the size of the parameters."""
    scene = play(scene_of)
    assert scene.errors == {}
    assert scene.server.total().tolist() == scene.expected().tolist()
    found: dict[str, set[Traffic]] = {}
    for (stage, client), answer in scene.said.items():
        told = scene.told[stage, client] or scene_of.parameters.to_bytes()
        found.setdefault(stage, set()).add(Traffic(up=len(answer), down=len(told)))
    return found


@every("options", SESSIONS)
def test_every_client_sends_and_is_sent_what_is_foretold(options: dict[str, Any]) -> None:
    scene = cast(**options)
    foretold = traffic(scene.parameters)
    assert tuple(foretold) == stages(scene.parameters)
    if not scene.parameters.chosen:
        assert measured(scene) == {stage: {cost} for stage, cost in foretold.items()}


def test_where_clients_choose_the_mean_is_what_is_foretold() -> None:
    """`traffic` gives exact means, and expectations where a message's size depends on how many clients are near a client."""
    scene = play(cast(count=40, neighbours=12, active=True, corrupt=1))
    foretold, many = traffic(scene.cast.parameters), len(scene.clients)
    for stage, cost in foretold.items():
        up = [len(answer) for (at, _), answer in scene.said.items() if at == stage]
        down = [len(told) for (at, _), told in scene.told.items() if at == stage and told]
        assert len(up) == many
        assert sum(up) == many * cost.up
        if stage in ("mask", "unmask"):
            assert sum(down) == many * cost.down
        elif down:
            assert sum(down) / many == pytest.approx(cost.down, rel=0.1)


def test_the_sessions_above_go_through_every_stage() -> None:
    seen = {frozenset(stages(cast(**options).parameters)) for options in SESSIONS}
    passive = {"advertise", "share", "mask", "unmask"}
    assert seen == {frozenset(passive | more) for more in (set(), {"consistency"})}


def test_the_vector_is_all_that_grows_with_its_length() -> None:
    short, long = (
        traffic(cast(count=9, neighbours=4, active=True, length=length).parameters) for length in (10, 10**6)
    )
    grown = {
        stage: (long[stage].up - short[stage].up, long[stage].down - short[stage].down)
        for stage in short
        if long[stage] != short[stage]
    }
    assert grown == {"mask": (4 * (10**6 - 10), 0)}


def test_on_a_ring_what_a_client_sends_does_not_grow_with_the_clients() -> None:
    few, many = (traffic(cast(count=count, neighbours=4, active=True).parameters) for count in (10, 60))
    assert {stage: cost.up for stage, cost in few.items()} == {stage: cost.up for stage, cost in many.items()}
    assert many["share"].down - few["share"].down < 4 * 164  # the client's choices and its choosers, never all clients
    assert many["mask"].down - few["mask"].down == 50 * 36  # every client's choice
    complete_few, complete_many = (traffic(cast(count=count).parameters) for count in (10, 60))
    assert complete_many["share"].up == complete_few["share"].up + 50 * 86
