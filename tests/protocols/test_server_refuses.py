"""A server refuses a client's false messages, names the client and keeps its state, and the others get their sum."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protocols.errors import Aborted, MessageError, Misdealt, ParameterError, ProtocolError, Tampering
from protocols.keys import AgreementKey, Identity
from protocols.server import Server
from protocols.wire import Advertise, Masked, Opened, Roster, Shares
from tests.protocols.sessions import Cast, Play, cast, play

RING = {"count": 9, "neighbours": 4, "threshold": 3}


def snapshot(server: Server) -> str:
    """All of a server's state, in text."""
    state = {name: value for name, value in vars(server).items() if name != "_accumulator"}
    return repr(sorted(state.items())) + repr(server._ballot.shares) + server._accumulator.tobytes().hex()


def stopped(stage: str, **options: Any) -> Play:
    """A session stopped before the clients act in this stage."""
    return play(cast(**options), until=stage)


def answer(scene: Play, stage: str, client: int) -> bytes:
    return scene.act(stage, client, scene.told[stage, client])


def refused(server: Server, sender: int, message: bytes, error: type[ProtocolError], match: str) -> None:
    before = snapshot(server)
    with pytest.raises(error, match=match) as caught:
        server.receive(sender, message)
    assert snapshot(server) == before
    assert caught.value.who == f"client {sender}"


STAGES = [
    *(("advertise", {}), ("share", {}), ("mask", {}), ("unmask", {})),
    ("consistency", {"active": True}),
]
every_stage = pytest.mark.parametrize(("stage", "options"), STAGES, ids=[stage for stage, _ in STAGES])


@every_stage
def test_a_message_is_taken_once(stage: str, options: dict[str, Any]) -> None:
    scene = stopped(stage, **options)
    message = answer(scene, stage, 3)
    scene.server.receive(3, message)
    refused(scene.server, 3, message, MessageError, "client 3 has sent its message already in this stage")


@every_stage
def test_a_message_of_somebody_who_takes_no_part(stage: str, options: dict[str, Any]) -> None:
    scene = stopped(stage, **options)
    refused(scene.server, 4, answer(scene, stage, 3), MessageError, "client 4 takes no part in this stage")


@every_stage
def test_a_message_of_one_client_in_the_name_of_another(stage: str, options: dict[str, Any]) -> None:
    scene = stopped(stage, **options)
    refused(scene.server, 5, answer(scene, stage, 3), MessageError, "its sender number is 3")


@every_stage
def test_a_message_that_is_cut_or_longer_or_of_another_session(stage: str, options: dict[str, Any]) -> None:
    scene = stopped(stage, **options)
    message = answer(scene, stage, 3)
    other = play(replace(scene.cast, run="earlier"), until=stage)
    for lie in (b"", message[:-1], message + b"\0", answer(other, stage, 3)):
        refused(scene.server, 3, lie, MessageError, "message: ")
    scene.server.receive(3, message)  # the refused messages do not block the true one


@every_stage
def test_a_message_of_an_earlier_stage(stage: str, options: dict[str, Any]) -> None:
    scene = stopped(stage, **options)
    for (earlier, client), message in scene.said.items():
        if client == 3 and earlier != stage:
            refused(scene.server, 3, message, MessageError, "it belongs to another stage")


def test_who_dropped_does_not_come_back() -> None:
    made = cast(count=6, threshold=3)
    scene = play(made, silent={"share": {3}}, until="mask")
    with pytest.raises(MessageError, match="client 3 takes no part"):
        scene.server.receive(3, b"")
    assert scene.server.waiting == set(made.ids) - {3}


# --- keys


def advert(client: Advertise, made: Cast, owner: int = 3) -> bytes:
    return client.to_bytes(made.parameters, owner)


def test_keys_of_somebody_else_or_of_small_order() -> None:
    made = cast()
    server = made.server()
    server.receive(5, made.client(5).advertise())
    taken, new = server._adverts[5], AgreementKey.new().public
    for lie in (Advertise(taken.mask, new), Advertise(new, taken.channel)):
        refused(server, 3, advert(lie, made), Tampering, "a key of another client")
    for lie in (Advertise(new, new), Advertise(bytes(32), new), Advertise(new, bytes([1]) + bytes(31))):
        refused(server, 3, advert(lie, made), Tampering, "one key twice, or a key of small order")


