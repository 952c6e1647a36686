"""The secrets that the server rebuilds from opened shares, and the masks that it removes from the sum with them.

The sum of the masked vectors of the survivors S contains, beside the plain sum, the self mask of every s in S, and for every
client d that dealt shares and then dropped out, the masks that its neighbours in S added for it. So one secret of each client
is rebuilt: the seed of a survivor, checked against its commitment, or the mask key of a client that dropped out, checked
against its public key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from protocols.chosen import Chosen
from protocols.errors import Aborted, Misdealt, ProtocolError, Tampering
from protocols.keys import AgreementKey, Mask, Secret, belongs, commitment, pair_mask
from protocols.messages import Opened
from protocols.parameters import Parameters
from protocols.roster import Agreed, Topology
from protocols.shamir import Rebuilder

Near = Callable[[int], Collection[int]]


@dataclass(frozen=True)
class Ballot:
    """The secret to rebuild for each client, and the shares of it received so far."""

    graph: Topology
    survivors: frozenset[int]
    dropped: frozenset[int]  # dealt shares, and sent no vector
    shares: dict[int, dict[int, bytes]] = field(default_factory=dict, repr=False)  # by owner, by holder

    def asked(self, holder: int) -> tuple[frozenset[int], frozenset[int]]:
        """The clients whose seeds, and the clients whose mask keys, this holder must open shares of."""
        owners = frozenset(self.graph.owners(holder))
        return owners & self.survivors, owners & self.dropped

    def add(self, holder: int, opened: Opened) -> None:
        for shares in (opened.seeds, opened.keys):
            for owner, share in shares.items():
                self.shares.setdefault(owner, {})[holder] = share

    def enough(self, holders: Collection[int], threshold: int) -> None:
        """Aborted if these holders cannot rebuild some needed secret."""
        present = frozenset(holders)
        for owner in sorted(self.survivors | self.dropped):
            left = len(present.intersection(self.graph.holders(owner)))
            if left < threshold and (
                owner in self.survivors or not self.survivors.isdisjoint(self.graph.partners(owner))
            ):
                raise Aborted(f"{left} holders of the shares of client {owner} are left, fewer than {threshold}")


def core(graph: Topology, members: Collection[int], threshold: int, partners: int = 0) -> frozenset[int]:
    """The largest subset of `members` in which each has at least `threshold` holders, and where clients choose, also `partners`
    of its first m choices.

    A client outside it would find too few and stop, after its neighbours had relied on it.
    """
    needs: list[tuple[Near, Near, int]] = [(graph.holders, graph.owners, threshold)]
    if isinstance(graph, Chosen):
        needs.append((graph.firsts, graph.first_of, partners))
    left = set(members)
    degrees = [{member: len(left.intersection(near(member))) for member in left} for near, _, _ in needs]
    leaving = [member for member in left if any(d[member] < n[2] for d, n in zip(degrees, needs, strict=True))]
    left.difference_update(leaving)
    while leaving:
        gone = leaving.pop()
        for degree, (_, towards, least) in zip(degrees, needs, strict=True):
            for other in left.intersection(towards(gone)):
                degree[other] -= 1
                if degree[other] < least:
                    left.remove(other)
                    leaving.append(other)
    return frozenset(left)


def masks_left(
    parameters: Parameters, agreed: Agreed, commitments: Mapping[int, bytes], ballot: Ballot
) -> tuple[list[Mask], frozenset[int]]:
    """The masks to add to the sum so that no mask is left in it, and the clients that opened wrong shares.

    Aborted if too few shares of some secret have arrived, Tampering if no `threshold` of them agree with the value that its
    owner published.
    """
    session, rebuild = parameters.session, _Rebuilding(parameters.threshold, ballot)
    masks: list[Mask] = []
    try:
        for owner in sorted(ballot.survivors):
            masks.append((rebuild(owner, _committed(commitments[owner], session, owner)), -1))
        for owner in sorted(ballot.dropped):
            others = ballot.survivors.intersection(ballot.graph.partners(owner))
            if others:
                secret = rebuild(owner, _public(agreed.adverts[owner].mask))
                masks.extend(_of_a_pair(secret, agreed, session, owner, other) for other in sorted(others))
                del secret
    except ProtocolError:
        masks.clear()  # the error keeps this frame alive, and with it the rebuilt secrets
        raise
    return masks, frozenset(rebuild.suspects)


def _of_a_pair(secret: Secret, agreed: Agreed, session: bytes, owner: int, other: int) -> Mask:
    """The mask that `owner`, whose mask key is known, would have added for `other`."""
    return pair_mask(AgreementKey.from_secret(secret), agreed.adverts[other].mask, session, owner, other)


class _Rebuilding:
    """Rebuilds one secret after the other, without the shares of holders whose earlier shares were wrong."""

    def __init__(self, threshold: int, ballot: Ballot) -> None:
        self._threshold, self._shares = threshold, ballot.shares
        self._rebuilder = Rebuilder()
        self.suspects: set[int] = set()

    def __call__(self, owner: int, fits: Callable[[Secret], bool]) -> Secret:
        shares = self._shares.get(owner, {})
        trusted = {holder: share for holder, share in shares.items() if holder not in self.suspects}
        if self._threshold <= len(trusted) < len(shares):
            with suppress(Tampering):  # a client that dealt bad shares may have made honest holders suspects
                return self._rebuild(owner, trusted, fits)
        return self._rebuild(owner, shares, fits)

    def _rebuild(self, owner: int, shares: Mapping[int, bytes], fits: Callable[[Secret], bool]) -> Secret:
        try:
            secret, wrong = self._rebuilder.rebuild(shares, self._threshold, fits)
        except Tampering as error:
            raise Misdealt(error.what, who=f"client {owner}") from error
        except ProtocolError as error:
            raise type(error)(error.what, who=f"the shares of client {owner}") from error
        self.suspects.update(wrong)
        return secret


def _committed(published: bytes, session: bytes, owner: int) -> Callable[[Secret], bool]:
    return lambda secret: commitment(secret, session, "seed", owner) == published


def _public(published: bytes) -> Callable[[Secret], bool]:
    return lambda secret: belongs(secret, published)
