"""Keys: their results, their binding to session and purpose, the inputs they refuse, and secrets that are never printed."""

from __future__ import annotations

import copy
import hashlib
import hmac
import itertools
import logging
import pickle
import traceback
from contextlib import suppress
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import Tampering
from protocols.keys import (
    AgreementKey,
    Identity,
    Secret,
    belongs,
    channels,
    commitment,
    derive,
    pair_mask,
    seal,
    unseal,
    verify,
)
from protocols.roster import SMALL_ORDER, point
from tests.cells import every
from tests.protocols import slow
from tests.protocols.slow import CURVE as P

RAW = bytes(range(100, 132))
SESSION = bytes(range(32))
OTHER = bytes(range(1, 33))
KEYS = (AgreementKey.from_secret(Secret(RAW)), Identity.from_secret(Secret(RAW)))


def traces(raw: bytes) -> list[str]:
    """The forms in which bytes are printed."""
    return [repr(raw)[2:-1], raw.hex(), str(list(raw))[1:-1], str(int.from_bytes(raw, "little"))]


def printed(thing: Any) -> list[str]:
    """All texts in which a program may print a thing by accident."""
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError(thing)
    told = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    record = logging.LogRecord("x", 0, "", 0, "%s %r", (thing, thing), None)
    return [
        *(repr(thing), str(thing), f"{thing}", f"{thing!r}", f"{thing!s}", f"{thing!a}"),
        *("%s" % thing, "%r" % thing, f"{[thing]}", f"{ {1: thing} }", record.getMessage(), str(caught.value)),  # noqa: UP031
        "".join(told.format()),
    ]


def test_secrets_are_shown_on_request_alone_and_keys_print_their_public_half() -> None:
    """Raw bytes are found by the same search."""
    secret = Secret(RAW)
    assert secret.reveal() == RAW
    for thing, told in ((secret, "redacted"), *((key, key.public.hex()[:12]) for key in KEYS)):
        assert not [text for text in printed(thing) for trace in traces(RAW) if trace in text]
        assert told in repr(thing)
    assert f"{secret:>40}" == repr(secret)
    assert [text for text in printed(RAW) for trace in traces(RAW) if trace in text]


def test_secrets_do_not_travel() -> None:
    for thing in (Secret(RAW), *KEYS):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError):
                pickle.dumps({"held": [thing]}, protocol)
        with pytest.raises(TypeError):
            copy.deepcopy(thing)


