"""A party refuses every false message: a client then keeps no secret and answers no more, a server keeps its state.

The lies of `protocols.lies` are in `test_simulate`; here are all others.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.client import Client, Keys, steps
from protocols.errors import (
    Aborted,
    MessageError,
    Misdealt,
    ParameterError,
    ProtocolError,
    RangeError,
    Spent,
    Tampering,
)
from protocols.keys import AgreementKey, Identity, Secret
from protocols.record import OnDisk
from protocols.roster import chosen_by, near
from protocols.server import Server
from protocols.wire import Advertise, Confirm, Confirmations, Delivery, Masked, Opened, Roster, Shares, Survivors
from tests.cells import every
from tests.protocols.looking import contents, everything, remains
from tests.protocols.sessions import METHODS, Cast, Play, cast, play

VICTIM = 3
RING = {"count": 9, "neighbours": 4, "threshold": 3}
CHOSEN = {"count": 14, "neighbours": 4, "threshold": 3, "active": True}
SIX = {"count": 6, "threshold": 4, "active": True}
FIELDS = ("channel", "mask")
Adverts = dict[int, Advertise]


def at(stage: str, **options: Any) -> Play:
    """A session stopped before the clients act in this stage."""
    return play(cast(**options), until=stage)


def chosen_at(stage: str, **options: Any) -> tuple[Play, tuple[int, ...], tuple[int, ...]]:
    """A session in which clients choose, the choices of the victim, and its choosers.

    The choosers have the victim among their first two choices, and the victim has not chosen them.
    """
    while True:
        scene = at(stage, **(CHOSEN | options))
        seeds = {me: scene.clients[me]._advert.choice for me in scene.cast.ids}
        chose = {me: chosen_by(me, seed, scene.cast.parameters) for me, seed in seeds.items()}
        own = chose[VICTIM]
        choosers = tuple(me for me, some in chose.items() if VICTIM in some[:2] and me not in own)
        if choosers:
            return scene, own, choosers


def refused(scene: Play, stage: str, message: bytes, error: type[ProtocolError], word: str = "") -> None:
    """Check that the victim refuses the message, and then even the true message, and keeps no secret."""
    with pytest.raises(error, match=word) as caught:
        scene.act(stage, VICTIM, message)
    assert caught.value.stage == METHODS[stage]
    assert caught.value.who in (f"client {VICTIM}", "the server")
    with pytest.raises(MessageError, match="finished"):
        scene.act(stage, VICTIM, scene.told[stage, VICTIM])
    assert not [thing for thing in everything(scene.clients[VICTIM]) if isinstance(thing, Secret)]


# --- a client


def roster_of(scene: Play) -> Adverts:
    return dict(Roster.from_bytes(scene.told["share", VICTIM], scene.cast.parameters).adverts)


def forged(owner: int, purpose: str, signed: int) -> Callable[[Play, Adverts], None]:
    """The owner's keys, with its signature for another purpose or over the keys of another client."""

    def lie(scene: Play, adverts: Adverts) -> None:
        body = adverts[owner].signed(signed)
        signature = scene.cast.identities[owner].sign(purpose, scene.cast.parameters.session, body)
        adverts[owner] = replace(adverts[owner], signature=signature)

    return lie


def other(owner: int, field: str, value: Callable[[Adverts], bytes]) -> Callable[[Play, Adverts], None]:
    return lambda scene, adverts: adverts.update({owner: replace(adverts[owner], **{field: value(adverts)})})


def first(count: int) -> Callable[[Play, Adverts], None]:
    return lambda scene, adverts: [adverts.pop(me) for me in list(adverts)[count:]] and None


ROSTERS: list[tuple[dict[str, Any], Callable[[Play, Adverts], Any], type[ProtocolError], str]] = [
    ({}, lambda scene, adverts: adverts.pop(VICTIM), Tampering, "this client"),
    ({}, lambda scene, adverts: adverts.update(roster_of(at("share"))), Tampering, "this client"),  # before a restart
    *(({}, other(VICTIM, one, lambda _: AgreementKey.new().public), Tampering, "this client") for one in FIELDS),
    *(({}, other(5, one, lambda all: all[7].channel), Tampering, "another client") for one in FIELDS),
    *(({}, other(5, one, lambda all: all[7].mask), Tampering, "another client") for one in FIELDS),
    # X25519 ignores the highest bit: the same key in another encoding.
    ({}, other(5, "mask", lambda all: all[7].mask[:31] + bytes([all[7].mask[31] | 128])), Tampering, "another client"),
    ({}, other(5, "mask", lambda all: all[5].channel), Tampering, "one key twice"),
    *(({}, other(5, one, lambda _: bytes([1]) + bytes(31)), Tampering, "small order") for one in FIELDS),
    ({"survivors": 4}, first(3), Aborted, "3 clients"),
    ({"threshold": 4}, first(4), Aborted, "4 clients"),
    ({"active": True}, forged(5, "survivors", 5), Tampering, "signature"),
    ({"active": True}, forged(5, "advertise", 7), Tampering, "signature"),
]


