"""Which clients share secrets: all with all, or each with its nearest places on a ring in random order.

The ring is for passive sessions, where the server delivers all dealt shares, so that every survivor has masked with each of its
neighbours among the survivors. Where the server may withhold deliveries, clients choose their neighbours themselves: see
`chosen`.

The ring is a Harary graph: on a random permutation of the members, two are neighbours if their places differ by at most k / 2
around the ring. The permutation is a pure function of the members and a seed of 32 bytes, the same on every machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from protocols.errors import ParameterError


@dataclass(frozen=True)
class Graph:
    """Members in ring order, and each one's number of neighbours. Made by `complete` and `ring`."""

    order: tuple[int, ...]
    k: int

    @property
    def complete(self) -> bool:
        """Whether all members are neighbours of all others."""
        return self.k >= len(self.order) - 1

    def neighbours(self, member: int) -> tuple[int, ...]:
        """The neighbours of this member, ascending, without itself."""
        if member not in self._known:
            self._known[member] = self._found(member)
        return self._known[member]

    def _found(self, member: int) -> tuple[int, ...]:
        place = self._places.get(member)
        if place is None:
            raise ParameterError(f"{member} is not one of the {len(self.order)} members of the graph")
        if self.complete:
            return tuple(other for other in self._ascending if other != member)
        half, count = self.k // 2, len(self.order)
        steps = (*range(-half, 0), *range(1, half + 1))
        return tuple(sorted(self.order[(place + step) % count] for step in steps))

    def holders(self, member: int) -> tuple[int, ...]:
        """The holders of its shares: here and in the next methods, its neighbours."""
        return self.neighbours(member)

    def owners(self, member: int) -> tuple[int, ...]:
        """The members whose shares it holds."""
        return self.neighbours(member)

    def partners(self, member: int) -> tuple[int, ...]:
        """The members with whom it shares a mask."""
        return self.neighbours(member)

    def holds_together(self, alive: Collection[int], window: int) -> bool:
        """Whether the honest members of `alive` are certainly connected through each other, wherever the corrupt members are.

        Corrupt members may be anywhere, at most `window` in any k / 2 consecutive places of the ring. On a ring the answer is
        True if every k / 2 consecutive places hold more than `window` alive members, whoever chose the missing members.

        Proof that True is right. Every k / 2 consecutive places then hold an honest alive member. Go around the ring from one
        honest alive member to the next, at places p < q. None of the places between is honest and alive; had they been k / 2
        or more, the first k / 2 of them would hold none, so q - p <= k / 2 and the two are neighbours. Each is a neighbour of
        the next all around the ring, so all are in one piece. And there is more than one: after a single honest alive member
        all other places of the ring would follow, which are more than k / 2.

        On a complete graph any two honest members are neighbours, so True is right however few are alive. Connection does not
        ensure that a sum has at least two honest members: for that, the least number of survivors must exceed the number of
        corrupt members by two.
        """
        if self.complete:
            return True
        asked = frozenset(alive), window
        if asked not in self._judged:
            self._judged[asked] = self._least(asked[0]) > window
        return self._judged[asked]

    def _least(self, present: Collection[int]) -> int:
        """The least number of present members in any k / 2 consecutive places."""
        row = np.fromiter((member in present for member in self.order), dtype=np.int64, count=len(self.order))
        half = self.k // 2
        upto = np.concatenate(([0], np.cumsum(np.concatenate((row, row[: half - 1])))))  # around the ring's end
        return int((upto[half:] - upto[:-half]).min())

    @cached_property
    def _known(self) -> dict[int, tuple[int, ...]]:
        """A cache of neighbours by member: every stage needs them."""
        return {}

    @cached_property
    def _judged(self) -> dict[tuple[frozenset[int], int], bool]:
        """A cache of `holds_together`: all members of a session check the same list of survivors."""
        return {}

    @cached_property
    def _places(self) -> dict[int, int]:
        return {member: place for place, member in enumerate(self.order)}

    @cached_property
    def _ascending(self) -> tuple[int, ...]:
        return tuple(sorted(self.order))


def complete(members: Collection[int]) -> Graph:
    """All members are neighbours of all others; the order is ascending."""
    return Graph(_distinct(members), max(len(members) - 1, 0))


def ring(members: Collection[int], k: int, seed: bytes) -> Graph:
    """k neighbours each, an even number, on the ring drawn by `seed` (32 bytes); complete where there are at most k others.

    Given a uniform seed every order of the ring is equally likely, up to the difference between a keystream and true
    randomness.
    """
    ascending = _distinct(members)
    if k >= len(ascending) - 1:
        return complete(ascending)
    if k < 2 or k % 2:
        raise ParameterError(f"neighbours is {k} on a ring of {len(ascending)}: choose an even number from 2 on")
    if len(seed) != 32:
        raise ParameterError(f"the seed of a graph has {len(seed)} bytes: give 32")
    order = list(ascending)
    words = stream(seed)
    for last in range(len(order) - 1, 0, -1):  # Fisher and Yates
        other = below(last + 1, words)
        order[last], order[other] = order[other], order[last]
    return Graph(tuple(order), k)


def _distinct(members: Collection[int]) -> tuple[int, ...]:
    ascending = tuple(sorted(set(members)))
    if len(ascending) != len(members):
        raise ParameterError("a member of the graph is given twice: give each once")
    return ascending


def stream(seed: bytes) -> Iterator[int]:
    """The ChaCha20 keystream of that key, nonce and counter zero, as little-endian words of 32 bits."""
    keystream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    while True:
        yield from np.frombuffer(keystream.update(bytes(4096)), dtype="<u4").tolist()


def below(limit: int, words: Iterator[int]) -> int:
    """Exactly uniform in 0 .. limit - 1: words beyond the last multiple of `limit` are skipped."""
    multiple = 2**32 - 2**32 % limit
    return next(word for word in words if word < multiple) % limit
