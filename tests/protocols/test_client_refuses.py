"""A client refuses every false message of a server, and then sends no vector, no share and no second answer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.client import Client, Keys, steps
from protocols.errors import Aborted, MessageError, ParameterError, ProtocolError, RangeError, Spent, Tampering
from protocols.keys import AgreementKey, Identity
from protocols.parameters import Policy
from protocols.record import InMemory, OnDisk
from protocols.roster import SMALL_ORDER, chosen_by, near, point
from protocols.wire import Advertise, Confirm, Confirmations, Delivery, Masked, Opened, Roster, Shares, Survivors
from tests.protocols.sessions import METHODS, Cast, Play, cast, play

VICTIM = 3
RING = {"count": 9, "neighbours": 4, "threshold": 3}
CHOSEN = {"count": 14, "neighbours": 4, "threshold": 3, "active": True}


def at(stage: str, **options: Any) -> Play:
    """A session stopped before the clients act in this stage."""
    return play(cast(**options), until=stage)


def refused(scene: Play, stage: str, message: bytes, error: type[ProtocolError], match: str) -> ProtocolError:
    """Check that the victim refuses the message, and then even the true message. Returns the first error."""
    with pytest.raises(error, match=match) as caught:
        scene.act(stage, VICTIM, message)
    with pytest.raises(MessageError, match="out of turn: this client is finished"):
        scene.act(stage, VICTIM, scene.told[stage, VICTIM])
    client = scene.clients[VICTIM]
    assert (client._keys, client._held, client._inbound) == (None, {}, {})
    assert caught.value.who == f"client {VICTIM}" or caught.value.who == "the server"
    return caught.value


def roster_of(scene: Play) -> dict[int, Advertise]:
    return dict(Roster.from_bytes(scene.told["share", VICTIM], scene.cast.parameters).adverts)


def lied(scene: Play, adverts: Mapping[int, Advertise]) -> bytes:
    return Roster(adverts).to_bytes(scene.cast.parameters)


def fresh(owner: int, scene: Play) -> Advertise:
    """An advertisement with keys that the server made, in an active session signed by an unregistered identity."""
    advert = Advertise(AgreementKey.new().public, AgreementKey.new().public)
    if not scene.cast.active:
        return advert
    return replace(
        advert, signature=Identity.new().sign("advertise", scene.cast.parameters.session, advert.signed(owner))
    )


# --- the roster


def test_a_roster_without_the_client() -> None:
    scene = at("share")
    adverts = roster_of(scene)
    del adverts[VICTIM]
    refused(
        scene, "share", lied(scene, adverts), Tampering, "does not show this client with the keys that it advertised"
    )


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("field", ["channel", "mask"])
def test_a_roster_with_other_keys_for_the_client(field: str, active: bool) -> None:
    scene = at("share", active=active)
    adverts = roster_of(scene)
    adverts[VICTIM] = replace(adverts[VICTIM], **{field: AgreementKey.new().public})
    refused(scene, "share", lied(scene, adverts), Tampering, "keys that it advertised|lack its signature")


@pytest.mark.parametrize("field", ["channel", "mask"])
def test_a_roster_with_one_key_for_two_clients(field: str) -> None:
    for other in ("channel", "mask"):
        scene = at("share")
        adverts = roster_of(scene)
        adverts[5] = replace(adverts[5], **{field: getattr(adverts[7], other)})
        refused(scene, "share", lied(scene, adverts), Tampering, "with a key of another client")


def test_a_key_in_another_encoding_is_still_the_same_key() -> None:
    scene = at("share")
    adverts = roster_of(scene)
    again = bytearray(adverts[7].mask)
    again[31] |= 0x80  # X25519 ignores the highest bit
    adverts[5] = replace(adverts[5], mask=bytes(again))
    refused(scene, "share", lied(scene, adverts), Tampering, "with a key of another client")


def test_one_key_for_both_uses_of_a_client() -> None:
    scene = at("share")
    adverts = roster_of(scene)
    adverts[5] = replace(adverts[5], mask=adverts[5].channel)
    refused(scene, "share", lied(scene, adverts), Tampering, "one key twice")


SMALL = [value + extra for value in SMALL_ORDER for extra in (0, 2**255 - 19) if value + extra < 2**255]


@pytest.mark.parametrize("value", SMALL)
@pytest.mark.parametrize("field", ["channel", "mask"])
def test_a_key_of_small_order(field: str, value: int) -> None:
    scene = at("share")
    adverts = roster_of(scene)
    adverts[5] = replace(adverts[5], **{field: value.to_bytes(32, "little")})
    refused(scene, "share", lied(scene, adverts), Tampering, "small order")


def test_the_keys_of_small_order_are_those_with_which_all_keys_agree_on_zero() -> None:
    assert len(SMALL) == 7
    for value in SMALL:
        for top in (0, 2**255):
            with pytest.raises(Tampering, match="small order"):
                AgreementKey.new().agree((value + top).to_bytes(32, "little"))
    for value in (2, 9, 2**255 - 21):
        AgreementKey.new().agree(value.to_bytes(32, "little"))
        assert point(value.to_bytes(32, "little")) not in SMALL_ORDER


def test_a_roster_with_a_stranger() -> None:
    scene = at("share")
    refused(scene, "share", lied(scene, {**roster_of(scene), 4: fresh(4, scene)}), Tampering, "client 4 .* not invited")


@pytest.mark.parametrize(("options", "left"), [({"survivors": 4}, 3), ({"threshold": 4}, 4)])
def test_a_roster_too_short(options: dict[str, Any], left: int) -> None:
    scene = at("share", **options)
    adverts = dict(list(roster_of(scene).items())[:left])
    refused(scene, "share", lied(scene, adverts), Aborted, f"{left} clients take part, fewer than")


def test_keys_that_the_server_swapped_are_not_signed() -> None:
    scene = at("share", active=True)
    adverts = {**roster_of(scene), 5: fresh(5, scene)}
    refused(scene, "share", lied(scene, adverts), Tampering, "keys of client 5 lack its signature")


def test_keys_of_another_session_are_not_signed_for_this_one() -> None:
    scene = at("share", active=True)
    earlier = play(replace(scene.cast, run="earlier"), until="share")
    adverts = {**roster_of(scene), 5: roster_of(earlier)[5]}
    assert adverts[5] != roster_of(scene)[5]
    refused(scene, "share", lied(scene, adverts), Tampering, "keys of client 5 lack its signature")


def test_a_signature_for_another_purpose_or_another_owner_is_none() -> None:
    for purpose, owner in (("survivors", 5), ("advertise", 7)):
        scene = at("share", active=True)
        adverts = roster_of(scene)
        signature = scene.cast.identities[5].sign(purpose, scene.cast.parameters.session, adverts[5].signed(owner))
        adverts[5] = replace(adverts[5], signature=signature)
        refused(scene, "share", lied(scene, adverts), Tampering, "keys of client 5 lack its signature")


def test_a_roster_of_another_session() -> None:
    scene = at("share")
    other = play(replace(scene.cast, run="earlier"), until="share")
    refused(scene, "share", other.told["share", VICTIM], MessageError, "another session")


def test_a_roster_of_the_same_session_from_before_a_restart() -> None:
    scene, before = at("share"), at("share")
    refused(scene, "share", before.told["share", VICTIM], Tampering, "keys that it advertised")


# --- choices


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


def test_a_roster_is_of_those_it_chose_and_those_who_chose_it() -> None:
    scene, own, choosers = chosen_at("share")
    adverts = roster_of(scene)
    assert {VICTIM, *own, *choosers} <= adverts.keys() < set(scene.cast.ids)
    stranger = next(me for me in scene.cast.ids if me not in adverts)
    advert = Advertise.from_bytes(scene.said["advertise", stranger], scene.cast.parameters, stranger)
    message = lied(scene, {**adverts, stranger: advert})
    refused(
        scene, "share", message, Tampering, f"client {stranger} is on the roster, but neither it nor client 3 chose"
    )


def test_a_roster_with_another_choice_for_somebody() -> None:
    scene, own, _ = chosen_at("share")
    adverts = roster_of(scene)
    adverts[own[0]] = replace(adverts[own[0]], choice=bytes(32))
    refused(scene, "share", lied(scene, adverts), Tampering, f"keys of client {own[0]} lack its signature")


def test_a_roster_with_too_few_of_those_it_chose() -> None:
    scene, own, _ = chosen_at("share")
    adverts = {me: advert for me, advert in roster_of(scene).items() if me not in own[2:]}
    refused(
        scene, "share", lied(scene, adverts), Aborted, "2 of the chosen clients take part, fewer than the threshold"
    )


def test_shares_go_to_those_it_chose_whoever_chose_it() -> None:
    scene, own, _ = chosen_at("share")
    answer = Shares.from_bytes(scene.act("share", VICTIM, scene.told["share", VICTIM]), scene.cast.parameters, VICTIM)
    assert set(answer.sealed) == set(own)


def dealt_lie(scene: Play, dealt: Mapping[int, bytes], sealed: Mapping[int, bytes] | None = None) -> bytes:
    true = Delivery.from_bytes(scene.told["mask", VICTIM], scene.cast.parameters)
    return Delivery(true.sealed if sealed is None else sealed, dealt).to_bytes(scene.cast.parameters)


def test_lists_of_those_who_have_dealt() -> None:
    def check(match: str, change: Callable[[dict[int, bytes], tuple[int, ...], tuple[int, ...]], None]) -> None:
        scene, own, choosers = chosen_at("mask")
        dealt = dict(Delivery.from_bytes(scene.told["mask", VICTIM], scene.cast.parameters).dealt)
        change(dealt, own, choosers)
        refused(scene, "mask", dealt_lie(scene, dealt), (Tampering, Aborted), match)  # type: ignore[arg-type]

    check(
        "leaves this client out, or has another choice of neighbours",
        lambda dealt, own, _: dealt.update({VICTIM: bytes(32)}),
    )
    check(
        "leaves this client out, or has another choice of neighbours", lambda dealt, own, _: dealt.__delitem__(VICTIM)
    )
    check(
        "client 4 is listed as having dealt shares but was not invited", lambda dealt, *_: dealt.update({4: bytes(32)})
    )
    check(
        "is listed with another choice of neighbours than it adv",
        lambda dealt, own, _: dealt.update({own[0]: bytes(32)}),
    )
    check("not from exactly the clients listed as", lambda dealt, own, choosers: dealt.__delitem__(choosers[0]))


def test_those_who_have_dealt_are_enough() -> None:
    scene, own, _ = chosen_at("mask")
    true = Delivery.from_bytes(scene.told["mask", VICTIM], scene.cast.parameters)
    for gone, match in (
        (own[2:], "2 neighbours have dealt shares, fewer than 3"),
        (own[:2], "0 of the neighbours that client 3 chose are left, fewer than 1"),
    ):
        again = copy.copy(scene.clients[VICTIM])
        parts = [{one: value for one, value in part.items() if one not in gone} for part in (true.sealed, true.dealt)]
        with pytest.raises(Aborted, match=match):
            again.mask(Delivery(*parts).to_bytes(scene.cast.parameters), scene.vectors[VICTIM])
    few = {me: seed for me, seed in true.dealt.items() if me in {VICTIM, *own}}
    sealed = {me: part for me, part in true.sealed.items() if me in few}
    refused(scene, "mask", dealt_lie(scene, few, sealed), Aborted, "5 clients have dealt shares, and no sum of fewer")


def test_who_chose_it_and_is_hidden_is_missed_when_choices_are_read() -> None:
    scene, _, choosers = chosen_at("share")
    adverts = {me: advert for me, advert in roster_of(scene).items() if me != choosers[0]}
    lie = lied(scene, adverts)

    def tell(stage: str, client: int, message: bytes) -> bytes:
        return lie if (stage, client) == ("share", VICTIM) else message

    later = play(scene.cast, tell=tell, until="mask", after=scene)
    match = f"client {choosers[0]} is a neighbour of this client, and its keys were not on the roster"
    refused(later, "mask", later.told["mask", VICTIM], Tampering, match)


# --- deliveries


def delivered(scene: Play) -> dict[int, bytes]:
    return dict(Delivery.from_bytes(scene.told["mask", VICTIM], scene.cast.parameters).sealed)


def sent(scene: Play, sealed: Mapping[int, bytes]) -> bytes:
    return Delivery(sealed).to_bytes(scene.cast.parameters)


def test_a_ciphertext_that_was_changed() -> None:
    for place in (0, 40, 81):
        scene = at("mask")
        sealed = delivered(scene)
        changed = bytearray(sealed[5])
        changed[place] ^= 1
        sealed[5] = bytes(changed)
        refused(scene, "mask", sent(scene, sealed), Tampering, "client 5 sealed for client 3 does not open")


def between(scene: Play, sender: int, receiver: int) -> bytes:
    """The shares that `sender` sealed for `receiver`."""
    return Delivery.from_bytes(scene.told["mask", receiver], scene.cast.parameters).sealed[sender]


MOVED: dict[str, Callable[[Play], bytes]] = {
    "for another receiver": lambda scene: between(scene, 5, 7),
    "of another sender": lambda scene: between(scene, 7, VICTIM),
    "its own": lambda scene: between(scene, VICTIM, 5),
    "of another session": lambda scene: between(play(replace(scene.cast, run="earlier"), until="mask"), 5, VICTIM),
}


@pytest.mark.parametrize("lie", MOVED)
def test_a_ciphertext_that_was_moved(lie: str) -> None:
    scene = at("mask")
    message = sent(scene, {**delivered(scene), 5: MOVED[lie](scene)})
    refused(scene, "mask", message, Tampering, "client 5 sealed for client 3 does not open")


def test_a_delivery_from_itself_or_from_a_stranger() -> None:
    for owner in (VICTIM, 4):
        scene = at("mask")
        message = sent(scene, {**delivered(scene), owner: delivered(scene)[5]})
        refused(scene, "mask", message, Tampering, f"of client {owner}, which is no neighbour")


def test_a_delivery_from_a_member_that_is_no_neighbour() -> None:
    scene = at("mask", **RING)
    beside = scene.clients[VICTIM]._graph.holders(VICTIM)
    far = next(me for me in scene.cast.ids if me != VICTIM and me not in beside)
    message = sent(scene, {**delivered(scene), far: bytes(82)})
    refused(scene, "mask", message, Tampering, f"of client {far}, which is no neighbour")


@pytest.mark.parametrize("left", [0, 2])
def test_a_victim_whose_neighbourhood_is_said_to_have_dropped(left: int) -> None:
    scene = at("mask", threshold=3)
    some = dict(list(delivered(scene).items())[:left])
    error = refused(scene, "mask", sent(scene, some), Aborted, f"{left} neighbours have dealt shares, fewer than 3")
    assert error.protected == "this client's vector was not sent"


# --- vectors


@pytest.mark.parametrize(
    "vector",
    [np.zeros(5, np.uint32), np.zeros(4, np.uint64), np.zeros(4), np.zeros((1, 4), np.uint32), [0, 0, 0, 0]],
    ids=["longer", "wider", "real", "two axes", "list"],
)
def test_a_vector_that_is_none_of_the_session(vector: Any) -> None:
    scene = at("mask")
    with pytest.raises(RangeError, match="not an array of 4 words of type uint32"):
        scene.clients[VICTIM].mask(scene.told["mask", VICTIM], vector)


@pytest.mark.parametrize("value", [101, -101, -(2**31)])
def test_a_coordinate_beyond_the_bound(value: int) -> None:
    scene = at("mask", bound=100)
    vector = np.array([0, 100, -100, value]).astype(np.int32).view(np.uint32)
    with pytest.raises(RangeError, match="beyond the session's bound of 100"):
        scene.clients[VICTIM].mask(scene.told["mask", VICTIM], vector)


# --- survivors


def listing(scene: Play, survivors: Collection[int]) -> bytes:
    """A list of these survivors; in an active session with the signatures of the clients near the victim."""
    around = near(VICTIM, scene.clients[VICTIM]._graph, survivors) if scene.cast.active else ()
    statements = {me: scene.server._statements[me] for me in around}
    return Survivors(tuple(sorted(survivors)), statements).to_bytes(scene.cast.parameters)


def test_a_survivor_that_masked_by_another_list_of_those_who_dealt() -> None:
    for lie, match in (
        ("another list", "client 5 is listed as a survivor but masked under another list of dealers"),
        ("another signer", "client 5 is listed as a survivor but masked under another list"),
        ("nothing", "not those of exactly the survivors near this client"),
    ):
        scene = at("consistency", active=True)
        signatures, key = scene.server._statements, scene.cast.identities[5]
        body = Masked.signed(5, bytes(32))
        forged = key.sign("masked", scene.cast.parameters.session, body) if lie == "another list" else signatures[7]
        statements = {me: signatures[me] for me in scene.cast.ids if me != VICTIM} | {5: forged}
        if lie == "nothing":
            del statements[5]
        message = Survivors(scene.cast.ids, statements).to_bytes(scene.cast.parameters)
        refused(scene, "consistency", message, Tampering, match)


def test_survivors_among_whom_somebody_is_left_with_too_few_it_chose_to_mask_with() -> None:
    """The list omits two of the three first choices of the victim, or of an owner whose shares the victim holds."""
    for whose in ("its own", "an owner's"):
        scene, _, choosers = chosen_at("consistency", neighbours=6, threshold=4, partners=2)
        one = VICTIM if whose == "its own" else choosers[0]
        gone = [me for me in scene.clients[VICTIM]._graph.firsts(one) if me != VICTIM][:2]  # type: ignore[union-attr]
        message = listing(scene, set(scene.cast.ids) - set(gone))
        # The error names the first client found: others may have chosen both as well.
        refused(scene, "consistency", message, Aborted, r"1 of the neighbours that client \d+ chose are left")


LISTS: dict[str, tuple[Callable[[Cast], set[int]], type[ProtocolError], str]] = {
    "without itself": (lambda made: set(made.ids) - {VICTIM}, Tampering, "leaves out this client"),
    "with a stranger": (
        lambda made: {*made.ids, 4},
        Tampering,
        "client 4 is listed as a survivor but (is not on the roster|has not dealt its shares)",
    ),
    "fewer than allowed": (lambda made: {3, 5, 7, 9}, Aborted, "4 survivors, and no sum of fewer than 5"),
    "nobody else": (lambda made: {VICTIM}, Aborted, "1 survivors"),
}


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("lie", LISTS)
def test_a_list_of_survivors(lie: str, active: bool) -> None:
    made, error, match = LISTS[lie]
    stage = "consistency" if active else "unmask"
    scene = at(stage, count=6, survivors=5, threshold=4, active=active)
    sessions = scene.clients[VICTIM]._sessions
    caught = refused(scene, stage, listing(scene, made(scene.cast)), error, match)
    assert caught.protected == "this client's vector stays under its masks, since it has opened no share"
    sessions.claim(scene.cast.parameters.session)  # succeeds, since the refused list claimed nothing


def test_a_list_with_too_few_holders_of_its_shares() -> None:
    scene = at("unmask", count=6, survivors=2, threshold=4)
    refused(
        scene, "unmask", listing(scene, {3, 5, 7, 9}), Aborted, "3 holders of this client's shares survive, fewer than"
    )


def test_a_survivor_that_never_dealt_its_shares() -> None:
    made = cast(count=6, threshold=3)
    scene = play(made, silent={"share": {5}}, until="unmask")
    refused(scene, "unmask", listing(scene, made.ids), Tampering, "client 5 is listed as a survivor but never dealt")


def test_survivors_that_fall_into_two_parts() -> None:
    """The list omits two windows on opposite sides of the ring, so that each half would have its own sum."""
    scene = at("unmask", count=16, neighbours=4, threshold=1, survivors=2)
    order = scene.clients[VICTIM]._graph.order
    place = order.index(VICTIM)
    turned = order[place:] + order[:place]
    gone = {turned[3], turned[4], turned[10], turned[11]}
    refused(scene, "unmask", listing(scene, set(order) - gone), Aborted, "could be cut into separate sums")


def test_survivors_hang_together_only_over_more_than_the_window() -> None:
    options = {"count": 16, "neighbours": 6, "threshold": 2, "survivors": 3, "corrupt": 1}
    for window, gone in ((1, 1), (1, 2)):
        scene = at("unmask", **options, window=window)
        order = scene.clients[VICTIM]._graph.order
        place = order.index(VICTIM)
        turned = order[place:] + order[:place]
        message = listing(scene, set(order) - set(turned[5 : 5 + gone]))
        if gone == 1:
            scene.act("unmask", VICTIM, message)
        else:
            refused(scene, "unmask", message, Aborted, "with 1 corrupt in a window of the ring")


@pytest.mark.parametrize("lie", ["repeated", "descending", "too long"])
def test_a_list_that_is_not_in_order(lie: str) -> None:
    scene = at("unmask")
    good = listing(scene, scene.cast.ids)
    entries = [good[place : place + 4] for place in range(52, len(good), 4)]
    if lie == "descending":
        entries.reverse()
    elif lie == "repeated":
        entries[1] = entries[0]
    refused(
        scene,
        "unmask",
        good[:52] + b"".join(entries) + (b"\0" if lie == "too long" else b""),
        MessageError,
        "survivors",
    )


# --- consistency


def signed(
    scene: Play, survivors: Collection[int], signer: int, *, purpose: str = "survivors", dealt: bytes = b""
) -> bytes:
    digest = Survivors(tuple(sorted(survivors))).digest
    body = Confirm.signed(signer, dealt or scene.clients[VICTIM]._dealt, digest)
    return scene.cast.identities[signer].sign(purpose, scene.cast.parameters.session, body)


def confirmations(scene: Play) -> dict[int, bytes]:
    return dict(Confirmations.from_bytes(scene.told["unmask", VICTIM], scene.cast.parameters).signatures)


def told(scene: Play, signatures: Mapping[int, bytes]) -> bytes:
    return Confirmations(signatures).to_bytes(scene.cast.parameters)


def test_two_clients_that_were_given_different_lists() -> None:
    """In the victim's list client 13 dropped out, in the others' it did not, so the others signed another list."""
    made = cast(count=6, threshold=4, active=True)

    def tell(stage: str, client: int, message: bytes) -> bytes:
        if (stage, client) == ("consistency", VICTIM):
            few = {me: server._statements[me] for me in made.ids[:-1] if me != VICTIM}
            return Survivors(made.ids[:-1], few).to_bytes(made.parameters)
        return message

    server = made.server()
    with pytest.raises(Tampering, match="signed another list than that of the survivors"):
        play(made, tell=tell, server=server)  # an honest server notices
    scene = play(made, until="consistency")
    scene.act("consistency", VICTIM, listing(scene, made.ids[:-1]))
    others = {me: signed(scene, made.ids, me) for me in made.ids if me != VICTIM}
    with pytest.raises(Tampering, match="client 5 has not signed the list of survivors that was shown here"):
        scene.act("unmask", VICTIM, told(scene, others))


@pytest.mark.parametrize("lie", ["another purpose", "others who dealt", "another signer", "another session"])
def test_a_signature_over_the_list(lie: str) -> None:
    scene = at("unmask", count=6, threshold=4, active=True)
    signatures = confirmations(scene)
    ids = scene.cast.ids
    other = play(replace(scene.cast, run="earlier"), until="unmask")
    signatures[5] = {
        "another purpose": signed(scene, ids, 5, purpose="masked"),
        "others who dealt": signed(scene, ids, 5, dealt=bytes(32)),
        "another signer": signatures[7],
        "another session": confirmations(other)[5],
    }[lie]
    assert signatures[7] == signed(scene, ids, 7)  # `signed` makes true signatures, so the lie is the only fault
    refused(scene, "unmask", told(scene, signatures), Tampering, "client 5 has not signed the list")


def test_too_few_signatures_even_with_its_own() -> None:
    scene = at("unmask", count=6, threshold=4, active=True)
    signatures = confirmations(scene)
    some = {me: signatures[me] for me in (VICTIM, 5, 7, 9)}
    refused(
        scene, "unmask", told(scene, some), Aborted, "signed by 3 holders .* and 4 clients in all, fewer than 4 and 5"
    )


def test_where_clients_choose_all_are_asked_and_not_the_holders_alone() -> None:
    scene = at("unmask", **CHOSEN)
    signatures = confirmations(scene)
    held = {me: signatures[me] for me in scene.clients[VICTIM]._graph.holders(VICTIM)}
    refused(scene, "unmask", told(scene, held), Aborted, "4 holders .* and 5 clients in all, fewer than 3 and 8")


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
    assert set(play(made, clients=again).errors) == {VICTIM}


def test_the_signature_of_one_that_is_not_on_the_list() -> None:
    made = cast(count=6, threshold=3, active=True)
    scene = play(made, silent={"mask": {13}}, until="unmask")
    more = {**confirmations(scene), 13: signed(scene, made.ids[:-1], 13)}
    refused(
        scene, "unmask", told(scene, more), Tampering, "client 13 signed a list of survivors that does not contain it"
    )


# --- once


@pytest.mark.parametrize("active", [False, True])
def test_the_list_is_asked_for_twice(active: bool) -> None:
    scene = at("unmask", active=active)
    message = scene.told["unmask", VICTIM]
    scene.act("unmask", VICTIM, message)
    with pytest.raises(MessageError, match="out of turn"):
        scene.act("unmask", VICTIM, message)


def test_a_copy_of_a_client_does_not_answer_again() -> None:
    scene = at("unmask")
    twin = copy.copy(scene.clients[VICTIM])
    scene.act("unmask", VICTIM, scene.told["unmask", VICTIM])
    with pytest.raises(Spent):
        twin.unmask(listing(scene, scene.cast.ids[:-1]))


def test_after_a_restart_a_session_is_spent(tmp_path: Path) -> None:
    made = cast(threshold=3)
    path = tmp_path / "sessions"
    clients = {me: made.client(me, sessions=OnDisk(path) if me == VICTIM else None) for me in made.ids}
    assert not play(made, clients=clients).errors
    again = {me: made.client(me, sessions=OnDisk(path) if me == VICTIM else None) for me in made.ids}
    scene = play(made, clients=again)
    assert isinstance(scene.errors[VICTIM], Spent)
    assert set(scene.errors) == {VICTIM}


def test_nothing_is_opened_if_the_claim_cannot_be_recorded(tmp_path: Path) -> None:
    made = cast(threshold=3)
    clients = {me: made.client(me, sessions=OnDisk(tmp_path / "no" / "folder")) for me in made.ids[:1]}
    scene = play(made, clients={**made.clients(), **clients})
    assert "the record of sessions" in str(scene.errors[VICTIM])
    assert ("unmask", VICTIM) not in scene.said


def test_the_claim_comes_before_anything_is_opened() -> None:
    opened: list[str] = []

    class Watching(InMemory):
        def claim(self, session: bytes) -> None:
            opened.append(repr(client._held))
            super().claim(session)

    scene = at("unmask")
    client = scene.clients[VICTIM]
    client._sessions = Watching()
    message = Opened.from_bytes(
        scene.act("unmask", VICTIM, scene.told["unmask", VICTIM]), scene.cast.parameters, VICTIM
    )
    assert len(opened) == 1
    assert len(message.seeds) == 4
    assert not message.keys


# --- turns


@pytest.mark.parametrize(
    "options", [{}, {"active": True}, {**RING, "active": True}], ids=["passive", "active", "chosen"]
)
def test_a_step_out_of_turn_finishes_the_client(options: dict[str, Any]) -> None:
    made = cast(**options)
    names = {stage: method for stage, method in METHODS.items() if method in steps(made.parameters)}
    for stage in names:
        for other, method in METHODS.items():
            if other == stage:
                continue
            scene = play(made, until=stage)
            message = scene.told.get((stage, VICTIM), b"")
            arguments = {"advertise": (), "mask": (message, scene.vectors[VICTIM])}.get(method, (message,))
            with pytest.raises(MessageError, match=rf"{method}\(\) is out of turn: {names[stage]}\(\) comes next"):
                getattr(scene.clients[VICTIM], method)(*arguments)
            with pytest.raises(MessageError, match="finished"):
                scene.act(stage, VICTIM, message)


# --- a client's requirements on the session


def test_parameters_weaker_than_the_policy() -> None:
    made = cast(count=6, threshold=4, survivors=4)
    policy = made.policy
    for weaker in ({"threshold": 3}, {"survivors": 3}):
        with pytest.raises(ParameterError, match="policy needs at least"):
            Client(replace(made.parameters, **weaker), VICTIM, policy)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="needs an active session"):
        Client(made.parameters, VICTIM, replace(policy, active=True))
    with pytest.raises(ParameterError, match=r"raise threshold|raise survivors"):
        Client(made.parameters, VICTIM, replace(policy, corrupt=4))


def test_a_session_without_it_is_not_joined() -> None:
    made = cast()
    with pytest.raises(ParameterError, match="client 4 is not among the 5 that the session invites"):
        Client(made.parameters, 4, made.policy)


def test_an_active_session_takes_the_registered_identity() -> None:
    made = cast(active=True)
    for identity in (None, Identity.new(), made.identities[5]):
        with pytest.raises(ParameterError, match="no identity, or not the one that is registered"):
            Client(made.parameters, VICTIM, made.policy, identity=identity)
    others = {**made.public, 5: Identity.new().public}
    with pytest.raises(ParameterError, match="identities differ from those registered at this client"):
        Client(made.parameters, VICTIM, replace(made.policy, identities=others), identity=made.identities[VICTIM])
    assert Policy(threshold=3, survivors=2, active=True).identities == {}


def test_keys_come_from_the_operating_system_unless_a_test_fixes_them() -> None:
    made = cast()
    assert made.client(VICTIM).advertise() != made.client(VICTIM).advertise()
    keys = Keys.new()
    assert made.client(VICTIM, _keys=keys).advertise() == made.client(VICTIM, _keys=keys).advertise()
