"""What the server says to clients. Strict as `messages` is: only `MessageError` escapes, whatever the bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from protocols.messages import DIGEST, SEALED, SIGNATURE, Advertise, Reveal
from protocols.parameters import SERVER, Parameters
from protocols.wire import Buffer, Kind, Reader, Writer


@dataclass(frozen=True)
class Roster:
    """Who takes part, with what each has advertised."""

    adverts: Mapping[int, Advertise]

    def to_bytes(self, parameters: Parameters) -> bytes:
        writer = Writer(Kind.ROSTER, parameters, SERVER)
        entries = {owner: b"".join(advert.fields()) for owner, advert in self.adverts.items()}
        writer.table(entries, sum(Advertise.sizes(parameters)))
        return writer.done()

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters) -> Roster:
        reader = Reader(data, Kind.ROSTER, parameters, SERVER)
        layout = struct.Struct("".join(f"{size}s" for size in Advertise.sizes(parameters)))
        entries = reader.table(layout.size)
        reader.end()
        return cls({owner: Advertise(*layout.unpack(entry)) for owner, entry in entries.items()})


@dataclass(frozen=True)
class Reveals:
    """Everybody's part of the joint randomness."""

    reveals: Mapping[int, Reveal]

    def to_bytes(self, parameters: Parameters) -> bytes:
        writer = Writer(Kind.REVEALS, parameters, SERVER)
        entries = {owner: reveal.secret + reveal.signature for owner, reveal in self.reveals.items()}
        writer.table(entries, DIGEST + SIGNATURE)
        return writer.done()

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters) -> Reveals:
        reader = Reader(data, Kind.REVEALS, parameters, SERVER)
        entries = reader.table(DIGEST + SIGNATURE)
        reader.end()
        return cls({owner: Reveal(entry[:DIGEST], entry[DIGEST:]) for owner, entry in entries.items()})


@dataclass(frozen=True)
class Delivery:
    """To one client: what its neighbours sealed for it."""

    sealed: Mapping[int, bytes]  # by sender

    def to_bytes(self, parameters: Parameters) -> bytes:
        writer = Writer(Kind.DELIVERY, parameters, SERVER)
        writer.table(self.sealed, SEALED)
        return writer.done()

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters) -> Delivery:
        reader = Reader(data, Kind.DELIVERY, parameters, SERVER)
        message = cls(reader.table(SEALED))
        reader.end()
        return message


@dataclass(frozen=True)
class Survivors:
    """Whose vectors are in the sum."""

    clients: tuple[int, ...]  # ascending

    def to_bytes(self, parameters: Parameters) -> bytes:
        writer = Writer(Kind.SURVIVORS, parameters, SERVER)
        writer.table(dict.fromkeys(self.clients, b""), 0)
        return writer.done()

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters) -> Survivors:
        reader = Reader(data, Kind.SURVIVORS, parameters, SERVER)
        message = cls(tuple(reader.table(0)))
        reader.end()
        return message


@dataclass(frozen=True)
class Confirmations:
    """The survivors' signatures over the list of survivors."""

    signatures: Mapping[int, bytes]  # by signer

    def to_bytes(self, parameters: Parameters) -> bytes:
        writer = Writer(Kind.CONFIRMATIONS, parameters, SERVER)
        writer.table(self.signatures, SIGNATURE)
        return writer.done()

    @classmethod
    def from_bytes(cls, data: Buffer, parameters: Parameters) -> Confirmations:
        reader = Reader(data, Kind.CONFIRMATIONS, parameters, SERVER)
        message = cls(reader.table(SIGNATURE))
        reader.end()
        return message