def test_secrets_are_equal_by_content_and_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def noted(one: bytes, other: bytes) -> bool:
        compared.extend((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    assert Secret(RAW) == Secret(RAW)
    assert compared == [RAW, RAW]  # compared in constant time
    assert Secret(RAW) != Secret(RAW[:-1] + b"\0")
    assert Secret(RAW) != Secret(RAW[:-1])
    assert Secret(RAW) != RAW
    with pytest.raises(TypeError):
        hash(Secret(RAW))


def test_a_secret_is_made_of_bytes_and_does_not_follow_them() -> None:
    with pytest.raises(TypeError):
        Secret(32)  # type: ignore[arg-type]
    changing = bytearray(RAW)
    secret = Secret(changing)  # type: ignore[arg-type]
    changing[0] ^= 1
    assert secret.reveal() == RAW


def test_new_secrets_and_keys_are_all_different() -> None:
    assert len({Secret.new().reveal() for _ in range(200)}) == 200
    assert len({AgreementKey.new().public for _ in range(50)}) == 50
    assert len({Identity.new().public for _ in range(50)}) == 50
    assert {len(Secret.new().reveal()) for _ in range(9)} == {32}


def test_agreement_is_x25519() -> None:
    one, other = AgreementKey.new(), AgreementKey.new()
    assert one.public == slow.public(one.private.reveal())
    expected = slow.x25519(one.private.reveal(), other.public)
    assert one.agree(other.public).reveal() == other.agree(one.public).reveal() == expected
    assert AgreementKey.from_secret(one.private).public == one.public


# The points of the curve form a cyclic group of order 8 times a prime, the points of its twist one of order 4 times a prime. So
# a point whose order divides 8 has u = 0, 1, -1 or one of two other values. Each u has two encodings of 256 bits, since the
# highest bit is ignored, or four.
ENCODINGS = sorted({u + p + high for u in SMALL_ORDER for p in (0, P) for high in (0, 2**255) if u + p < 2**255})


def test_the_list_of_low_orders_is_right() -> None:
    """A scalar of zeros is 2^254 after clamping: it maps only points of low order to the point at infinity."""
    assert (len(SMALL_ORDER), len(ENCODINGS)) == (5, 14)
    of_zeros = [u for u in (*SMALL_ORDER, 2, 9, P - 2) if slow.x25519(bytes(32), u.to_bytes(32, "little")) == bytes(32)]
    assert set(of_zeros) == SMALL_ORDER
    assert {point(u.to_bytes(32, "little")) for u in ENCODINGS} == SMALL_ORDER


@every("u", ENCODINGS)
def test_keys_of_small_order_are_refused(u: int) -> None:
    with pytest.raises(Tampering):
        AgreementKey.new().agree(u.to_bytes(32, "little"))


@every("length", [0, 1, 31, 33, 64])
def test_what_is_no_public_key_is_refused(length: int) -> None:
    with pytest.raises(Tampering):
        AgreementKey.new().agree(b"\x09" * length)


def test_a_private_key_is_known_by_every_one_of_its_bits() -> None:
    """X25519 ignores five bits, so a check of the public key alone accepts 32 private keys."""
    for _ in range(4):
        key = AgreementKey.new()
        assert belongs(key.private, key.public)
        passing = []
        for bit in range(256):
            flipped = bytearray(key.private.reveal())
            flipped[bit // 8] ^= 1 << bit % 8
            secret = Secret(bytes(flipped))
            if bit in (0, 1, 2, 254, 255):
                passing.append(AgreementKey.from_secret(secret).public == key.public)
            assert not belongs(secret, key.public)
        assert passing == [True] * 5
        assert not belongs(key.private, AgreementKey.new().public)


@every(("purpose", "ids"), [("mask", (3, 9)), ("share", (2**32 - 2, 0)), ("", ()), ("ü", (1,))])
def test_derivation_is_hkdf_over_an_encoding_with_lengths(purpose: str, ids: tuple[int, ...]) -> None:
    assert derive(Secret(RAW), SESSION, purpose, *ids).reveal() == slow.hkdf(RAW, SESSION, purpose, *ids)
    named = derive(Secret(RAW), SESSION, purpose, *ids, publics=OTHER)
    assert named.reveal() == slow.hkdf(RAW, SESSION, purpose, *ids, publics=OTHER)


@every("kind", ["plus the point of order 2", "with its highest bit set", "itself"])
def test_a_twin_of_a_key_agrees_on_its_secret_and_shares_no_key_with_the_other_end(kind: str) -> None:
    """One end got a twin of the other's key. On the curve (u, v) + (0, 0) = (1 / u, ...); X25519 ignores the top bit."""
    one, other = AgreementKey.new(), AgreementKey.new()
    u = int.from_bytes(other.public, "little")
    twin = {"itself": u, "with its highest bit set": u + 2**255, "plus the point of order 2": pow(u, -1, P)}[kind]
    shown = twin.to_bytes(32, "little")
    assert one.agree(shown) == one.agree(other.public) == other.agree(one.public)
    for me, peer in ((1, 2), (2, 1)):
        mine, theirs = pair_mask(one, shown, SESSION, me, peer), pair_mask(other, one.public, SESSION, peer, me)
        assert (mine[0] == theirs[0]) is (kind == "itself")
        assert mine[1] == -theirs[1]
        sends, gets = channels(one, shown, SESSION, me, peer)
        back = channels(other, one.public, SESSION, peer, me)
        assert ((sends, gets) == back[::-1]) is (kind == "itself")
        assert sends != gets
        assert (sends in back or gets in back) is (kind == "itself")


USES: list[tuple[bytes, str, tuple[int, ...]]] = [
    (session, purpose, ids)
    for session, purpose, ids in itertools.product(
        (SESSION, OTHER),
        ("mask", "share", "", "mas", "k", "mask\0", "mask\1\0\0\0", "\0\0\0\0", "4\0\0\0mask"),
        ((), (0,), (0, 0), (1, 2), (2, 1), (12,), (1, 2, 0), (0x6B73616D,), (256, 0), (0, 256), (2**32 - 1,)),
    )
]


def test_no_two_uses_have_a_key_in_common() -> None:
    assert len({derive(Secret(RAW), *use[:2], *use[2]).reveal() for use in USES}) == len(USES)
    assert derive(Secret(RAW), SESSION, "mask", 1, 2) != derive(Secret(RAW[::-1]), SESSION, "mask", 1, 2)


def test_identities_sign_for_one_purpose_and_session() -> None:
    identity, stranger = Identity.new(), Identity.new()
    signature = identity.sign("roster", SESSION, b"body")
    assert len(signature) == 64
    assert verify(identity.public, signature, "roster", SESSION, b"body")
    assert Identity.from_secret(identity.private).sign("roster", SESSION, b"body") == signature
    for public, purpose, session, body in (
        (stranger.public, "roster", SESSION, b"body"),
        (identity.public, "survivors", SESSION, b"body"),
        (identity.public, "roster", OTHER, b"body"),
        (identity.public, "roster", SESSION, b"bodY"),
        (identity.public, "roster", SESSION, b""),
        (identity.public, "roste", b"r" + SESSION, b"body"),
        (identity.public, "roster", SESSION + b"b", b"ody"),
        (identity.public, "roster", SESSION[:-1], SESSION[-1:] + b"body"),
    ):
        assert not verify(public, signature, purpose, session, body)


def doubled(y: int) -> int:
    """The y of twice the point with this y, by the addition law of the curve -x^2 + y^2 = 1 + d x^2 y^2."""
    d = -121665 * pow(121666, -1, P)
    squared = (y * y - 1) * pow(d * y * y + 1, -1, P)  # of x
    return (y * y + squared) * pow(1 - d * squared * y * y, -1, P) % P


EIGHTH = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826  # y of a point of order 8
SMALL_Y = (0, 1, P - 1, EIGHTH, P - EIGHTH)


def test_the_identities_without_a_holder_are_those_whose_order_divides_eight() -> None:
    """(0, 1) is the curve's neutral element, so y = 1 after three doublings. Eight points have this property, with five y."""
    assert {doubled(doubled(doubled(y))) for y in SMALL_Y} == {1}
    ours = int.from_bytes(Identity.new().public, "little") % 2**255
    assert doubled(doubled(doubled(ours))) != 1


@every("top", [0, 2**255])
@every("y", sorted({y + p for y in SMALL_Y for p in (0, P) if y + p < 2**255}))
def test_nobody_signs_for_an_identity_of_small_order(y: int, top: int) -> None:
    """The signature R = neutral element, S = 0, made without a key, is valid whenever 8 divides the hash."""
    public, forged = (y + top).to_bytes(32, "little"), (1).to_bytes(64, "little")
    taken = False
    for body in (b"%d" % number for number in range(100)):
        with suppress(InvalidSignature, ValueError):
            Ed25519PublicKey.from_public_bytes(public).verify(forged, slow.framed("roster", SESSION, body))
            taken = True
        assert not verify(public, forged, "roster", SESSION, body)
    assert taken  # by Ed25519 without the check for small order


@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=40))
def test_verification_answers_whatever_it_is_given(public: bytes, signature: bytes, body: bytes) -> None:
    assert not verify(public, signature, "roster", SESSION, body)


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_what_is_sealed_is_opened(plaintext: bytes, sender: int, receiver: int) -> None:
    sealed = seal(Secret(RAW), plaintext, SESSION, sender, receiver)
    assert len(sealed) == len(plaintext) + 16
    assert unseal(Secret(RAW), sealed, SESSION, sender, receiver) == plaintext


def test_what_is_sealed_opens_for_its_key_session_sender_and_receiver_alone() -> None:
    sealed = seal(Secret(RAW), b"shares", SESSION, 3, 5)
    for key, session, sender, receiver in (
        (RAW[::-1], SESSION, 3, 5),
        (RAW, OTHER, 3, 5),
        (RAW, SESSION, 5, 3),
        (RAW, SESSION, 3, 6),
        (RAW, SESSION, 4, 5),
        (RAW, SESSION, 3 + 256, 5),
    ):
        with pytest.raises(Tampering):
            unseal(Secret(key), sealed, session, sender, receiver)


def test_commitments_are_bound_to_secret_session_purpose_and_owner() -> None:
    expected = slow.framed("seed", SESSION + (7).to_bytes(4, "little"), RAW)
    assert commitment(Secret(RAW), SESSION, "seed", 7) == hashlib.sha256(expected).digest()
    uses = itertools.product((RAW, RAW[::-1], RAW[:-1]), (SESSION, OTHER), ("seed", "draw", "see"), (0, 1, 7, 256))
    found = [commitment(Secret(raw), session, purpose, owner) for raw, session, purpose, owner in uses]
    assert len(set(found)) == len(found) == 72