@pytest.mark.parametrize(("options", "lie", "error", "word"), ROSTERS)
def test_a_roster(
    options: dict[str, Any], lie: Callable[[Play, Adverts], Any], error: type[ProtocolError], word: str
) -> None:
    scene = at("share", **options)
    adverts = roster_of(scene)
    lie(scene, adverts)
    refused(scene, "share", Roster(adverts).to_bytes(scene.cast.parameters), error, word)


def test_a_roster_is_of_the_clients_it_chose_and_those_who_chose_it() -> None:
    scene, own, choosers = chosen_at("share")
    adverts, parameters = roster_of(scene), scene.cast.parameters
    assert {VICTIM, *own, *choosers} <= adverts.keys() < set(scene.cast.ids)
    stranger = next(me for me in scene.cast.ids if me not in adverts)
    more = {**adverts, stranger: Advertise.from_bytes(scene.said["advertise", stranger], parameters, stranger)}
    refused(scene, "share", Roster(more).to_bytes(parameters), Tampering, f"client {stranger}")
    scene, own, _ = chosen_at("share")
    less = {me: advert for me, advert in roster_of(scene).items() if me not in own[2:]}
    refused(scene, "share", Roster(less).to_bytes(scene.cast.parameters), Aborted, "2 of the chosen clients")


DEALT: list[tuple[str, Callable[[dict[int, bytes], tuple[int, ...], tuple[int, ...]], Any]]] = [
    ("this client", lambda dealt, own, choosers: dealt.update({VICTIM: bytes(32)})),
    ("this client", lambda dealt, own, choosers: dealt.pop(VICTIM)),
    ("client 4", lambda dealt, own, choosers: dealt.update({4: bytes(32)})),
    ("than it advertised", lambda dealt, own, choosers: dealt.update({own[0]: bytes(32)})),
    ("delivered shares", lambda dealt, own, choosers: dealt.pop(choosers[0])),
]


@pytest.mark.parametrize(("word", "lie"), DEALT)
def test_a_list_of_the_clients_that_dealt(word: str, lie: Callable[..., Any]) -> None:
    scene, own, choosers = chosen_at("mask")
    true = Delivery.from_bytes(scene.told["mask", VICTIM], scene.cast.parameters)
    dealt = dict(true.dealt)
    lie(dealt, own, choosers)
    refused(scene, "mask", Delivery(true.sealed, dealt).to_bytes(scene.cast.parameters), Tampering, word)


def test_the_clients_that_dealt_are_enough() -> None:
    scene, own, _ = chosen_at("mask")
    parameters, everybody = scene.cast.parameters, set(scene.cast.ids)
    true = Delivery.from_bytes(scene.told["mask", VICTIM], parameters)
    for left, word in (
        (everybody - set(own[2:]), "2 neighbours have dealt"),
        (everybody - set(own[:2]), "0 of the neighbours that client 3 chose"),
        ({VICTIM, *own}, "5 clients have dealt"),
    ):
        parts = [{one: value for one, value in part.items() if one in left} for part in (true.sealed, true.dealt)]
        with pytest.raises(Aborted, match=word):
            copy.copy(scene.clients[VICTIM]).mask(Delivery(*parts).to_bytes(parameters), scene.vectors[VICTIM])


@every(
    ("options", "vector"),
    [
        *(
            ({}, vector)
            for vector in (np.zeros(5, "u4"), np.zeros(4, "u8"), np.zeros(4), np.zeros((1, 4), "u4"), [0] * 4)
        ),
        *(({"bound": 100}, np.array([0, 100, -100, x]).astype("i4").view("u4")) for x in (101, -101, -(2**31))),
    ],
)
def test_a_vector_that_is_none_of_the_session(options: dict[str, Any], vector: Any) -> None:
    scene = at("mask", **options)
    with pytest.raises(RangeError):
        scene.clients[VICTIM].mask(scene.told["mask", VICTIM], vector)


