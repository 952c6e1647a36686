"""Every message of a session, one frozen dataclass each, and its encoded fields.

`to_bytes` and `from_bytes` are inverse to each other; `wire` has the header and the fields. The parameters, on which both sides
agree, decide which fields an advertisement has, never the message. Decoding checks that bytes are a message of this session,
kind and sender. `roster`, `dealing`, `opening`, `client` and `server` check whether its contents are true.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from protocols.codec import Words
from protocols.parameters import PROTOCOL, SERVER, Parameters
from protocols.wire import COUNT, HEADER, MAGIC, Buffer, Kind, Reader, written

PUBLIC = 32  # an X25519 key
DIGEST = 32
SIGNATURE = 64
SHARE = 33  # one share of a 32-byte secret
SEALED = 2 * SHARE + 16  # a share of the seed and one of the mask key, and the tag over both


@dataclass(frozen=True)
class Advertise:
    """A client's two public keys; the seed of its choice of neighbours; its signature over all of it."""

    channel: bytes
    mask: bytes
    choice: bytes = b""  # only where clients choose their neighbours
    signature: bytes = b""  # only in active sessions

    def signed(self, owner: int) -> bytes:
        """What the signature is over."""
        return struct.pack("<I", owner) + self.channel + self.mask + self.choice

    def to_bytes(self, parameters: Parameters, sender: int) -> bytes:
        return written(Kind.ADVERTISE, parameters, sender, *zip(self.fields(), self.sizes(parameters), strict=True))

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters, sender: int) -> Advertise:
        with Reader(data, Kind.ADVERTISE, parameters, sender) as reader:
            return cls(*(reader.take(size) for size in cls.sizes(parameters)))

    def fields(self) -> tuple[bytes, bytes, bytes, bytes]:
        return self.channel, self.mask, self.choice, self.signature

    @staticmethod
    def sizes(parameters: Parameters) -> tuple[int, int, int, int]:
        """The length of each field in this session; zero: the field is absent."""
        return PUBLIC, PUBLIC, seeds(parameters), SIGNATURE if parameters.active else 0


@dataclass(frozen=True)
class Shares:
    """A commitment to the sender's self-mask seed, and for each neighbour its shares, sealed."""

    commitment: bytes
    sealed: Mapping[int, bytes]  # by receiver

    def to_bytes(self, parameters: Parameters, sender: int) -> bytes:
        return written(Kind.SHARES, parameters, sender, (self.commitment, DIGEST), (self.sealed, SEALED))

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters, sender: int) -> Shares:
        with Reader(data, Kind.SHARES, parameters, sender) as reader:
            return cls(reader.take(DIGEST), reader.table(SEALED))


@dataclass(frozen=True)
class Masked:
    """A masked vector, `length` words of `bits` bits, little-endian, and a signature over the list by which it was masked."""

    vector: Words
    signature: bytes = b""  # only in active sessions

    @staticmethod
    def signed(owner: int, dealt: bytes) -> bytes:
        """The signed bytes: the digest of the list of the clients that have dealt, by which it masked."""
        return struct.pack("<I", owner) + dealt

    @staticmethod
    def frame(parameters: Parameters, sender: int, signature: bytes = b"") -> tuple[bytearray, Words]:
        """A message of zeros, and its vector as a writable view of the message."""
        data = bytearray(HEADER.size + parameters.length * parameters.bits // 8) + signature
        HEADER.pack_into(data, 0, MAGIC, PROTOCOL, Kind.MASKED, 0, parameters.session, sender, 0)
        return data, np.frombuffer(data, dtype=word(parameters), count=parameters.length, offset=HEADER.size)

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters, sender: int) -> Masked:
        """The vector is a view of `data`."""
        with Reader(data, Kind.MASKED, parameters, sender) as reader:
            vector = np.frombuffer(reader.view(parameters.length * parameters.bits // 8), dtype=word(parameters))
            return cls(vector, reader.take(SIGNATURE if parameters.active else 0))


@dataclass(frozen=True)
class Confirm:
    """A survivor's signature over the list of survivors that it received."""

    signature: bytes

    @staticmethod
    def signed(owner: int, dealt: bytes, survivors: bytes) -> bytes:
        """The signed bytes: digests of the list of the clients that have dealt and of the list of survivors."""
        return struct.pack("<I", owner) + dealt + survivors

    def to_bytes(self, parameters: Parameters, sender: int) -> bytes:
        return written(Kind.CONFIRM, parameters, sender, (self.signature, SIGNATURE))

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters, sender: int) -> Confirm:
        with Reader(data, Kind.CONFIRM, parameters, sender) as reader:
            return cls(reader.take(SIGNATURE))


@dataclass(frozen=True)
class Opened:
    """Shares of the seeds of neighbours that survived and of the mask keys of the others: never both of one client."""

    seeds: Mapping[int, bytes] = field(repr=False)  # by owner
    keys: Mapping[int, bytes] = field(repr=False)

    def to_bytes(self, parameters: Parameters, sender: int) -> bytes:
        return written(Kind.OPENED, parameters, sender, (self.seeds, SHARE), (self.keys, SHARE))

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters, sender: int) -> Opened:
        with Reader(data, Kind.OPENED, parameters, sender) as reader:
            message = cls(reader.table(SHARE), reader.table(SHARE))
        both = message.seeds.keys() & message.keys.keys()
        if both:
            raise reader.error(f"it holds both shares of client {min(both)}")
        return message


