"""Whole sessions: with any dropouts at any stage the result is the plain sum bit for bit or none, and no party learns more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import protocols
import protocols.client
from protocols.client import Client, Keys
from protocols.keys import Secret
from protocols.wire import Opened, Shares
from tests.protocols.looking import everything
from tests.protocols.sessions import Play, cast, play

CASTS = {
    "complete": {},
    "complete, active": {"active": True},
    "ring": {"count": 9, "neighbours": 4, "threshold": 3},
    "ring, active": {"count": 9, "neighbours": 4, "threshold": 3, "active": True},
    "64 bits": {"bits": 64, "bound": 2**40},
    "two clients": {"count": 2, "threshold": 1},
}
every_cast = pytest.mark.parametrize("options", CASTS.values(), ids=CASTS)


def equal(scene: Play) -> bool:
    return scene.server.total().tolist() == scene.expected().tolist()


@every_cast
def test_the_sum_is_the_plain_sum(options: Mapping[str, Any]) -> None:
    scene = play(cast(**options))
    assert scene.server.stage == "done"
    assert scene.server.survivors == scene.cast.ids
    assert (scene.errors, scene.server.suspects) == ({}, frozenset())
    assert equal(scene)


def test_the_example_of_the_package_runs() -> None:
    """The code in the docstring, with its clients and parameters filled in."""
    made = cast()
    code = (protocols.__doc__ or "").partition("process:\n\n")[2].partition("\n\nA client that")[0]
    names: dict[str, Any] = {**vars(protocols), "parameters": made.parameters, "policy": made.policy}
    names["vectors"] = made.vectors()
    exec("\n".join(line.removeprefix("    ") for line in code.splitlines()), names)
    assert names["total"].tolist() == sum(made.vectors().values()).tolist()  # type: ignore[union-attr]


def test_after_a_session_nobody_holds_secrets() -> None:
    scene = play(cast(active=True))
    for machine in (scene.server, *scene.clients.values()):
        assert not [thing for thing in everything(machine) if isinstance(thing, Secret)]


def test_both_secrets_of_a_client_are_dealt_at_the_threshold_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    dealt, split_each = [], protocols.client.split_each

    def noted(secrets: Sequence[Secret], threshold: int, holders: Sequence[int]) -> list[dict[int, bytes]]:
        dealt.append((len(secrets), threshold))
        return split_each(secrets, threshold, holders)

    monkeypatch.setattr(protocols.client, "split_each", noted)
    play(cast(count=6, threshold=4))
    assert dealt == [(2, 4)] * 6


def test_shares_hide_in_what_is_delivered_and_opened_ones_are_those_asked_for() -> None:
    made = cast(count=6, threshold=3)
    scene = play(made, silent={"mask": made.ids[:1]})
    for me in made.ids[1:]:
        opened = Opened.from_bytes(scene.said["unmask", me], made.parameters, me)
        assert set(opened.keys) == {made.ids[0]}
        assert set(opened.seeds) == set(made.ids[1:]) - {me}
        dealt = Shares.from_bytes(scene.said["share", me], made.parameters, me)
        assert set(dealt.sealed) == set(made.ids) - {me}


@pytest.mark.parametrize("count", [1, 4])
def test_threads_do_not_change_a_bit(count: int) -> None:
    made = cast(count=4, threshold=2, length=5000)
    keys = {me: Keys.new() for me in made.ids}
    clients = {me: Client(made.parameters, me, made.policy, threads=count, _keys=keys[me]) for me in made.ids}
    scene = play(made, clients=clients, silent={"mask": made.ids[:1]})
    assert equal(scene)