def listing(scene: Play, survivors: Collection[int]) -> bytes:
    """A list of these survivors; in an active session with the signatures of the clients near the victim."""
    around = near(VICTIM, scene.server._graph, survivors) if scene.cast.active else ()
    statements = {me: scene.server._statements[me] for me in around}
    return Survivors(tuple(sorted(survivors)), statements).to_bytes(scene.cast.parameters)


@pytest.mark.parametrize("lie", ["another list", "another signer", "nothing"])
def test_a_survivor_that_masked_by_another_list_of_those_who_dealt(lie: str) -> None:
    scene = at("consistency", active=True)
    signatures, session = scene.server._statements, scene.cast.parameters.session
    body = Masked.signed(5, bytes(32))
    forged = scene.cast.identities[5].sign("masked", session, body) if lie == "another list" else signatures[7]
    statements = {me: signatures[me] for me in scene.cast.ids if me != VICTIM} | {5: forged}
    if lie == "nothing":
        del statements[5]
    message = Survivors(scene.cast.ids, statements).to_bytes(scene.cast.parameters)
    refused(scene, "consistency", message, Tampering, "exactly" if lie == "nothing" else "client 5 .* another list")


@pytest.mark.parametrize("whose", ["its own", "an owner's"])
def test_survivors_among_whom_somebody_is_left_with_too_few_it_chose_to_mask_with(whose: str) -> None:
    """The list omits two of the three first choices of the victim, or of an owner whose shares the victim holds."""
    scene, _, choosers = chosen_at("consistency", neighbours=6, threshold=4, partners=2)
    one = VICTIM if whose == "its own" else choosers[0]
    gone = [me for me in scene.server._graph.firsts(one) if me != VICTIM][:2]  # type: ignore[union-attr]
    # The error names the first client found: others may have chosen both as well.
    message = listing(scene, set(scene.cast.ids) - set(gone))
    refused(scene, "consistency", message, Aborted, r"1 of the neighbours that client \d+ chose")


@pytest.mark.parametrize("gone", [1, 2])
def test_survivors_hang_together_only_over_more_than_the_window(gone: int) -> None:
    scene = at("unmask", count=16, neighbours=6, threshold=2, survivors=3, corrupt=1, window=1)
    order = scene.server._graph.order
    away = [order[(order.index(VICTIM) + 5 + step) % 16] for step in range(gone)]
    message = listing(scene, set(order) - set(away))
    if gone == 1:
        scene.act("unmask", VICTIM, message)
    else:
        refused(scene, "unmask", message, Aborted, "cut into separate sums")


def signed(
    scene: Play, survivors: Collection[int], signer: int, purpose: str = "survivors", dealt: bytes = b""
) -> bytes:
    """A true signature over the lists of dealers and survivors, unless these arguments are not the session's."""
    body = Confirm.signed(signer, dealt or scene.server._digest, Survivors(tuple(sorted(survivors))).digest)
    return scene.cast.identities[signer].sign(purpose, scene.cast.parameters.session, body)


def confirmations(scene: Play) -> dict[int, bytes]:
    return dict(Confirmations.from_bytes(scene.told["unmask", VICTIM], scene.cast.parameters).signatures)


SIGNATURES: dict[str, Callable[[Play], bytes]] = {
    "another purpose": lambda scene: signed(scene, scene.cast.ids, 5, purpose="masked"),
    "other dealers": lambda scene: signed(scene, scene.cast.ids, 5, dealt=bytes(32)),
    "other survivors": lambda scene: signed(scene, scene.cast.ids[:-1], 5),
    "another signer": lambda scene: signed(scene, scene.cast.ids, 7),
    "another session": lambda scene: confirmations(play(replace(scene.cast, run="earlier"), until="unmask"))[5],
}


@pytest.mark.parametrize("lie", SIGNATURES)
def test_a_signature_over_the_list(lie: str) -> None:
    scene = at("unmask", **SIX)
    true = confirmations(scene)
    assert true[5] == signed(scene, scene.cast.ids, 5)  # so the lie is the only fault
    message = Confirmations({**true, 5: SIGNATURES[lie](scene)}).to_bytes(scene.cast.parameters)
    refused(scene, "unmask", message, Tampering, "client 5 has not signed")