def test_keys_that_are_not_signed_by_the_registered_identity() -> None:
    made = cast(active=True)
    server = made.server()
    unsigned = Advertise(AgreementKey.new().public, AgreementKey.new().public)
    session = made.parameters.session
    for identity, purpose in ((made.identities[5], "advertise"), (made.identities[3], "masked")):
        lie = replace(unsigned, signature=identity.sign(purpose, session, unsigned.signed(3)))
        refused(server, 3, advert(lie, made), Tampering, "keys of client 3 lack its signature")


def test_an_active_server_knows_the_identities() -> None:
    made = cast(active=True)
    for identities in ({**made.public, 3: Identity.new().public}, {}):
        with pytest.raises(ParameterError):
            Server(made.parameters, identities=identities)


# --- shares


@pytest.mark.parametrize("lie", ["to itself", "to a stranger", "one too few", "none"])
def test_shares_go_to_all_neighbours_and_to_them_alone(lie: str) -> None:
    scene = stopped("share")
    shares = Shares.from_bytes(answer(scene, "share", 3), scene.cast.parameters, 3)
    sealed = dict(shares.sealed)
    if lie == "to itself":
        sealed[3] = sealed[5]
    elif lie == "to a stranger":
        sealed[4] = sealed[5]
    elif lie == "one too few":
        del sealed[5]
    else:
        sealed.clear()
    message = replace(shares, sealed=sealed).to_bytes(scene.cast.parameters, 3)
    refused(scene.server, 3, message, MessageError, "dealt its shares to others than exactly")


def test_on_a_ring_shares_for_another_than_a_neighbour() -> None:
    scene = stopped("share", **RING)
    message = answer(scene, "share", 3)
    near = scene.server._graph.neighbours(3)
    far = next(me for me in scene.cast.ids if me != 3 and me not in near)
    shares = Shares.from_bytes(message, scene.cast.parameters, 3)
    sealed = {far if me == near[0] else me: value for me, value in shares.sealed.items()}
    lie = replace(shares, sealed=sealed).to_bytes(scene.cast.parameters, 3)
    refused(scene.server, 3, lie, MessageError, "dealt its shares to others than exactly")


# --- opened shares


def test_other_shares_than_the_list_calls_for() -> None:
    made = cast(count=6, threshold=3)
    scene = play(made, silent={"mask": {13}}, until="unmask")
    right = Opened.from_bytes(answer(scene, "unmask", 3), made.parameters, 3)
    assert (set(right.seeds), set(right.keys)) == ({5, 7, 9, 11}, {13})
    share = right.seeds[5]
    lies = [
        Opened(right.seeds, {}),
        Opened({**right.seeds, 13: share}, {}),
        Opened({**right.seeds, 3: share}, right.keys),
        Opened({}, right.keys),
        Opened(right.keys, right.seeds),
    ]
    for lie in lies:
        refused(scene.server, 3, lie.to_bytes(made.parameters, 3), MessageError, "opened other shares than")


def spoiled(*liars: int, count: int = 7) -> tuple[Cast, Callable[[str, int, bytes], bytes]]:
    """A cast, and a function that replaces all shares that the liars open by random bytes.

    Lies are random since equal lies may cancel at zero, where the secret is.
    """
    made = cast(count=count, threshold=3)

    def say(stage: str, client: int, message: bytes) -> bytes:
        if stage != "unmask" or client not in liars:
            return message
        opened = Opened.from_bytes(message, made.parameters, client)
        seeds, keys = ({owner: os.urandom(32) + b"\0" for owner in shares} for shares in (opened.seeds, opened.keys))
        return Opened(seeds, keys).to_bytes(made.parameters, client)

    return made, say


@pytest.mark.parametrize("liars", [(3,), (3, 7), (15,)])
def test_wrong_shares_are_noticed_done_without_and_named(liars: tuple[int, ...]) -> None:
    made, say = spoiled(*liars)
    scene = play(made, say=say, silent={"mask": {13}})
    assert scene.server.suspects == set(liars)
    assert scene.server.total().tolist() == scene.expected().tolist()


