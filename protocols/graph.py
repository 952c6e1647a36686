"""Which clients share secrets: all with all, or each with some. A graph is complete, a ring, or chosen by the clients.

`Graph` is a complete graph, or a ring in random order. The ring is for passive sessions, where the server delivers all dealt
shares, so that every survivor has masked with each of its neighbours among the survivors. Where the server may withhold
deliveries, clients choose their neighbours themselves: `ChosenGraph`.

The ring is a Harary graph: on a random permutation of the members, two are neighbours if their places differ by at most k / 2
around the ring. The permutation is a pure function of the members and a seed of 32 bytes, the same on every machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from protocols.errors import Aborted, ParameterError


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
            place = self._places.get(member)
            if place is None:
                raise ParameterError(f"{member} is not one of the {len(self.order)} members of the graph")
            if self.complete:  # then the order is ascending
                self._known[member] = tuple(other for other in self.order if other != member)
            else:
                half, count = self.k // 2, len(self.order)
                steps = (*range(-half, 0), *range(1, half + 1))
                self._known[member] = tuple(sorted(self.order[(place + step) % count] for step in steps))
        return self._known[member]

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
            row = np.fromiter((member in asked[0] for member in self.order), dtype=np.int64, count=len(self.order))
            half = self.k // 2
            upto = np.concatenate(([0], np.cumsum(np.concatenate((row, row[: half - 1])))))  # around the ring's end
            self._judged[asked] = int((upto[half:] - upto[:-half]).min()) > window
        return self._judged[asked]

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


def choices(seed: bytes, clients: tuple[int, ...], chooser: int, k: int) -> tuple[int, ...]:
    """k others among `clients` (ascending), in the order in which the seed of 32 bytes draws them.

    Given a uniform seed every order of every k is equally likely, up to the difference between a keystream and true randomness.
    """
    if len(seed) != 32 or not 1 <= k < len(clients):
        raise ParameterError(
            f"{k} of {len(clients) - 1} others cannot be chosen by a seed of {len(seed)} bytes: give 32"
        )
    mine, words, drawn = bisect_left(clients, chooser), stream(seed), dict[int, None]()
    while len(drawn) < k:
        place = below(len(clients) - 1, words)
        drawn[place + (place >= mine)] = None
    return tuple(clients[place] for place in drawn)


@dataclass(frozen=True)
class ChosenGraph:
    """The graph of an active session: every client chooses the holders of its shares and its mask partners itself.

    Each client draws a seed of 32 bytes from its operating system and publishes it in its signed advertisement. The seed
    determines k other invited clients, in an order: `choices`. All k hold shares of the client's secrets. It shares a mask with
    the first m = k / 2 of them, and with the clients that have it among their first m, so each client has about k masks. The
    session fixes the invited clients and their identities before anybody chooses. So whatever corrupt clients and the server
    do, the choice of an honest client is uniform, and independent of every other honest client's choice.

    What a server that lies can read.

    L is the list of survivors for which some honest client opened shares, D the list of the clients that dealt shares. Honest
    clients open shares for only one pair (D, L): each signs one pair, each requires n_min signatures, and 2 n_min > n + C. F is
    the set of honest signers, at least n_min - C.

    At least one honest holder opens the seed of an honest j in L, since t > c; nobody opens its mask key. So the server can
    remove all masks from y_j except the masks with honest members of L. It reads the sum over a set K of honest members of L
    only if each of these masks is in y_i of one i in K and in y_j of another j in K, where they cancel. A mask that one side
    did not add, since the server withheld the other's choice or delivery, cancels nowhere: it hides the vector that contains
    it.

    Before the vectors are sent, every client has read D with everybody's seeds: its own seed there is right, and it masks with
    all members of D that it chose or that chose it. It signs D with its vector. An honest client that signs (D, L) has checked

        (1) for j in L whose shares it holds or with whom it shares a mask: j signed this D;
        (2) for j in L whose shares it holds, and for itself: at least u of j's first m choices are in L.

    Call the clients that passed (1) with an honest signer, and the honest signers themselves, *vouched*: their seeds in D are
    right and they have added every mask that they should. Let c' be the largest number of corrupt clients among anybody's first
    m choices, and a = u - c'.

    - K is vouched, by (1), as honest holders sign before they open. It has at least a + 1 members: by (2) i in K has at least a
      honest choices in L, its masks with these are in y_i, so they are in K.
    - If K contains all of F, its sum is the sum of at least n_min - C honest clients that the protocol is meant to release, and
      there is one such K. Otherwise take r in F outside K. By (2) r has at least a honest choices in L, vouched by (1), since r
      shares masks with them. None of these is in K: it would have added its mask with r. Let R be these choices and F outside
      K. It has at least a + 1 members, and at least n_min - C - |K|.
    - No member of K has a member of R among its first m choices, nor the reverse: both sides would have added the mask.

    So a smaller sum is read only if there are disjoint sets K and R of honest clients, of s >= a + 1 and r >= max(a + 1, n_min
    - C - s) members, such that no member of either chose a member of the other. For two given sets of these sizes this has
    probability

        [C(n - 1 - r, m) / C(n - 1, m)]^s  [C(n - 1 - s, m) / C(n - 1, m)]^r,    C(x, y) being x! / (y! (x - y)!)

    and the server picks the sets after it has seen all choices: (n - C)! / (s! r! (n - C - s - r)!) pairs for every s.
    `thresholds` adds up the probabilities of all pairs, and keeps the sum below 2^-41.
    """

    chosen: Mapping[int, tuple[int, ...]]  # by member of the session: its choices among all invited clients
    masked: int  # m

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(sorted(self.chosen))

    def holders(self, member: int) -> tuple[int, ...]:
        """The holders of its shares, ascending."""
        return self._present(self.chosen[member])

    def owners(self, member: int) -> tuple[int, ...]:
        """The members whose shares it holds, ascending."""
        return tuple(self._choosers[0].get(member, ()))

    def firsts(self, member: int) -> tuple[int, ...]:
        """The members with whom it shares a mask because it chose them."""
        return self._present(self.chosen[member][: self.masked])

    def first_of(self, member: int) -> tuple[int, ...]:
        """The members with whom it shares a mask because they chose it."""
        return tuple(self._choosers[1].get(member, ()))

    def partners(self, member: int) -> tuple[int, ...]:
        """All members with whom it shares a mask, ascending."""
        return tuple(sorted({*self.firsts(member), *self.first_of(member)}))

    def require_partners(self, member: int, present: Collection[int], least: int) -> None:
        """Aborted if fewer than `least` of the member's first m choices are present."""
        left = len(set(present).intersection(self.firsts(member)))
        if left < least:
            raise Aborted(f"{left} of the neighbours that client {member} chose are left, fewer than {least}")

    def _present(self, some: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(one for one in some if one in self.chosen))

    @cached_property
    def _choosers(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """For each member: the members that have it among all their choices, and among their first m."""
        every, first = dict[int, list[int]](), dict[int, list[int]]()
        for chooser in self.order:
            for place, other in enumerate(self.chosen[chooser]):
                if other in self.chosen:
                    every.setdefault(other, []).append(chooser)
                    if place < self.masked:
                        first.setdefault(other, []).append(chooser)
        return every, first


Topology = Graph | ChosenGraph


def stream(seed: bytes) -> Iterator[int]:
    """The ChaCha20 keystream of that key, nonce and counter zero, as little-endian words of 32 bits."""
    keystream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    while True:
        yield from np.frombuffer(keystream.update(bytes(4096)), dtype="<u4").tolist()


def below(limit: int, words: Iterator[int]) -> int:
    """Exactly uniform in 0 .. limit - 1: words beyond the last multiple of `limit` are skipped."""
    multiple = 2**32 - 2**32 % limit
    return next(word for word in words if word < multiple) % limit