def test_signatures_are_enough_and_of_survivors() -> None:
    scene = at("unmask", **SIX)
    some = {me: one for me, one in confirmations(scene).items() if me <= 9}
    refused(scene, "unmask", Confirmations(some).to_bytes(scene.cast.parameters), Aborted, "3 holders .* 4 clients")
    scene = at("unmask", **CHOSEN)  # where clients choose, all are counted and not the holders alone
    near = {VICTIM, *scene.server._graph.holders(VICTIM)}
    some = {me: one for me, one in confirmations(scene).items() if me in near}
    refused(scene, "unmask", Confirmations(some).to_bytes(scene.cast.parameters), Aborted, "4 holders .* 5 clients")
    scene = play(cast(count=6, threshold=3, active=True), silent={"mask": {13}}, until="unmask")
    more = {**confirmations(scene), 13: signed(scene, scene.cast.ids[:-1], 13)}
    refused(scene, "unmask", Confirmations(more).to_bytes(scene.cast.parameters), Tampering, "client 13")


def test_a_list_is_signed_once_even_by_a_copy_or_after_a_restart(tmp_path: Path) -> None:
    """If honest clients signed two different lists, both lists could get enough signatures."""
    made = cast(active=True, threshold=3)
    kept = {me: made.client(me, sessions=OnDisk(tmp_path / str(me))) for me in made.ids}
    scene = play(made, clients=kept, until="consistency")
    twin = copy.copy(scene.clients[VICTIM])
    scene.act("consistency", VICTIM, scene.told["consistency", VICTIM])
    with pytest.raises(Spent):
        twin.confirm(listing(scene, made.ids[:-1]))
    again = {me: made.client(me, sessions=OnDisk(tmp_path / str(me))) for me in made.ids}
    assert {me: type(error) for me, error in play(made, clients=again).errors.items()} == {VICTIM: Spent}


def test_a_copy_of_a_client_does_not_answer_again() -> None:
    scene = at("unmask")
    twin = copy.copy(scene.clients[VICTIM])
    scene.act("unmask", VICTIM, scene.told["unmask", VICTIM])
    with pytest.raises(Spent):
        twin.unmask(listing(scene, scene.cast.ids[:-1]))


def test_nothing_is_opened_after_a_restart_or_if_the_claim_cannot_be_recorded(tmp_path: Path) -> None:
    made = cast(threshold=3)
    for path, errors in (("sessions", {}), ("sessions", {VICTIM: Spent}), ("no/folder", {VICTIM: ProtocolError})):
        kept = {VICTIM: made.client(VICTIM, sessions=OnDisk(tmp_path / path))}
        scene = play(made, clients={**made.clients(), **kept})
        assert {me: type(error) for me, error in scene.errors.items()} == errors
        assert (("unmask", VICTIM) in scene.said) == (not errors)


@pytest.mark.parametrize("options", [{}, {**RING, "active": True}], ids=["passive", "chosen"])
def test_a_step_out_of_turn_finishes_the_client(options: dict[str, Any]) -> None:
    made = cast(**options)
    names = {stage: method for stage, method in METHODS.items() if method in steps(made.parameters)}
    for stage in names:
        for method in set(METHODS.values()) - {names[stage]}:
            scene = play(made, until=stage)
            message = scene.told.get((stage, VICTIM), b"")
            arguments = {"advertise": (), "mask": (message, scene.vectors[VICTIM])}.get(method, (message,))
            with pytest.raises(MessageError, match=rf"{method}\(\) is out of turn: {names[stage]}\(\) comes next"):
                getattr(scene.clients[VICTIM], method)(*arguments)
            with pytest.raises(MessageError, match="finished"):
                scene.act(stage, VICTIM, message)


def test_a_session_that_is_not_for_this_client_or_server_is_not_joined() -> None:
    made, active = cast(), cast(active=True)
    with pytest.raises(ParameterError, match="not among"):
        Client(made.parameters, 4, made.policy)
    for identity in (None, Identity.new(), active.identities[5]):
        with pytest.raises(ParameterError, match="no identity"):
            Client(active.parameters, VICTIM, active.policy, identity=identity)
    for identities in ({**active.public, 3: Identity.new().public}, {}):
        with pytest.raises(ParameterError):
            Server(active.parameters, identities=identities)


