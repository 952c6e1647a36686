"""What both sides conclude from messages that all clients see: who takes part, on which graph, and whose signatures are right.

A roster fixes, for every client that accepts it, the participants, their keys, and the graph on which clients deal shares.
Where clients choose their neighbours, a roster shows only the clients near its receiver. In an active session the graph of the
masks follows from the list of the clients that have dealt (`dealers_graph`).

Every client checks the roster that it receives by itself. The functions are pure, with immutable public arguments, so a process
that plays many clients checks one roster once (`lru_cache`). A refused roster is not cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from protocols.errors import Aborted, Tampering
from protocols.graph import ChosenGraph, Graph, Topology, choices, complete, ring
from protocols.keys import FIELD, verify
from protocols.parameters import Parameters
from protocols.wire import Advertise, Confirm, Masked, Roster

Identities = tuple[tuple[int, bytes], ...]  # the invited clients' public identity keys; empty in passive sessions

# The u-coordinates of the points whose order divides 8, on the curve and on its twist: any key agrees on zero with them.
SMALL_ORDER = frozenset(
    {
        0,
        1,
        FIELD - 1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    }
)


@dataclass(frozen=True)
class Agreed:
    """A roster that passed all checks; `digest` is the digest of its bytes."""

    members: tuple[int, ...]
    adverts: Mapping[int, Advertise]
    digest: bytes


def point(public: bytes) -> int:
    """The coordinate that an X25519 key encodes: several encodings mean the same coordinate."""
    return (int.from_bytes(public, "little") & (2**255 - 1)) % FIELD


def usable(owner: int, advert: Advertise) -> tuple[int, int]:
    """The points of its two keys. Tampering if both keys are the same or one is of small order."""
    points = point(advert.channel), point(advert.mask)
    if points[0] == points[1] or not SMALL_ORDER.isdisjoint(points):
        raise Tampering(f"client {owner} advertises one key twice, or a key of small order that would hide nothing")
    return points


def authentic(owner: int, advert: Advertise, parameters: Parameters, identities: Mapping[int, bytes]) -> None:
    """Tampering unless, in an active session, the owner signed its keys for this session."""
    if not parameters.active:
        return
    if not verify(identities[owner], advert.signature, "advertise", parameters.session, advert.signed(owner)):
        raise Tampering(f"the keys of client {owner} lack its signature for this session")


@lru_cache(maxsize=4)
def judged(data: bytes, parameters: Parameters, identities: Identities) -> Agreed:
    """The roster in these bytes.

    Tampering if a client on it was not invited, or a key is of small order, occurs twice or (active) is not signed. Aborted if
    it is too short for any sum: fewer than `survivors`, or than a client and `threshold` holders of its shares. Where clients
    choose, the roster contains only the clients near the receiver, and `client.related` checks whether they are enough.
    """
    adverts = Roster.from_bytes(data, parameters).adverts
    uninvited = adverts.keys() - set(parameters.clients)
    if uninvited:
        raise Tampering(f"client {min(uninvited)} is on the roster but was not invited")
    least = 1 if parameters.chosen else max(parameters.survivors, parameters.threshold + 1)
    if len(adverts) < least:
        raise Aborted(f"{len(adverts)} clients take part, fewer than the {least} that a sum needs")
    known, seen = dict(identities), set[int]()
    for owner, advert in adverts.items():
        points = usable(owner, advert)
        if not seen.isdisjoint(points):
            raise Tampering(f"client {owner} is on the roster with a key of another client")
        seen.update(points)
        authentic(owner, advert, parameters, known)
    return Agreed(tuple(adverts), MappingProxyType(adverts), hashlib.sha256(data).digest())


@lru_cache(maxsize=4096)
def chosen_by(client: int, seed: bytes, parameters: Parameters) -> tuple[int, ...]:
    """The choices of a client with this seed."""
    return choices(seed, parameters.clients, client, parameters.neighbours)


def roster_graph(parameters: Parameters, agreed: Agreed) -> Graph:
    """The graph of a session in which clients do not choose: complete, or a ring drawn by a hash of the roster."""
    seed = hashlib.sha256(b"secure-fed/1 graph" + parameters.session + agreed.digest).digest()
    return _ring(agreed.members, parameters.neighbours, seed)


_ring = lru_cache(maxsize=4)(ring)


def dealers_graph(dealt: Mapping[int, bytes], parameters: Parameters) -> Topology:
    """The graph of an active session on the clients that have dealt shares, from the seeds of their choices."""
    uninvited = dealt.keys() - set(parameters.clients)
    if uninvited:
        raise Tampering(f"client {min(uninvited)} is listed as having dealt shares but was not invited")
    return _dealers_graph(tuple(dealt.items()), parameters)


@lru_cache(maxsize=4)
def _dealers_graph(dealt: tuple[tuple[int, bytes], ...], parameters: Parameters) -> Topology:
    if parameters.complete:
        return complete([member for member, _ in dealt])
    return ChosenGraph({member: chosen_by(member, seed, parameters) for member, seed in dealt}, parameters.masked)


def near(me: int, graph: Topology, survivors: Collection[int]) -> tuple[int, ...]:
    """The survivors whose shares a client holds or with whom it shares a mask."""
    return tuple(sorted({*graph.owners(me), *graph.partners(me)}.intersection(survivors)))


def states(owner: int, signature: bytes, parameters: Parameters, identity: bytes, dealt: bytes) -> bool:
    """Whether it is the owner's signature, with its vector, over the list of the clients that have dealt."""
    return verify(identity, signature, "masked", parameters.session, Masked.signed(owner, dealt))


def signs(
    owner: int, signature: bytes, parameters: Parameters, identity: bytes, dealt: bytes, survivors: bytes
) -> bool:
    """Whether it is the owner's signature over the lists with these digests."""
    return verify(identity, signature, "survivors", parameters.session, Confirm.signed(owner, dealt, survivors))
