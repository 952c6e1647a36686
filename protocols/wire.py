"""The bytes of messages: a header of 48 bytes, little-endian, then fields of fixed size and tables of ascending ids.

    "SFSA" | version u8 | kind u8 | zero u16 | session 32 | sender u32 | zero u32

The server's sender number is 2^32 - 1. A length that does not match, an id out of order, a nonzero reserved byte and a surplus
byte are each a `MessageError`. A table's length is compared with the available bytes before anything is allocated for it, so
time and memory are bounded by the size of the message.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from functools import cache

from protocols.errors import MessageError
from protocols.parameters import PROTOCOL, SERVER, Parameters

MAGIC = b"SFSA"
HEADER = struct.Struct("<4sBBH32sII")
COUNT = struct.Struct("<I")

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
        return MessageError(f"no {self._name} message: {what}", who=named(self._sender))

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


def named(sender: int) -> str:
    """The name of the party with this sender number."""
    return "the server" if sender == SERVER else f"client {sender}"


@cache
def _entry(width: int) -> struct.Struct:
    return struct.Struct(f"<I{width}s")