def test_keys_come_from_the_operating_system_unless_a_test_fixes_them() -> None:
    made, keys = cast(), Keys.new()
    assert made.client(VICTIM).advertise() != made.client(VICTIM).advertise()
    assert made.client(VICTIM, _keys=keys).advertise() == made.client(VICTIM, _keys=keys).advertise()


# --- a server


def refused_here(server: Server, sender: int, message: bytes, error: type[ProtocolError]) -> None:
    """Check that the server refuses the message, names the sender, and is as it was."""

    def snapshot() -> str:
        return repr(sorted(vars(server).items())) + repr(server._ballot.shares) + server._accumulator.tobytes().hex()

    before = snapshot()
    with pytest.raises(error) as caught:
        server.receive(sender, message)
    assert snapshot() == before
    assert caught.value.who == f"client {sender}"


STAGES = {stage: {"active": stage == "consistency"} for stage in METHODS}


@pytest.mark.parametrize("stage", STAGES)
def test_a_message_is_taken_once_from_its_sender_in_its_stage_and_session(stage: str) -> None:
    scene = at(stage, **STAGES[stage])
    message, earlier = (
        one.act(stage, 3, one.told[stage, 3]) for one in (scene, play(replace(scene.cast, run="earlier"), until=stage))
    )
    lies = [(4, message), (5, message), *((3, lie) for lie in (b"", message[:-1], message + b"\0", earlier))]
    lies += [(3, said) for (before, client), said in scene.said.items() if client == 3 and before != stage]
    for sender, lie in lies:
        refused_here(scene.server, sender, lie, MessageError)
    scene.server.receive(3, message)
    refused_here(scene.server, 3, message, MessageError)


def test_a_client_that_dropped_out_does_not_come_back() -> None:
    made = cast(count=6, threshold=3)
    scene = play(made, silent={"share": {3}}, until="mask")
    refused_here(scene.server, 3, b"", MessageError)
    assert scene.server.waiting == set(made.ids) - {3}


def test_keys_of_somebody_else_or_of_small_order_or_unsigned() -> None:
    made, active = cast(), cast(active=True)
    server, new = made.server(), AgreementKey.new().public
    server.receive(5, made.client(5).advertise())
    taken = server._adverts[5]
    for one in ((taken.mask, new), (new, taken.channel), (new, new), (bytes(32), new), (new, bytes([1]) + bytes(31))):
        refused_here(server, 3, Advertise(*one).to_bytes(made.parameters, 3), Tampering)
    unsigned, session = Advertise(AgreementKey.new().public, new), active.parameters.session
    for identity, purpose in ((active.identities[5], "advertise"), (active.identities[3], "masked")):
        lie = replace(unsigned, signature=identity.sign(purpose, session, unsigned.signed(3)))
        refused_here(active.server(), 3, lie.to_bytes(active.parameters, 3), Tampering)


@pytest.mark.parametrize("options", [{}, RING], ids=["complete", "ring"])
def test_shares_go_to_all_neighbours_and_to_them_alone(options: dict[str, Any]) -> None:
    scene = at("share", **options)
    parameters, near = scene.cast.parameters, scene.server._graph.neighbours(3)  # type: ignore[union-attr]
    shares = Shares.from_bytes(scene.act("share", 3, scene.told["share", 3]), parameters, 3)
    value, less = shares.sealed[near[0]], {me: one for me, one in shares.sealed.items() if me != near[0]}
    for sealed in (
        {},
        less,
        *({**one, me: value} for one in (shares.sealed, less) for me in {3, 4, *scene.cast.ids} - {*near}),
    ):
        refused_here(scene.server, 3, replace(shares, sealed=sealed).to_bytes(parameters, 3), MessageError)


def test_other_shares_than_the_list_calls_for() -> None:
    scene = play(cast(count=6, threshold=3), silent={"mask": {13}}, until="unmask")
    parameters = scene.cast.parameters
    right = Opened.from_bytes(scene.act("unmask", 3, scene.told["unmask", 3]), parameters, 3)
    share, none = right.seeds[5], dict[int, bytes]()
    lies = [(right.seeds, none), ({**right.seeds, 13: share}, none), ({**right.seeds, 3: share}, right.keys)]
    for lie in (*lies, (none, right.keys), (right.keys, right.seeds)):
        refused_here(scene.server, 3, Opened(*lie).to_bytes(parameters, 3), MessageError)


