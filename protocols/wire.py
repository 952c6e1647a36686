"""The messages of a session: their bytes, a frozen dataclass for each, and the traffic that they cause.

A message is a header of 48 bytes, little-endian, then fields of fixed size and tables of ascending ids:

    "SFSA" | version u8 | kind u8 | zero u16 | session 32 | sender u32 | zero u32

The server's sender number is 2^32 - 1. A length that does not match, an id out of order, a nonzero reserved byte and a surplus
byte are each a `MessageError`. A table's length is compared with the available bytes before anything is allocated for it, so
time and memory are bounded by the size of the message.

`to_bytes` and `from_bytes` of a message are inverse to each other. The parameters, on which both sides agree, decide which
fields a message has, never the message. Decoding checks that bytes are a message of this session, kind and sender. `roster`,
`client` and `server` check whether its contents are true.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from protocols.errors import MessageError
from protocols.masking import Words
from protocols.parameters import PROTOCOL, SERVER, Parameters, stages
from protocols.sharing import SHARE

MAGIC = b"SFSA"
HEADER = struct.Struct("<4sBBH32sII")
COUNT = struct.Struct("<I")
PUBLIC = 32  # an X25519 key
DIGEST = 32
SIGNATURE = 64
SEALED = 2 * SHARE + 16  # a share of the seed and one of the mask key, and the tag over both

Buffer = bytes | bytearray | memoryview
Entries = Mapping[int, bytes]  # of a table: bytes by id


class Kind(IntEnum):
    """The kinds of messages. From 16 on they come from the server."""

    ADVERTISE = 1
    SHARES = 3
    MASKED = 4
    CONFIRM = 5
    OPENED = 6
    ROSTER = 16
    DELIVERY = 18
    SURVIVORS = 19
    CONFIRMATIONS = 20


class Reader:
    """A message read from front to back. The header is checked first: version, kind, session, sender."""

    def __init__(self, data: Buffer, kind: Kind, parameters: Parameters, sender: int) -> None:
        self.data = memoryview(data).cast("B")
        self.at = HEADER.size
        self._name = kind.name.lower()
        self._sender = sender
        if len(self.data) < HEADER.size:
            raise self.error(f"{len(self.data)} bytes, fewer than the {HEADER.size} of a header")
        magic, version, found, zero, session, claimed, reserved = HEADER.unpack_from(self.data)
        if magic != MAGIC:
            raise self.error("it does not begin like a message of this protocol")
        if version != PROTOCOL:
            raise self.error(f"version {version} of the protocol, not {PROTOCOL}")
        if found != kind:
            raise self.error(f"its kind is {found}, not {int(kind)}: it belongs to another stage")
        if session != parameters.session:
            raise self.error("it belongs to another session, or to other parameters")
        if claimed != sender:
            raise self.error(f"its sender number is {claimed}")
        if zero or reserved:
            raise self.error("reserved bytes that are not zero")

    def error(self, what: str) -> MessageError:
        who = "the server" if self._sender == SERVER else f"client {self._sender}"
        return MessageError(f"no {self._name} message: {what}", who=who)

    def take(self, size: int) -> bytes:
        """The next `size` bytes, copied."""
        return bytes(self.view(size))

    def view(self, size: int) -> memoryview:
        """The next `size` bytes, as a view of the message."""
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise self.error(f"{self.at - len(self.data)} bytes are missing at the end")
        return self.data[start : self.at]

    def count(self) -> int:
        number: int = COUNT.unpack(self.view(COUNT.size))[0]
        return number

    def table(self, width: int) -> dict[int, bytes]:
        """id -> `width` bytes, ids ascending."""
        entries = self.view(self.count() * (COUNT.size + width))
        found: dict[int, bytes] = {}
        last = -1
        for owner, value in _entry(width).iter_unpack(entries):
            if owner <= last or owner == SERVER:
                raise self.error(f"id {owner} is repeated, out of order or no client's")
            found[owner] = value
            last = owner
        return found

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end()

    def end(self) -> None:
        """MessageError if bytes are left over."""
        if self.at != len(self.data):
            raise self.error(f"{len(self.data) - self.at} bytes too many at the end")


def written(kind: Kind, parameters: Parameters, sender: int, *fields: tuple[bytes | Entries, int]) -> bytes:
    """The header, then each field with its size in bytes; of a table, the size of an entry."""
    parts = [HEADER.pack(MAGIC, PROTOCOL, kind, 0, parameters.session, sender, 0)]
    for content, size in fields:
        for value in [content] if isinstance(content, bytes) else content.values():
            if len(value) != size:
                raise MessageError(f"a field of a {kind.name.lower()} message has {len(value)} bytes, not {size}")
        if isinstance(content, bytes):
            parts.append(content)
        else:
            parts.append(COUNT.pack(len(content)))
            entry = _entry(size)
            parts.extend([entry.pack(owner, content[owner]) for owner in sorted(content)])
    return b"".join(parts)


@cache
def _entry(width: int) -> struct.Struct:
    return struct.Struct(f"<I{width}s")


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


class Traffic(NamedTuple):
    """Bytes of one client in one stage, while nobody drops out."""

    up: int
    down: int


def traffic(parameters: Parameters) -> dict[str, Traffic]:
    """By stage, in order. down: the message that a client answers in this stage; in the first stage, the parameters.

    Where clients choose, the number of clients near a client depends on the choices: sizes are expectations, to the nearest
    byte. Everything sent up, and the shares, are exact means over all clients.

    With n clients, D of them dropped, d words of w bytes, and h holders of each client's shares (n - 1 on a complete graph,
    else k):

        bytes, a client up    d w + O(h)
        bytes, down           O(n) for lists, O(h) for keys (O(n) if clients do not choose) and shares
        work, a client        2 h agreements (up to 3 h if clients choose), O(h t) for the shares, (h + 1) d words of keystream
                              and additions
        work, the server      n d additions; n secrets rebuilt at O(h) each (O(h^2) when the holders change), (n + D h) d words
                              of keystream
    """
    clients, holders, active = len(parameters.clients), parameters.holders, parameters.active
    advert = sum(Advertise.sizes(parameters))
    shown: float = clients  # advertisements that a client receives
    near: float = clients - 1  # survivors near it
    if parameters.chosen:
        k, m = parameters.neighbours, parameters.masked
        shown, near = 1 + 2 * k - k * k / (clients - 1), k + m - k * m / (clients - 1)
    survivors = _table(clients, 0) + (_table(near, SIGNATURE) if active else 0)
    dealt = _table(holders, SEALED)
    signature = SIGNATURE if active else 0
    up = {
        "advertise": advert,
        "share": DIGEST + dealt,
        "mask": parameters.length * parameters.bits // 8 + signature,
        "consistency": SIGNATURE,
        "unmask": _table(holders, SHARE) + _table(0, SHARE),
    }
    down = {
        "share": _table(shown, advert),
        "mask": dealt + (_table(clients, seeds(parameters)) if active else 0),
        "consistency": survivors,
        "unmask": _table(clients, SIGNATURE) if active else survivors,
    }
    invitation = len(parameters.to_bytes())
    return {
        name: Traffic(round(HEADER.size + up[name]), round(HEADER.size + down[name]) if name in down else invitation)
        for name in stages(parameters)
    }


def _table(entries: float, width: int) -> float:
    return COUNT.size + entries * (COUNT.size + width)