def test_wrong_shares_of_too_many_leave_no_sum() -> None:
    made, say = spoiled(3, 5, 7, 9, 11)
    server = made.server()
    with pytest.raises(Tampering) as caught:
        play(made, say=say, server=server)
    assert "no sum was released" in str(caught.value)
    assert server.stage == "aborted"
    assert not server._accumulator.any()


def test_a_seed_that_was_not_committed_to_leaves_no_sum() -> None:
    """Client 3 commits to another seed than it shares: no holder's share is wrong, and no rebuilt seed fits the commitment."""
    made = cast()

    def say(stage: str, client: int, message: bytes) -> bytes:
        if (stage, client) != ("share", 3):
            return message
        return replace(Shares.from_bytes(message, made.parameters, 3), commitment=bytes(32)).to_bytes(
            made.parameters, 3
        )

    server = made.server()
    with pytest.raises(Tampering) as caught:
        play(made, say=say, server=server)
    assert isinstance(caught.value, Misdealt)
    assert (caught.value.client, caught.value.who) == (3, "client 3")
    assert not server._accumulator.any()


# --- too few, too large, too late


@pytest.mark.parametrize(
    ("stage", "active", "match"),
    [
        ("advertise", False, "3 clients take part, fewer than the 4 that a sum needs"),
        ("share", False, "0 clients have dealt shares to enough others, fewer than the 4"),
        ("mask", False, "3 clients have sent their vectors, fewer than the 4"),
        ("unmask", False, "2 holders of the shares of client 7 are left, fewer than 3"),
        ("consistency", True, "3 clients signed the list of survivors, fewer than the 4 needed"),
        ("unmask", True, "2 holders of the shares of client 7 are left, fewer than 3"),
    ],
)
def test_with_too_few_left_there_is_no_sum_and_nothing_of_one(stage: str, active: bool, match: str) -> None:
    made = cast(count=5, threshold=3, active=active)
    server = made.server()
    with pytest.raises(Aborted, match=match) as caught:
        play(made, silent={stage: made.ids[:2]}, server=server)
    assert (caught.value.stage, caught.value.protected[:19]) == (stage, "no sum was released")
    assert not server._accumulator.any()
    for attempt in (server.total, server.close, lambda: server.receive(3, b"")):
        with pytest.raises(MessageError):
            attempt()


def test_fewer_survivors_than_agreed_on() -> None:
    made = cast(count=6, threshold=2, survivors=5)
    with pytest.raises(Aborted, match="4 clients have sent their vectors, fewer than the 5"):
        play(made, silent={"mask": made.ids[:2]})


def test_a_sum_beyond_what_honest_clients_could_make_is_not_released() -> None:
    made = cast(bound=100)
    server = made.server()

    def say(stage: str, client: int, message: bytes) -> bytes:
        if (stage, client) != ("mask", 3):
            return message
        changed = bytearray(message)
        Masked.from_bytes(changed, made.parameters, 3).vector[0] += np.uint32(10**6)
        return bytes(changed)

    with pytest.raises(Tampering, match="a coordinate of the sum is beyond 500"):
        play(made, say=say, server=server)
    assert not server._accumulator.any()


def test_a_finished_session_takes_and_changes_nothing() -> None:
    scene = play(cast())
    total = scene.server.total()
    assert not total.flags.writeable
    with pytest.raises(MessageError, match="the session is done: it accepts no more messages"):
        scene.server.receive(3, scene.said["unmask", 3])
    with pytest.raises(MessageError, match="there is no stage to close"):
        scene.server.close()
    assert scene.server.total().tolist() == scene.expected().tolist()


def test_there_is_no_sum_before_the_end() -> None:
    for stage in ("share", "mask", "unmask"):
        with pytest.raises(MessageError, match="there is no sum"):
            stopped(stage).server.total()


def test_everybody_is_shown_one_roster() -> None:
    scene = stopped("share")
    assert len({scene.told["share", me] for me in scene.cast.ids}) == 1
    adverts = Roster.from_bytes(scene.told["share", 3], scene.cast.parameters).adverts
    assert {me: adverts[me] for me in scene.cast.ids} == {me: client._advert for me, client in scene.clients.items()}
