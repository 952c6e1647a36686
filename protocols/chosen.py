"""The graph of an active session: every client chooses for itself who holds its shares and with whom it shares a mask.

Each client draws a seed of 32 bytes from its operating system and names it in its signed advertisement. The seed stands for k
other clients among those invited, in an order: `choices`. All k hold shares of the client's secrets; with the first m = k / 2,
and with those who have it among their first m, it shares a mask, so about k masks each. Who is invited, with which identities,
is fixed by the session before anybody chooses. So whatever corrupt clients and the server do, the choice of an honest client is
uniform, and independent of every other honest client's.

What a server that lies can read
--------------------------------

L is the list of survivors for which some honest client opened shares, D the list of those who dealt shares. There is one pair
(D, L) that honest clients open for: each signs one pair, each asks for n_min signatures, and 2 n_min > n + C. F are the honest
signers, at least n_min - C.

The seed of an honest j in L is opened by an honest holder at least, since t > c, its mask key by nobody. So the server can take
all masks off y_j but those with honest members of L. It reads the sum over a set K of honest members of L only if each of these
masks is in y_i of one i in K and in y_j of another j in K, where they cancel. A mask that one side lacks, since the server
withheld the other's choice or delivery, cancels nowhere: it hides the vector it is on.

Before the vectors, every client has read D with everybody's seeds: its own is right, and it masks with all in D that it chose
or that chose it. It signs D with its vector. An honest client that signs (D, L) has checked

    (1) for j in L whose shares it holds or with whom it shares a mask: j signed this D;
    (2) for j in L whose shares it holds, and for itself: at least u of j's first m choices are in L.

Say that those who passed (1) with an honest signer, and the honest signers themselves, are *vouched*: their seeds in D are
right and they have added every mask they should. With c' the most corrupt clients among anybody's first m choices, let a = u
- c'.

- K is vouched, by (1), as honest holders sign before they open. It has at least a + 1 members: by (2) i in K has at least a
  honest choices in L, its masks with these are in y_i, so they are in K.
- If K holds all of F, it is the sum of at least n_min - C honest clients that the protocol is there to release, and there is
  one such K. Else take r in F outside K. By (2) r has at least a honest choices in L, vouched by (1), since r shares masks
  with them. None is in K: it would have added its mask with r. Let R be these and F outside K. It has at least a + 1 members,
  and at least n_min - C - |K|.
- No member of K has a member of R among its first m choices, nor the other way round: both sides would have added the mask.

So a smaller sum is read only if there are disjoint sets K and R of honest clients, of s >= a + 1 and r >= max(a + 1, n_min -
C - s) members, none of whom chose into the other. For two given sets of that many that has probability

    [C(n - 1 - r, m) / C(n - 1, m)]^s  [C(n - 1 - s, m) / C(n - 1, m)]^r,    C(x, y) being x! / (y! (x - y)!)

and the server picks the sets after it has seen all choices: (n - C)! / (s! r! (n - C - s - r)!) pairs for every s. `choice.py`
adds all of them up, and keeps the sum below 2^-41.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from protocols.errors import Aborted, ParameterError
from protocols.graph import below, stream


def choices(seed: bytes, clients: tuple[int, ...], chooser: int, k: int) -> tuple[int, ...]:
    """k others among `clients` (ascending), in the order in which the seed of 32 bytes draws them.

    Given a uniform seed every order of every k is equally likely, save for what a keystream differs from true randomness.
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
class Chosen:
    """The graph on the members of a session, from what each of them chose among all who were invited."""

    chosen: Mapping[int, tuple[int, ...]]
    masked: int  # m

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(sorted(self.chosen))

    def holders(self, member: int) -> tuple[int, ...]:
        """Who hold its shares, ascending."""
        return self._present(self.chosen[member])

    def owners(self, member: int) -> tuple[int, ...]:
        """Whose shares it holds, ascending."""
        return tuple(self._choosers[0].get(member, ()))

    def firsts(self, member: int) -> tuple[int, ...]:
        """With whom it shares a mask because it chose them."""
        return self._present(self.chosen[member][: self.masked])

    def first_of(self, member: int) -> tuple[int, ...]:
        """With whom it shares a mask because they chose it."""
        return tuple(self._choosers[1].get(member, ()))

    def partners(self, member: int) -> tuple[int, ...]:
        """All with whom it shares a mask, ascending."""
        return tuple(sorted({*self.firsts(member), *self.first_of(member)}))

    def require_partners(self, member: int, present: Collection[int], least: int) -> None:
        """Aborted if fewer than `least` of those whom the member chose to mask with are present."""
        left = len(set(present).intersection(self.firsts(member)))
        if left < least:
            raise Aborted(f"{left} of the clients that client {member} chose to mask with are left, fewer than {least}")

    def _present(self, some: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(one for one in some if one in self.chosen))

    @cached_property
    def _choosers(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """By chosen member: who has it among all choices, and among the first m."""
        every, first = dict[int, list[int]](), dict[int, list[int]]()
        for chooser in self.order:
            for place, other in enumerate(self.chosen[chooser]):
                if other in self.chosen:
                    every.setdefault(other, []).append(chooser)
                    if place < self.masked:
                        first.setdefault(other, []).append(chooser)
        return every, first
