"""Keys for agreement, derivation and signing; every use is bound to the protocol's version, the session and the parties.

agreement     X25519, fresh for every session
identity      Ed25519, registered out of band
derivation    HKDF-SHA256, salted with the session
channel       ChaCha20-Poly1305; every key is derived for one message, so the nonce is zero
pairs         a channel each way, and one mask, as a client's `Agreements` give them

Both public keys of a pair enter the derivation of its keys, beside the secret that X25519 gives. That secret does not determine
them: scalars are multiples of 8, so a key agrees on the same secret with P and with P plus any point of small order, and with
every encoding of P. A server could hand one client such a twin of another's key, and the two would share a secret although
they do not see the same two keys. With the keys in the derivation they share nothing then.

The mask of clients i and j is PRG(s_ij), with s_ij derived from their mask keys. The client with the smaller id adds it and the
other subtracts it, so it cancels in a sum over both. A holder of either one's private mask key can compute it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Generic, NoReturn, Protocol, TypeVar

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from protocols.errors import ParameterError, Tampering

Private = TypeVar("Private", X25519PrivateKey, Ed25519PrivateKey)

FIELD = 2**255 - 19  # the integers modulo this are the coordinates of both curves
_VERSION = b"secure-fed/1"
_NONCE = bytes(12)
_LENGTH = struct.Struct("<I")
_EIGHTH = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826  # y of a point of order 8
_SMALL_ORDER = frozenset({0, 1, FIELD - 1, _EIGHTH, FIELD - _EIGHTH})  # y of the points whose order divides 8


class Secret:
    """Bytes that are revealed only on explicit request: not printed, not formatted, not pickled, not hashed."""

    __slots__ = ("_bytes",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: bytes) -> None:
        # for an integer, `bytes` would return that many zeros
        self._bytes = value if type(value) is bytes else bytes(memoryview(value))

    @classmethod
    def new(cls) -> Secret:
        """32 random bytes from the operating system."""
        return cls(os.urandom(32))

    def reveal(self) -> bytes:
        return self._bytes

    def __eq__(self, other: object) -> bool:
        """In constant time."""
        return isinstance(other, Secret) and hmac.compare_digest(self._bytes, other._bytes)

    def __repr__(self) -> str:
        return "Secret(redacted)"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is not pickled")


Mask = tuple[Secret, int]  # the key of the stream, and the sign with which it is added
Channel = tuple[Secret, Secret]  # the keys for messages to another client, and for messages from it


class _Key(Generic[Private]):
    """A private key of either kind. It is neither printed nor pickled."""

    __slots__ = ("__dict__", "_key")

    def __init__(self, key: Private) -> None:
        self._key: Private = key

    @cached_property
    def public(self) -> bytes:
        """(32,)"""
        return self._key.public_key().public_bytes_raw()

    @property
    def private(self) -> Secret:
        return Secret(self._key.private_bytes_raw())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(public {self.public.hex()[:12]}...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an {type(self).__name__} is not pickled")


class AgreementKey(_Key[X25519PrivateKey]):
    """One party's private key for X25519 agreements."""

    @classmethod
    def new(cls) -> AgreementKey:
        return cls.from_secret(Secret.new())

    @classmethod
    def from_secret(cls, secret: Secret) -> AgreementKey:
        """From 32 bytes, of which X25519 sets five bits; in `private` they are set."""
        return cls(X25519PrivateKey.from_private_bytes(_clamped(secret).reveal()))

    def agree(self, public: bytes) -> Secret:
        """(32,) a secret that only the two parties can compute. A key of small order, with which anybody could, is refused."""
        try:
            return Secret(self._key.exchange(_point(public)))
        except ValueError:
            raise Tampering(
                "a public key has small order or is not a key: a secret agreed on with it would be public"
            ) from None


@lru_cache(maxsize=4096)
def _point(public: bytes) -> X25519PublicKey:
    """Cached for a process that agrees with this key many times. The key is public."""
    return X25519PublicKey.from_public_bytes(public)


def belongs(secret: Secret, public: bytes) -> bool:
    """Whether `secret` is the private key of `public`, bit for bit as in `AgreementKey`.

    X25519 ignores five bits of a private key, so 32 secrets have the same public key, and only one of them was generated.
    Accepting another would let a wrong share of it pass, and put the blame on the right shares.
    """
    return secret == _clamped(secret) and AgreementKey.from_secret(secret).public == public


class Identity(_Key[Ed25519PrivateKey]):
    """A party's signing key, the same for all sessions."""

    @classmethod
    def new(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_secret(cls, secret: Secret) -> Identity:
        return cls(Ed25519PrivateKey.from_private_bytes(secret.reveal()))

    def sign(self, purpose: str, session: bytes, body: bytes) -> bytes:
        """(64,)"""
        return self._key.sign(_encoded(purpose, session, body))


@lru_cache(maxsize=4096)
def verify(public: bytes, signature: bytes, purpose: str, session: bytes, body: bytes) -> bool:
    """Whether the holder of that identity signed this, for this purpose, in this session.

    An identity of small order has no holder: anybody can sign for it, and 32 zeros, left where a key was forgotten, are of
    order 4. All of this is public, so a process that plays many clients checks a signature once.
    """
    if (int.from_bytes(public, "little") & (2**255 - 1)) % FIELD in _SMALL_ORDER:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _encoded(purpose, session, body))
    except (InvalidSignature, ValueError):
        return False
    return True