def spoiled(made: Cast, *liars: int) -> Callable[[str, int, bytes], bytes]:
    """Replaces all shares that the liars open by random bytes: equal lies might cancel at zero, where the secret is."""

    def say(stage: str, client: int, message: bytes) -> bytes:
        if stage != "unmask" or client not in liars:
            return message
        opened = Opened.from_bytes(message, made.parameters, client)
        seeds, keys = ({owner: os.urandom(32) + b"\0" for owner in shares} for shares in (opened.seeds, opened.keys))
        return Opened(seeds, keys).to_bytes(made.parameters, client)

    return say


def uncommitted(made: Cast) -> Callable[[str, int, bytes], bytes]:
    """The last client commits to another seed than it shares: no holder's share is wrong, and no secret fits the commitment."""

    def say(stage: str, client: int, message: bytes) -> bytes:
        if (stage, client) != ("share", made.ids[-1]):
            return message
        shares = Shares.from_bytes(message, made.parameters, client)
        return replace(shares, commitment=bytes(32)).to_bytes(made.parameters, client)

    return say


@pytest.mark.parametrize("liars", [(), (3, 5, 7, 9, 11)], ids=["the owner", "the holders"])
def test_a_secret_that_nothing_fits_leaves_no_sum_and_no_secret(liars: tuple[int, ...]) -> None:
    """An error keeps its frames' variables alive, and a log may print them: they must not contain an honest client's seed."""
    made = cast(count=7, threshold=3)
    server, clients = made.server(), made.clients()
    honest = [client for me, client in clients.items() if liars or me != made.ids[-1]]
    seeds = [client._keys.seed.reveal() for client in honest if client._keys is not None]
    with pytest.raises(Misdealt) as caught:
        play(made, say=spoiled(made, *liars) if liars else uncommitted(made), server=server, clients=clients)
    assert caught.value.who == f"client {caught.value.client}"
    assert liars or caught.value.client == made.ids[-1]
    assert server.stage == "aborted"
    assert not server._accumulator.any()
    held = contents((server, remains(caught.value)))
    assert [seed in held for seed in seeds] == [False] * len(honest)


@pytest.mark.parametrize(
    ("stage", "active", "word"),
    [
        *(("advertise", False, "take part"), ("share", False, "have dealt"), ("mask", False, "have sent")),
        *(
            ("unmask", False, "client 7 are left"),
            ("consistency", True, "signed"),
            ("unmask", True, "client 7 are left"),
        ),
    ],
)
def test_with_too_few_left_there_is_no_sum_and_nothing_of_one(stage: str, active: bool, word: str) -> None:
    made = cast(threshold=3, active=active)
    server = made.server()
    with pytest.raises(Aborted, match=word) as caught:
        play(made, silent={stage: made.ids[:2]}, server=server)
    assert caught.value.stage == stage
    for attempt in (server.total, server.close, lambda: server.receive(3, b"")):
        with pytest.raises(MessageError):
            attempt()


def test_a_finished_session_takes_and_changes_nothing() -> None:
    scene = play(cast())
    assert not scene.server.total().flags.writeable
    for attempt in (scene.server.close, lambda: scene.server.receive(3, scene.said["unmask", 3])):
        with pytest.raises(MessageError):
            attempt()
    assert scene.server.total().tolist() == scene.expected().tolist()


# --- the errors


KINDS = {ProtocolError: 1, ParameterError: 2, RangeError: 2, MessageError: 1, Tampering: 1, Aborted: 1, Spent: 1}


@every(
    ("parts", "expected"),
    [
        ({}, ""),
        ({"who": "client 4"}, " [client 4]"),
        ({"stage": "mask"}, " [stage mask]"),
        ({"who": "client 4", "stage": "mask"}, " [client 4, stage mask]"),
        ({"protected": "no vector was sent"}, ": no vector was sent"),
    ],
)
def test_an_error_says_what_is_known_and_nothing_else(parts: Mapping[str, str], expected: str) -> None:
    assert str(ProtocolError("3 are left", **parts)) == "3 are left" + expected


@every("kind", KINDS)
def test_every_error_keeps_its_parts_in_another_process_and_has_its_status(kind: type[ProtocolError]) -> None:
    error = kind("it went wrong", who="client 4", stage="share", protected="nothing was sent")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), vars(again), str(again)) == (kind, vars(error), str(error))
    assert kind.exit_code == KINDS[kind]
