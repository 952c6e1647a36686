"""The graph of an active session: every client chooses the holders of its shares and its mask partners itself.

Each client draws a seed of 32 bytes from its operating system and publishes it in its signed advertisement. The seed determines
k other invited clients, in an order: `choices`. All k hold shares of the client's secrets. It shares a mask with the first m =
k / 2 of them, and with the clients that have it among their first m, so each client has about k masks. The session fixes the
invited clients and their identities before anybody chooses. So whatever corrupt clients and the server do, the choice of an
honest client is uniform, and independent of every other honest client's choice.

What a server that lies can read
--------------------------------

L is the list of survivors for which some honest client opened shares, D the list of the clients that dealt shares. Honest
clients open shares for only one pair (D, L): each signs one pair, each requires n_min signatures, and 2 n_min > n + C. F is the
set of honest signers, at least n_min - C.

At least one honest holder opens the seed of an honest j in L, since t > c; nobody opens its mask key. So the server can remove
all masks from y_j except the masks with honest members of L. It reads the sum over a set K of honest members of L only if each
of these masks is in y_i of one i in K and in y_j of another j in K, where they cancel. A mask that one side did not add, since
the server withheld the other's choice or delivery, cancels nowhere: it hides the vector that contains it.

Before the vectors are sent, every client has read D with everybody's seeds: its own seed there is right, and it masks with all
members of D that it chose or that chose it. It signs D with its vector. An honest client that signs (D, L) has checked

    (1) for j in L whose shares it holds or with whom it shares a mask: j signed this D;
    (2) for j in L whose shares it holds, and for itself: at least u of j's first m choices are in L.

Call the clients that passed (1) with an honest signer, and the honest signers themselves, *vouched*: their seeds in D are right
and they have added every mask that they should. Let c' be the largest number of corrupt clients among anybody's first m
choices, and a = u - c'.

- K is vouched, by (1), as honest holders sign before they open. It has at least a + 1 members: by (2) i in K has at least a
  honest choices in L, its masks with these are in y_i, so they are in K.
- If K contains all of F, its sum is the sum of at least n_min - C honest clients that the protocol is meant to release, and
  there is one such K. Otherwise take r in F outside K. By (2) r has at least a honest choices in L, vouched by (1), since r
  shares masks with them. None of these is in K: it would have added its mask with r. Let R be these choices and F outside K. It
  has at least a + 1 members, and at least n_min - C - |K|.
- No member of K has a member of R among its first m choices, nor the reverse: both sides would have added the mask.

So a smaller sum is read only if there are disjoint sets K and R of honest clients, of s >= a + 1 and r >= max(a + 1, n_min -
C - s) members, such that no member of either chose a member of the other. For two given sets of these sizes this has
probability

    [C(n - 1 - r, m) / C(n - 1, m)]^s  [C(n - 1 - s, m) / C(n - 1, m)]^r,    C(x, y) being x! / (y! (x - y)!)

and the server picks the sets after it has seen all choices: (n - C)! / (s! r! (n - C - s - r)!) pairs for every s. `choice.py`
adds up the probabilities of all pairs, and keeps the sum below 2^-41.
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
class Chosen:
    """The graph on the members of a session, from each member's choices among all invited clients."""

    chosen: Mapping[int, tuple[int, ...]]
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