def registry_digest(identities: Mapping[int, bytes], clients: Sequence[int]) -> bytes:
    """(32,) SHA-256("secure-fed/registry" | number of clients u32 | for each, ascending: number u32, public key 32).

    ParameterError for a client without a key of 32 bytes, and for a key that two clients share: the holder of one key is one
    party.
    """
    return _registry(tuple((client, identities.get(client)) for client in sorted(set(clients))))


@lru_cache(maxsize=4)
def _registry(invited: tuple[tuple[int, bytes | None], ...]) -> bytes:
    """All of it is public, so a process that plays many clients computes it once."""
    owners: dict[bytes, int] = {}
    parts = [b"secure-fed/registry", struct.pack("<I", len(invited))]
    for client, key in invited:
        if key is None:
            raise ParameterError(f"client {client} has no registered identity: register its public key")
        if len(key) != 32:
            raise ParameterError(f"the identity of client {client} is not 32 bytes: register an Ed25519 public key")
        if key in owners:
            raise ParameterError(
                f"clients {owners[key]} and {client} have one identity between them: register one key for each"
            )
        owners[key] = client
        parts.append(struct.pack("<I", client) + key)
    return hashlib.sha256(b"".join(parts)).digest()


def derive(secret: Secret, session: bytes, purpose: str, *ids: int, publics: bytes = b"") -> Secret:
    """(32,) a key for one purpose between these parties, in this order, in this session of 32 bytes.

    publics: their public keys, in the same order.
    """
    return _expanded(_extracted(secret, session), purpose, *ids, publics=publics)


def _extracted(secret: Secret, session: bytes) -> Secret:
    """The first half of HKDF, the same for all keys derived from one secret: HMAC-SHA256 under the session."""
    return Secret(hmac.digest(session, secret.reveal(), "sha256"))


def _expanded(extracted: Secret, purpose: str, *ids: int, publics: bytes) -> Secret:
    """The second half of HKDF (RFC 5869, 2.3): the first block, HMAC-SHA256 of the context and a one."""
    info = _encoded(purpose, struct.pack(f"<{len(ids)}I", *ids), publics)
    return Secret(hmac.digest(extracted.reveal(), info + b"\x01", "sha256"))


def seal(key: Secret, plaintext: bytes, session: bytes, sender: int, receiver: int) -> bytes:
    """Encrypt and authenticate, 16 bytes longer. Use each key only once."""
    return ChaCha20Poly1305(key.reveal()).encrypt(_NONCE, plaintext, _between(session, sender, receiver))


def unseal(key: Secret, sealed: bytes, session: bytes, sender: int, receiver: int) -> bytes:
    """The plaintext that was sealed with this key, in this session, between these two parties."""
    try:
        return ChaCha20Poly1305(key.reveal()).decrypt(_NONCE, sealed, _between(session, sender, receiver))
    except InvalidTag:
        what = f"the share that client {sender} sealed for client {receiver} does not open: it was altered or moved"
        raise Tampering(what) from None


def commitment(secret: Secret, session: bytes, purpose: str, owner: int) -> bytes:
    """(32,) a value that identifies the secret and reveals nothing about 32 random bytes."""
    return hashlib.sha256(_encoded(purpose, session + struct.pack("<I", owner), secret.reveal())).digest()


def pair_mask(key: AgreementKey, public: bytes, session: bytes, me: int, other: int) -> Mask:
    """The mask that `me` adds for `other`, from the mask key of `me` and the public mask key of `other`.

    It also removes the mask that `other` added for `me`.
    """
    pair, publics = (me, other), key.public + public
    if other < me:
        pair, publics = (other, me), public + key.public
    secret = derive(key.agree(public), session, "mask", *pair, publics=publics)
    return secret, 1 if other > me else -1


def channels(key: AgreementKey, public: bytes, session: bytes, me: int, other: int) -> Channel:
    """The keys for messages from `me` to `other`, and back. Each seals one message of a session."""
    extracted, mine = _extracted(key.agree(public), session), key.public
    there = _expanded(extracted, "share", me, other, publics=mine + public)
    return there, _expanded(extracted, "share", other, me, publics=public + mine)


class Agreements(Protocol):
    """How a client obtains the keys that it shares with others, from its private key, its number and their public keys."""

    def channels(
        self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int
    ) -> Mapping[int, Channel]:
        """`channels` with each client in `publics`."""

    def masks(self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int) -> Mapping[int, Mask]:
        """`pair_mask` with each client in `publics`."""


class Alone:
    """`Agreements` of a client on its own machine, which has only its own secrets. `workers.OneProcess` is for simulations."""

    def channels(
        self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int
    ) -> Mapping[int, Channel]:
        return {other: channels(key, public, session, me, other) for other, public in publics.items()}

    def masks(self, key: AgreementKey, publics: Mapping[int, bytes], session: bytes, me: int) -> Mapping[int, Mask]:
        return {other: pair_mask(key, public, session, me, other) for other, public in publics.items()}


def _clamped(secret: Secret) -> Secret:
    """The five bits that X25519 ignores, as RFC 7748 sets them."""
    scalar = bytearray(secret.reveal())
    scalar[0] &= 0b11111000
    scalar[31] = scalar[31] & 0b01111111 | 0b01000000
    return Secret(bytes(scalar))


def _encoded(purpose: str, context: bytes, body: bytes) -> bytes:
    """Injective: every part but the last is preceded by its length."""
    return _purpose(purpose) + _sized(context) + body


@lru_cache(maxsize=64)
def _purpose(purpose: str) -> bytes:
    return _sized(_VERSION) + _sized(purpose.encode())


def _sized(part: bytes) -> bytes:
    return _LENGTH.pack(len(part)) + part


def _between(session: bytes, sender: int, receiver: int) -> bytes:
    return session + struct.pack("<II", sender, receiver)
