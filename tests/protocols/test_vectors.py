"""Golden sessions: verified by code that shares nothing with the package, replayed by the package, and tampered with.

`python -m tests.protocols.test_vectors` rewrites `tests/vectors/secure_aggregation.json`: fixed keys, every message, and
the outcome of a replay for one changed byte of each field; run it only when the protocol's version changes.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from protocols.client import Client, Keys
from protocols.errors import ProtocolError
from protocols.keys import AgreementKey, Identity, Secret
from protocols.parameters import stages
from protocols.server import Server
from tests.cells import chosen
from tests.protocols import slow
from tests.protocols.sessions import Cast, Play, play

PATH = Path(__file__).resolve().parents[1] / "vectors" / "secure_aggregation.json"
Session = dict[str, Any]

CASTS: dict[str, dict[str, Any]] = {
    "passive, complete, 32 bits": {"count": 4, "threshold": 2, "bound": 1000, "length": 5},
    "active, chosen, 64 bits": {
        **{"count": 6, "neighbours": 4, "threshold": 3, "survivors": 5},
        **{"active": True, "bits": 64, "bound": 10**6},
    },
}


def cast_of(session: Session) -> Cast:
    made = Cast(**session["cast"])
    if not made.active:
        return made
    secrets = {me: bytes.fromhex(session["keys"][str(me)]["identity"]) for me in made.ids}
    return replace(made, identities={me: Identity.from_secret(Secret(secret)) for me, secret in secrets.items()})


def clients_of(session: Session, made: Cast) -> dict[int, Client]:
    """The clients with the keys of the recording."""
    clients = {}
    for me in made.ids:
        channel, mask, seed, choice = (
            Secret(bytes.fromhex(session["keys"][str(me)][name])) for name in ("channel", "mask", "seed", "choice")
        )
        keys = Keys(AgreementKey.from_secret(channel), AgreementKey.from_secret(mask), seed, choice)
        clients[me] = made.client(me, _keys=keys)
    return clients


class Replay:
    """A replay of a session. The shares, which are random, are copied from the recording; everything else is computed again.

    `change` alters one byte of one message. It names the direction ("said" by a client, "told" by the server), the stage, the
    client, the place of the byte (`at`) and the value to combine it with by exclusive or (`xor`). `outcome` names the first
    refusal.
    """

    def __init__(self, session: Session, change: Mapping[str, Any] | None = None) -> None:
        made = cast_of(session)
        kind, shares = f"i{made.bits // 8}", session.get("said", {})
        vectors = {me: np.array(session["vectors"][str(me)], kind).view(kind.replace("i", "u")) for me in made.ids}

        def told(stage: str, client: int, message: bytes) -> bytes:
            stop()
            return changed("told", stage, client, message)

        def stop() -> None:
            if scene.errors:
                raise ProtocolError("the first refusal ends the replay")

        def changed(direction: str, stage: str, client: int, message: bytes) -> bytes:
            if change is None or (change["direction"], change["stage"], change["client"]) != (direction, stage, client):
                return message
            at = change["at"]
            return message[:at] + bytes([message[at] ^ change["xor"]]) + message[at + 1 :]

        def said(stage: str, client: int, answer: bytes) -> bytes:
            stop()
            recorded = shares.get(f"share {client}") if stage == "share" else None
            return changed("said", stage, client, bytes.fromhex(recorded) if recorded else answer)

        scene = Play(made, made.server(), clients_of(session, made), vectors)
        self.server: Server = scene.server
        try:
            play(made, after=scene, silent=session["silent"], tell=told, say=said)
            suspects = sorted(scene.server.suspects)
            self.outcome = f"suspects: {suspects}" if suspects else "done"
        except ProtocolError as error:
            self.outcome = f"server: {type(error).__name__}"
        for client, refusal in list(scene.errors.items())[:1]:
            self.outcome = f"client {client}: {type(refusal).__name__}"
        self.said, self.told = (
            {f"{stage} {me}": message.hex() for (stage, me), message in messages.items() if (stage, me) in scene.said}
            for messages in (scene.said, scene.told)
        )


HEADER = [
    ("magic", 4),
    ("version", 1),
    ("kind", 1),
    ("zero", 2),
    ("session", 32),
    ("sender", 4),
    ("zero at the end", 4),
]


def fields(direction: str, stage: str, made: Cast, message: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, place and size of every field; of a table, its count and first entry. Written by hand from the message format."""
    p = made.parameters
    keys = [
        ("channel", 32),
        ("mask", 32),
        *([("choice", 32)] if p.chosen else []),
        *([("signature", 64)] if p.active else []),
    ]
    sealed = [("count", 4), ("id", 4), ("ciphertext", 82)]
    signatures = [("count", 4), ("id", 4), ("signature", 64)]
    survivors = [("count", 4), ("id", 4)]
    told = {
        "share": [("count", 4), ("id", 4), *keys],
        "mask": sealed,
        "consistency": survivors,
        "unmask": signatures if p.active else survivors,
    }
    said = {
        "advertise": keys,
        "share": [("commitment", 32), *sealed],
        "mask": [("words", p.bits // 8)],
        "consistency": [("signature", 64)],
        "unmask": [("count of seeds", 4), ("owner of a seed", 4), ("share of a seed", 33)],
    }
    at = 0
    for name, size in HEADER + (told if direction == "told" else said)[stage]:
        yield name, at, size
        at += size
    if p.active:
        yield from second(direction, stage, made, message)
    if (direction, stage) == ("said", "unmask"):
        at = 52 + struct.unpack_from("<I", message, 48)[0] * 37
        yield "count of keys", at, 4
        if len(message) > at + 4:  # a neighbour dropped out: a share of its mask key follows
            yield from (("owner of a key", at + 4, 4), ("share of a key", at + 8, 33))


def second(direction: str, stage: str, made: Cast, message: bytes) -> Iterator[tuple[str, int, int]]:
    """The fields of an active session's messages after the first table, or after the words."""
    p = made.parameters
    if (direction, stage) == ("said", "mask"):
        yield "signature", len(message) - 64, 64
    if direction == "told" and stage in ("mask", "consistency"):
        width, entry, name = (86, 32, "choice") if stage == "mask" else (4, 64, "signature")
        at = 52 + struct.unpack_from("<I", message, 48)[0] * width
        yield from (("second count", at, 4), ("second id", at + 4, 4))
        if stage == "consistency" or p.chosen:
            yield name, at + 8, entry


def changes(session: Session) -> Iterator[dict[str, Any]]:
    """One changed bit in every field of the last message of every stage, in both directions."""
    made = cast_of(session)
    for direction in ("said", "told"):
        for stage in stages(made.parameters):
            names = [name for name in session[direction] if name.startswith(f"{stage} ") and session[direction][name]]
            for name in names[-1:]:
                message, client = bytes.fromhex(session[direction][name]), int(name.split()[1])
                for field, at, size in fields(direction, stage, made, message):
                    place = at if "share" in field or (size <= 4 and field != "words") else at + size - 1
                    yield {
                        **{"direction": direction, "stage": stage, "client": client, "field": field},
                        **{"at": place, "xor": 0x40 if field == "words" else 1},
                    }


def record(name: str) -> Session:
    made = Cast(**CASTS[name])
    names = ("channel", "mask", "seed", "choice", "identity")
    session: Session = {
        "name": name,
        "cast": CASTS[name],
        "session": "",
        "silent": {"mask": [made.ids[-2]]},
        "keys": {me: {key: Secret.new().reveal().hex() for key in names} for me in map(str, made.ids)},
        "vectors": {str(me): [(-1) ** at * (me * 10 + at) for at in range(made.length)] for me in made.ids},
    }
    session["session"] = cast_of(session).parameters.session.hex()
    replay = Replay(session)
    if replay.outcome != "done":
        raise RuntimeError(replay.outcome)
    session.update(said=replay.said, told=replay.told, survivors=list(replay.server.survivors))
    session["total"] = [int(word) for word in replay.server.total()]
    session["tampered"] = [{**change, "refused": Replay(session, change).outcome} for change in changes(session)]
    return session


RECORDED: list[Session] = json.loads(PATH.read_text(encoding="utf-8"))
every_session = pytest.mark.parametrize("session", RECORDED, ids=lambda session: session["name"])


class Reading:
    """One recorded session, decoded by the slow verifier."""

    def __init__(self, recorded: Session) -> None:
        self.recorded, self.cast = recorded, recorded["cast"]
        self.active, self.threshold = bool(self.cast.get("active")), self.cast["threshold"]
        self.bits, self.length = self.cast.get("bits", 32), self.cast.get("length", 4)
        self.ids = [int(me) for me in recorded["keys"]]
        self.dropped = recorded["silent"]["mask"]
        self.survivors = recorded["survivors"]
        self.session = bytes.fromhex(recorded["session"])
        self.chooses = self.active and self.cast["neighbours"] < len(self.ids) - 1

    def key(self, me: int, name: str) -> bytes:
        return bytes.fromhex(self.recorded["keys"][str(me)][name])

    def said(self, stage: str, me: int) -> bytes:
        return bytes.fromhex(self.recorded["said"][f"{stage} {me}"])[48:]

    def told(self, stage: str, me: int) -> bytes:
        return bytes.fromhex(self.recorded["told"][f"{stage} {me}"])

    @cached_property
    def chosen(self) -> dict[int, list[int]]:
        """The choices of each client, in order; all other clients where clients do not choose."""
        if not self.chooses:
            return {me: [other for other in self.ids if other != me] for me in self.ids}
        return {me: slow.choices(self.key(me, "choice"), self.ids, me, self.cast["neighbours"]) for me in self.ids}

    @cached_property
    def partners(self) -> dict[int, list[int]]:
        if not self.chooses:
            return self.chosen
        first = {me: own[: self.cast["neighbours"] // 2] for me, own in self.chosen.items()}
        return {me: sorted({*first[me], *(other for other in self.ids if me in first[other])}) for me in self.ids}

    @cached_property
    def dealt(self) -> bytes:
        """The digest of the list of the clients that dealt shares: here all clients, each with its choice."""
        entries = (struct.pack("<I", me) + (self.key(me, "choice") if self.chooses else b"") for me in self.ids)
        return hashlib.sha256(b"".join(entries)).digest()

    @cached_property
    def shares(self) -> dict[int, dict[int, bytes]]:
        """By owner and holder: the shares of the owner's seed and mask key, concatenated."""
        return {me: {other: self.unsealed(me, other) for other in self.chosen[me]} for me in self.ids}

    def unsealed(self, sender: int, receiver: int) -> bytes:
        publics = [slow.public(self.key(one, "channel")) for one in (sender, receiver)]
        agreed = slow.x25519(self.key(receiver, "channel"), publics[0])
        channel = slow.hkdf(agreed, self.session, "share", sender, receiver, publics=b"".join(publics))
        sealed, _ = slow.table(self.said("share", sender)[32:], 82)
        return slow.unsealed(channel, sealed[receiver], self.session + struct.pack("<II", sender, receiver))

    def masked(self, me: int) -> list[int]:
        """The masked vector y_i, from all clients' keys."""
        total = list(self.recorded["vectors"][str(me)])
        masks = [(1, self.key(me, "seed"))]
        for other in self.partners[me]:
            agreed = slow.x25519(self.key(me, "mask"), slow.public(self.key(other, "mask")))
            pair = sorted((me, other))
            publics = b"".join(slow.public(self.key(one, "mask")) for one in pair)
            secret = slow.hkdf(agreed, self.session, "mask", *pair, publics=publics)
            masks.append((1 if other > me else -1, secret))
        for sign, secret in masks:
            total = [x + sign * m for x, m in zip(total, slow.mask(secret, self.length, self.bits), strict=True)]
        return [x % 2**self.bits for x in total]


def readings() -> list[Any]:
    return [pytest.param(Reading(recorded), id=recorded["name"]) for recorded in RECORDED]


every_reading = pytest.mark.parametrize("read", readings())


def test_the_slow_primitives_are_the_standard_ones() -> None:
    """X25519 against another implementation; RFC 8439, appendix A.1, first vector, and section 2.5.2."""
    for secret in (bytes(range(32)), bytes([255] * 32), hashlib.sha256(b"any").digest()):
        assert slow.public(secret) == X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
    assert slow.chacha_block(bytes(32), 0, bytes(12))[:8].hex() == "76b8e0ada0f13d90"
    key = bytes.fromhex("85d6be7857556d337f4452fe42d506a80103808afb0db2fd4abff6af4149f51b")
    assert slow.poly1305(key, b"Cryptographic Forum Research Group").hex() == "a8061dc1305136c6c22b8baf0c0127a9"


@every_reading
def test_the_session_and_every_header_are_as_described(read: Reading) -> None:
    identities = {me: slow_identity(read, me) for me in read.ids} if read.active else {}
    assert slow.session_number(read.cast, read.ids, identities) == read.session
    kinds = {"advertise": 1, "share": 3, "mask": 4, "consistency": 5, "unmask": 6}
    for name, message in read.recorded["said"].items():
        stage, me = name.split()
        header = b"SFSA" + bytes([3, kinds[stage], 0, 0]) + read.session + struct.pack("<II", int(me), 0)
        assert bytes.fromhex(message)[:48] == header


def slow_identity(read: Reading, me: int) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(read.key(me, "identity")).public_key().public_bytes_raw()


@every_reading
def test_advertisements_are_public_keys_choices_and_signatures(read: Reading) -> None:
    adverts = {}
    for me in read.ids:
        expected = slow.public(read.key(me, "channel")) + slow.public(read.key(me, "mask"))
        if read.chooses:
            expected += read.key(me, "choice")
        said = adverts[me] = read.said("advertise", me)
        assert said[: len(expected)] == expected
        if read.active:
            body = struct.pack("<I", me) + expected
            assert slow.signed(read.key(me, "identity"), said[len(expected) :], "advertise", read.session, body)
    for me in read.ids:
        shown = {me, *read.chosen[me], *(other for other in read.ids if me in read.chosen[other])}
        roster = slow.table(read.told("share", me)[48:], len(adverts[me]))
        assert roster == ({one: advert for one, advert in adverts.items() if one in shown}, b"")


@every_reading
def test_deliveries_are_the_shares_dealt_to_a_client_and_everybodys_choice(read: Reading) -> None:
    for me in read.survivors:
        sealed, rest = slow.table(read.told("mask", me)[48:], 82)
        owners = [other for other in read.ids if me in read.chosen[other]]
        assert sealed == {other: slow.table(read.said("share", other)[32:], 82)[0][me] for other in owners}
        if not read.active:
            assert rest == b""
            continue
        choices = {other: read.key(other, "choice") if read.chooses else b"" for other in read.ids}
        assert slow.table(rest, 32 if read.chooses else 0) == (choices, b"")


@every_reading
def test_every_set_of_shares_rebuilds_the_secrets(read: Reading) -> None:
    for me in read.ids:
        commitment = slow.framed("seed", read.session + struct.pack("<I", me), read.key(me, "seed"))
        assert read.said("share", me)[:32] == hashlib.sha256(commitment).digest()
        seeds = {holder: both[:33] for holder, both in read.shares[me].items()}
        keys = {holder: both[33:] for holder, both in read.shares[me].items()}
        assert slow.rebuilt(seeds, read.threshold) == {read.key(me, "seed") + b"\0"}
        mask = bytearray(read.key(me, "mask"))
        mask[0], mask[31] = mask[0] & 248, mask[31] & 127 | 64  # the five bits that X25519 sets
        assert slow.rebuilt(keys, read.threshold) == {bytes(mask) + b"\0"}
        assert slow.rebuilt(seeds, read.threshold - 1).isdisjoint({read.key(me, "seed") + b"\0"})


@every_reading
def test_masked_vectors_are_the_vectors_and_their_masks(read: Reading) -> None:
    assert set(read.survivors) == set(read.ids) - set(read.dropped)
    for me in read.survivors:
        said, size = read.said("mask", me), read.length * read.bits // 8
        words = struct.unpack(f"<{read.length}{'I' if read.bits == 32 else 'Q'}", said[:size])
        assert list(words) == read.masked(me)
        assert len(said) == size + 64 * read.active
        if read.active:
            body = struct.pack("<I", me) + read.dealt
            assert slow.signed(read.key(me, "identity"), said[size:], "masked", read.session, body)


@every_reading
def test_signatures_are_over_the_lists_of_survivors_and_of_those_who_dealt(read: Reading) -> None:
    digest = hashlib.sha256(struct.pack(f"<{len(read.survivors)}I", *read.survivors)).digest()
    for me in read.survivors if read.active else []:
        listed, rest = slow.table(read.told("consistency", me)[48:], 0)
        assert sorted(listed) == read.survivors
        around = {*read.partners[me], *(other for other in read.ids if me in read.chosen[other])}
        statements = {other: read.said("mask", other)[-64:] for other in around if other in read.survivors}
        assert slow.table(rest, 64) == (statements, b"")
        body = struct.pack("<I", me) + read.dealt + digest
        assert slow.signed(read.key(me, "identity"), read.said("consistency", me), "survivors", read.session, body)


@every_reading
def test_one_share_is_opened_of_each_neighbour(read: Reading) -> None:
    for me in read.survivors:
        seeds, rest = slow.table(read.said("unmask", me), 33)
        keys, rest = slow.table(rest, 33)
        assert rest == b""
        near = [other for other in read.ids if me in read.chosen[other]]
        assert seeds == {other: read.shares[other][me][:33] for other in near if other in read.survivors}
        assert keys == {other: read.shares[other][me][33:] for other in near if other in read.dropped}


@every_reading
def test_the_total_is_the_plain_sum(read: Reading) -> None:
    vectors = [read.recorded["vectors"][str(me)] for me in read.survivors]
    assert read.recorded["total"] == [sum(column) % 2**read.bits for column in zip(*vectors, strict=True)]


@every_session
def test_the_package_plays_the_recording_bit_for_bit(session: Session) -> None:
    replay = Replay(session)
    assert replay.outcome == "done"
    assert replay.said == session["said"]
    assert replay.told == session["told"]
    assert list(replay.server.survivors) == session["survivors"]
    assert replay.server.total().tolist() == session["total"]


@pytest.mark.parametrize("session", chosen(RECORDED, RECORDED[:1]), ids=lambda session: session["name"])
def test_a_changed_bit_in_any_field_of_any_message_is_refused(session: Session) -> None:
    for change in session["tampered"]:
        assert change["refused"] != "done", change
        assert Replay(session, change).outcome == change["refused"], change


@every_session
def test_every_field_of_every_message_is_among_the_changed(session: Session) -> None:
    listed = [{name: value for name, value in change.items() if name != "refused"} for change in session["tampered"]]
    assert listed == list(changes(session))
    stages = {(change["direction"], change["stage"]) for change in listed}
    assert len(stages) == (9 if session["cast"].get("active") else 7)


if __name__ == "__main__":
    PATH.write_text(json.dumps([record(name) for name in CASTS], indent=1) + "\n", encoding="utf-8")
