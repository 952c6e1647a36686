"""What a client asks of a list of survivors before it opens a single share, judged on its own state alone.

The list says which of two secrets is opened of each neighbour: the seed of a survivor, or the mask key of one that dropped. A
server that could have both opened of one client would read its vector, and one that could make up lists would cut the sum
into small ones. So the client refuses a list

- without itself, or with somebody who is not on the roster;
- shorter than `survivors`, or with fewer than `threshold` of those who hold its own shares;
- with a neighbour that never dealt shares, so never completed the stage before the masks;
- on which the survivors no longer hang together against its `window`, since each part would then have a sum of its own.

In an active session the list must also be the one that the others were shown. Each client signs one list for one roster, and
the client asks for valid signatures of `threshold` of its h neighbours and of the same share, threshold / h, of the whole
roster. As 2 threshold > h + c, and a share c / h of all are corrupt at most, more than half of the honest clients are among the
signers of every list that is accepted: so there is one such list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from functools import lru_cache

from protocols.dealing import Held
from protocols.errors import Aborted, Tampering
from protocols.graph import Graph
from protocols.keys import verify
from protocols.messages import Confirm, Confirmations, Opened, Survivors
from protocols.parameters import Parameters
from protocols.roster import Identities


@lru_cache(maxsize=4)
def listed(data: bytes, parameters: Parameters) -> frozenset[int]:
    """The survivors in these bytes."""
    return frozenset(Survivors.from_bytes(data, parameters).clients)


def check_survivors(
    survivors: frozenset[int], me: int, parameters: Parameters, graph: Graph, held: Collection[int], window: int
) -> None:
    """Tampering, or Aborted if too few are left, unless shares may be opened for this list."""
    if me not in survivors:
        raise Tampering("the list of survivors leaves out this client, which has sent its vector")
    strangers = survivors.difference(graph.order)
    if strangers:
        raise Tampering(f"client {min(strangers)} is listed as a survivor and is not on the roster")
    neighbours = frozenset(graph.neighbours(me))
    undealt = (survivors & neighbours).difference(held)
    if undealt:
        raise Tampering(f"client {min(undealt)} is listed as a survivor and never dealt its shares")
    if len(survivors) < parameters.survivors:
        raise Aborted(f"{len(survivors)} survivors, and no sum of fewer than {parameters.survivors} is opened")
    holders = len(survivors & neighbours)
    if holders < parameters.threshold:
        raise Aborted(f"{holders} holders of its shares survive, fewer than the threshold of {parameters.threshold}")
    if not graph.holds_together(survivors, window):
        raise Aborted(f"with {window} corrupt in a window of the ring, the survivors could be cut into separate sums")


def open_shares(survivors: frozenset[int], held: Mapping[int, Held]) -> Opened:
    """Of every neighbour that dealt its shares, the one that the list calls for."""
    return Opened(
        seeds={owner: share.seed.reveal() for owner, share in held.items() if owner in survivors},
        keys={owner: share.key.reveal() for owner, share in held.items() if owner not in survivors},
    )


def quorum(threshold: int, neighbours: int, members: int) -> int:
    """How many of the other members must sign a list: the same share of them as `threshold` is of the neighbours."""
    return -(-threshold * (members - 1) // neighbours)


def confirmed(signers: frozenset[int], me: int, survivors: frozenset[int], graph: Graph, threshold: int) -> None:
    """Tampering or Aborted unless enough of the others have signed the list."""
    others = signers - {me}
    strangers = others - survivors
    if strangers:
        raise Tampering(f"client {min(strangers)} signs a list of survivors on which it is not")
    neighbours = graph.neighbours(me)
    near, needed = len(others.intersection(neighbours)), quorum(threshold, len(neighbours), len(graph.order))
    if near < threshold or len(others) < needed:
        raise Aborted(
            f"the list of survivors is signed by {near} neighbours and {len(others)} clients in all, "
            f"fewer than {threshold} and {needed}"
        )


@lru_cache(maxsize=4)
def signers(
    data: bytes, parameters: Parameters, identities: Identities, roster: bytes, survivors: bytes
) -> frozenset[int]:
    """Who signed this list; `roster` is a digest, `survivors` the list's bytes. Tampering if somebody signed another."""
    known, digest = dict(identities), hashlib.sha256(survivors).digest()
    signatures = Confirmations.from_bytes(data, parameters).signatures
    for owner, signature in signatures.items():
        if owner not in known or not signs(owner, signature, parameters, known[owner], roster, digest):
            raise Tampering(f"client {owner} has not signed the list of survivors that was shown here")
    return frozenset(signatures)


def signs(
    owner: int, signature: bytes, parameters: Parameters, identity: bytes, roster: bytes, survivors: bytes
) -> bool:
    """Whether it is the owner's signature over the list with this digest, after the roster with this digest."""
    return verify(identity, signature, "survivors", parameters.session, Confirm.signed(owner, roster, survivors))
