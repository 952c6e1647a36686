"""What a client says to the server, one frozen dataclass for each message. What the server says is in `announcements`.

`to_bytes` and `from_bytes` are inverse to each other: bytes that `to_bytes` would not write are refused with `MessageError`
(see `wire`). Which fields an advertisement has is decided by the parameters, on which both sides agree, never by the message.

Decoding says that bytes are a message of this session, kind and sender. Whether it is true is for `roster`, `opening`, `client`
and `server` to judge.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocols.parameters import PROTOCOL, Parameters
from protocols.wire import HEADER, MAGIC, Buffer, Kind, Reader, Writer

PUBLIC = 32  # an X25519 key
DIGEST = 32
SIGNATURE = 64
SHARE = 33  # one share of a 32-byte secret
SEALED = 2 * SHARE + 16  # a share of the seed and one of the mask key, and the tag over both

Words = NDArray[np.uint32] | NDArray[np.uint64]


@dataclass(frozen=True)
class Advertise:
    """A client's two public keys; its commitment to a part of the joint randomness; its signature over all of it."""

    channel: bytes
    mask: bytes
    commitment: bytes = b""  # only where the graph is drawn from joint randomness
    signature: bytes = b""  # only in active sessions

    def signed(self, owner: int) -> bytes:
        """What the signature is over."""
        return struct.pack("<I", owner) + self.channel + self.mask + self.commitment

    def to_bytes(self, parameters: Parameters, sender: int) -> bytes:
        writer = Writer(Kind.ADVERTISE, parameters, sender)
        for value, size in zip(self.fields(), self.sizes(parameters), strict=True):
            writer.put(value, size)
        return writer.done()

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters, sender: int) -> Advertise:
        reader = Reader(data, Kind.ADVERTISE, parameters, sender)
        message = cls(*(reader.take(size) for size in cls.sizes(parameters)))
        reader.end()
        return message

    def fields(self) -> tuple[bytes, bytes, bytes, bytes]:
        return self.channel, self.mask, self.commitment, self.signature

    @staticmethod
    def sizes(parameters: Parameters) -> tuple[int, int, int, int]:
        """How long each field is in this session; zero: it has none."""
        return PUBLIC, PUBLIC, DIGEST if parameters.draws else 0, SIGNATURE if parameters.active else 0


@dataclass(frozen=True)
class Reveal:
    """What a client had committed itself to, signed together with the roster it was shown."""

    secret: bytes
    signature: bytes

    @staticmethod
    def signed(owner: int, roster: bytes, secret: bytes) -> bytes:
        """What the signature is over; `roster` is the digest of the roster's bytes."""
        return struct.pack("<I", owner) + roster + secret

    def to_bytes(self, parameters: Parameters, sender: int) -> bytes:
        writer = Writer(Kind.REVEAL, parameters, sender)
        writer.put(self.secret, DIGEST)
        writer.put(self.signature, SIGNATURE)
        return writer.done()

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters, sender: int) -> Reveal:
        reader = Reader(data, Kind.REVEAL, parameters, sender)
        message = cls(reader.take(DIGEST), reader.take(SIGNATURE))
        reader.end()
        return message


@dataclass(frozen=True)
class Shares:
    """A commitment to the sender's self-mask seed, and for each neighbour its shares, sealed."""

    commitment: bytes
    sealed: Mapping[int, bytes]  # by receiver

    def to_bytes(self, parameters: Parameters, sender: int) -> bytes:
        writer = Writer(Kind.SHARES, parameters, sender)
        writer.put(self.commitment, DIGEST)
        writer.table(self.sealed, SEALED)
        return writer.done()

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters, sender: int) -> Shares:
        reader = Reader(data, Kind.SHARES, parameters, sender)
        message = cls(reader.take(DIGEST), reader.table(SEALED))
        reader.end()
        return message


@dataclass(frozen=True)
class Masked:
    """A masked vector: `length` words of `bits` bits, little-endian."""

    vector: Words

    @staticmethod
    def frame(parameters: Parameters, sender: int) -> tuple[bytearray, Words]:
        """A message of zeros, and its vector as a view: what is written there is in the message."""
        data = bytearray(HEADER.size + parameters.length * parameters.bits // 8)
        HEADER.pack_into(data, 0, MAGIC, PROTOCOL, Kind.MASKED, 0, parameters.session, sender, 0)
        return data, np.frombuffer(data, dtype=word(parameters), offset=HEADER.size)

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters, sender: int) -> Masked:
        """The vector is a view of `data`."""
        reader = Reader(data, Kind.MASKED, parameters, sender)
        vector = np.frombuffer(reader.view(parameters.length * parameters.bits // 8), dtype=word(parameters))
        reader.end()
        return cls(vector)


@dataclass(frozen=True)
class Confirm:
    """A survivor's signature over the list of survivors it was shown."""

    signature: bytes

    @staticmethod
    def signed(owner: int, roster: bytes, survivors: bytes) -> bytes:
        """What the signature is over: digests of the roster's and of the list's bytes, so it holds for fresh keys only."""
        return struct.pack("<I", owner) + roster + survivors

    def to_bytes(self, parameters: Parameters, sender: int) -> bytes:
        writer = Writer(Kind.CONFIRM, parameters, sender)
        writer.put(self.signature, SIGNATURE)
        return writer.done()

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters, sender: int) -> Confirm:
        reader = Reader(data, Kind.CONFIRM, parameters, sender)
        message = cls(reader.take(SIGNATURE))
        reader.end()
        return message


@dataclass(frozen=True)
class Opened:
    """Shares of the seeds of neighbours that survived and of the mask keys of those that did not: never both of one."""

    seeds: Mapping[int, bytes]  # by owner
    keys: Mapping[int, bytes]

    def to_bytes(self, parameters: Parameters, sender: int) -> bytes:
        writer = Writer(Kind.OPENED, parameters, sender)
        writer.table(self.seeds, SHARE)
        writer.table(self.keys, SHARE)
        return writer.done()

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters, sender: int) -> Opened:
        reader = Reader(data, Kind.OPENED, parameters, sender)
        message = cls(reader.table(SHARE), reader.table(SHARE))
        reader.end()
        both = message.seeds.keys() & message.keys.keys()
        if both:
            raise reader.error(f"it holds both shares of client {min(both)}")
        return message


def word(parameters: Parameters) -> str:
    """numpy's name for the type of a vector's words."""
    return f"<u{parameters.bits // 8}"