@dataclass(frozen=True)
class Roster:
    """The clients that take part, each with its advertisement."""

    adverts: Mapping[int, Advertise]

    def to_bytes(self, parameters: Parameters) -> bytes:
        entries = {owner: b"".join(advert.fields()) for owner, advert in self.adverts.items()}
        return written(Kind.ROSTER, parameters, SERVER, (entries, sum(Advertise.sizes(parameters))))

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters) -> Roster:
        layout = struct.Struct("".join(f"{size}s" for size in Advertise.sizes(parameters)))
        with Reader(data, Kind.ROSTER, parameters, SERVER) as reader:
            entries = reader.table(layout.size)
        return cls({owner: Advertise(*layout.unpack(entry)) for owner, entry in entries.items()})


@dataclass(frozen=True)
class Delivery:
    """To one client: the shares sealed for it, and in active sessions all that have dealt, each with its choice's seed."""

    sealed: Mapping[int, bytes]  # by sender
    dealt: Mapping[int, bytes] = field(default_factory=dict)  # the same for all

    @property
    def digest(self) -> bytes:
        """(32,) digest of `dealt`, which clients sign."""
        return hashlib.sha256(b"".join(COUNT.pack(owner) + self.dealt[owner] for owner in sorted(self.dealt))).digest()

    def to_bytes(self, parameters: Parameters) -> bytes:
        dealt = [(self.dealt, seeds(parameters))] if parameters.active else []
        return written(Kind.DELIVERY, parameters, SERVER, (self.sealed, SEALED), *dealt)

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters) -> Delivery:
        with Reader(data, Kind.DELIVERY, parameters, SERVER) as reader:
            return cls(reader.table(SEALED), reader.table(seeds(parameters)) if parameters.active else {})


@dataclass(frozen=True)
class Survivors:
    """The clients whose vectors are in the sum; in active sessions also what the clients near the receiver signed."""

    clients: tuple[int, ...]  # ascending; the same for all
    statements: Mapping[int, bytes] = field(default_factory=dict)

    @cached_property
    def present(self) -> frozenset[int]:
        return frozenset(self.clients)

    @property
    def digest(self) -> bytes:
        """(32,) digest of `clients`, which they sign."""
        return hashlib.sha256(struct.pack(f"<{len(self.clients)}I", *self.clients)).digest()

    def to_bytes(self, parameters: Parameters) -> bytes:
        listed = dict.fromkeys(self.clients, b"")
        statements = [(self.statements, SIGNATURE)] if parameters.active else []
        return written(Kind.SURVIVORS, parameters, SERVER, (listed, 0), *statements)

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters) -> Survivors:
        with Reader(data, Kind.SURVIVORS, parameters, SERVER) as reader:
            return cls(tuple(reader.table(0)), reader.table(SIGNATURE) if parameters.active else {})


@dataclass(frozen=True)
class Confirmations:
    """The survivors' signatures over the list of survivors."""

    signatures: Mapping[int, bytes]  # by signer

    def to_bytes(self, parameters: Parameters) -> bytes:
        return written(Kind.CONFIRMATIONS, parameters, SERVER, (self.signatures, SIGNATURE))

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters) -> Confirmations:
        with Reader(data, Kind.CONFIRMATIONS, parameters, SERVER) as reader:
            return cls(reader.table(SIGNATURE))


def seeds(parameters: Parameters) -> int:
    """The size in bytes of the seed of a client's choice in this session; zero: there is none."""
    return DIGEST if parameters.chosen else 0


def word(parameters: Parameters) -> str:
    """numpy's name for the type of a vector's words."""
    return f"<u{parameters.bits // 8}"
