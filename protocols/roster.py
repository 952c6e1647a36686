"""What a roster fixes for everybody who accepts it: who takes part with which keys, and the graph among them.

Every client reads the whole roster and judges it alone; so does the server, before it shows it. The functions are pure, of
immutable arguments that are public, so one process that plays many clients reads one roster once (`lru_cache`). A roster
that was refused is not remembered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from protocols.errors import Aborted, Tampering
from protocols.graph import Graph, complete, ring
from protocols.keys import Secret, commitment, verify
from protocols.messages import Advertise, Reveal, Reveals, Roster
from protocols.parameters import Parameters

Identities = tuple[tuple[int, bytes], ...]  # the invited clients' public identity keys; empty in passive sessions

_PRIME = 2**255 - 19
# The u-coordinates of the points whose order divides 8, on the curve and on its twist: with them any key agrees on zero.
SMALL_ORDER = frozenset(
    {
        0,
        1,
        _PRIME - 1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    }
)


@dataclass(frozen=True)
class Agreed:
    """A roster that holds together; `digest` is that of its bytes."""

    members: tuple[int, ...]
    adverts: Mapping[int, Advertise]
    digest: bytes


def point(public: bytes) -> int:
    """The coordinate that an X25519 key stands for: several encodings mean the same one."""
    return (int.from_bytes(public, "little") & (2**255 - 1)) % _PRIME


def usable(owner: int, advert: Advertise) -> tuple[int, int]:
    """The points of its two keys. Tampering if they are one key or one of them is of small order."""
    points = point(advert.channel), point(advert.mask)
    if points[0] == points[1] or not SMALL_ORDER.isdisjoint(points):
        raise Tampering(f"client {owner} advertises one key twice, or a key of small order that would hide nothing")
    return points


def authentic(owner: int, advert: Advertise, parameters: Parameters, identities: Mapping[int, bytes]) -> None:
    """Tampering unless, in an active session, the owner signed its keys for this session."""
    if not parameters.active:
        return
    if not verify(identities[owner], advert.signature, "advertise", parameters.session, advert.signed(owner)):
        raise Tampering(f"the keys of client {owner} do not bear its signature for this session")


@lru_cache(maxsize=4)
def judged(data: bytes, parameters: Parameters, identities: Identities) -> Agreed:
    """The roster in these bytes.

    Tampering if somebody on it was not invited, or a key is of small order, occurs twice or (active) is not signed.
    Aborted if it is too short for any sum: fewer than `survivors`, or than a client and `threshold` holders of its shares.
    """
    adverts = Roster.from_bytes(data, parameters).adverts
    uninvited = adverts.keys() - set(parameters.clients)
    if uninvited:
        raise Tampering(f"client {min(uninvited)} is on the roster and was not invited")
    least = max(parameters.survivors, parameters.threshold + 1)
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


@lru_cache(maxsize=4)
def drawn(data: bytes, parameters: Parameters, identities: Identities, roster: bytes) -> bytes:
    """The seed of the graph from everybody's part of the joint randomness; `roster` is the roster itself.

    Each part was committed to before any was opened, and is signed by its owner together with the roster it saw. A missing part
    is Aborted: if it were left out, whoever speaks last could choose between two graphs.
    """
    agreed = judged(roster, parameters, identities)
    reveals = Reveals.from_bytes(data, parameters).reveals
    strangers = reveals.keys() - agreed.adverts.keys()
    if strangers:
        raise Tampering(f"joint randomness of client {min(strangers)}, which is not on the roster")
    missing = sorted(agreed.adverts.keys() - reveals.keys())
    if missing:
        raise Aborted(f"the joint randomness lacks the part of {len(missing)} clients, the first of them {missing[0]}")
    known = dict(identities)
    for owner, reveal in reveals.items():
        revealed(owner, reveal, agreed, parameters, known[owner])
    return _seed(parameters, agreed, *(reveal.secret for reveal in reveals.values()))


def revealed(owner: int, reveal: Reveal, agreed: Agreed, parameters: Parameters, identity: bytes) -> None:
    """Tampering unless it is what the owner committed itself to, signed over this roster."""
    session = parameters.session
    if commitment(Secret(reveal.secret), session, "graph", owner) != agreed.adverts[owner].commitment:
        raise Tampering(f"client {owner} reveals something else than it committed itself to")
    signed = Reveal.signed(owner, agreed.digest, reveal.secret)
    if not verify(identity, reveal.signature, "reveal", session, signed):
        raise Tampering(f"client {owner} did not sign the roster that was shown here, or not for this session")


def topology(parameters: Parameters, agreed: Agreed, seed: bytes | None = None) -> Graph:
    """The graph on the members: of `seed` if it was drawn from joint randomness, else of the roster."""
    return _graph(agreed.members, parameters.neighbours, seed or _seed(parameters, agreed))


def _seed(parameters: Parameters, agreed: Agreed, *secrets: bytes) -> bytes:
    return hashlib.sha256(b"secure-fed/1 graph" + parameters.session + agreed.digest + b"".join(secrets)).digest()


@lru_cache(maxsize=4)
def _graph(members: tuple[int, ...], neighbours: int, seed: bytes) -> Graph:
    if neighbours >= len(members) - 1:
        return complete(members)
    return ring(members, neighbours, seed)
