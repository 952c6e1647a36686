"""A client's checks of a list of survivors before it opens any share, using only its own state.

The list determines which of two secrets is opened for each neighbour: the seed of a survivor, or the mask key of a client that
dropped out. A server that obtained both secrets of one client would read its vector, and a server that could invent lists would
cut the sum into small sums. So the client refuses a list

- without itself, or with a client that is not on the roster (in an active session: that has not dealt its shares);
- shorter than `survivors`, or with fewer than `threshold` holders of its own shares;
- with a neighbour that never dealt shares, so never completed the stage before the masks;
- on a ring: whose survivors are no longer certainly connected, given its `window`, since each part would have its own sum.

In an active session every client signs, with its vector, the list of the clients that have dealt shares, which shows with whom
it masked; and it signs only one list of survivors together with that list, ever (`Sessions`). A client refuses a list of
survivors

- with a client near it that did not sign the same list of the clients that have dealt (`near`: whose shares it holds, or with
  whom it shares a mask), so that every counted edge is a mask that both sides have added;
- where clients choose: with fewer than `partners` of the first choices of a client whose shares it holds, or of its own;
- without the signatures of `signers` clients, among them `threshold` holders of its own shares.

On a complete graph 2 threshold > h + c, and where clients choose 2 survivors > n + C, so honest clients open shares for only
one pair of lists. On a complete graph all honest survivors share masks with each other, so no part of them has its own sum; for
sessions where clients choose, `chosen` has the proof.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache

from protocols.chosen import Chosen
from protocols.dealing import Held
from protocols.errors import Aborted, Tampering
from protocols.messages import Confirmations, Opened, Survivors
from protocols.parameters import Parameters
from protocols.roster import Identities, Topology, signs, states


@lru_cache(maxsize=4)
def listed(data: bytes, parameters: Parameters) -> Survivors:
    """The list encoded in these bytes."""
    return Survivors.from_bytes(data, parameters)


def check_survivors(
    survivors: frozenset[int], me: int, parameters: Parameters, graph: Topology, held: Collection[int], window: int
) -> None:
    """Tampering, or Aborted if too few clients are left, unless shares may be opened for this list."""
    if me not in survivors:
        raise Tampering("the list of survivors leaves out this client, which has sent its vector")
    strangers = survivors.difference(graph.order)
    if strangers:
        missing = "has not dealt its shares" if parameters.active else "is not on the roster"
        raise Tampering(f"client {min(strangers)} is listed as a survivor but {missing}")
    undealt = (survivors & frozenset(graph.owners(me))).difference(held)
    if undealt:
        raise Tampering(f"client {min(undealt)} is listed as a survivor but never dealt its shares")
    if len(survivors) < parameters.survivors:
        raise Aborted(f"{len(survivors)} survivors, and no sum of fewer than {parameters.survivors} is opened")
    holders = len(survivors.intersection(graph.holders(me)))
    if holders < parameters.threshold:
        raise Aborted(
            f"{holders} holders of this client's shares survive, fewer than the threshold of {parameters.threshold}"
        )
    if isinstance(graph, Chosen):
        for owner in (me, *graph.owners(me)):
            if owner in survivors:
                graph.require_partners(owner, survivors, parameters.partners)
    elif not graph.holds_together(survivors, window):
        raise Aborted(f"with {window} corrupt in a window of the ring, the survivors could be cut into separate sums")


def check_statements(
    statements: Mapping[int, bytes], expected: Collection[int], parameters: Parameters, known: Identities, dealt: bytes
) -> None:
    """Tampering unless exactly the expected clients signed, with their vectors, the list of dealers with this digest."""
    if set(statements) != set(expected):
        raise Tampering(
            "the signatures on the list of survivors are not those of exactly the survivors near this client"
        )
    identities = dict(known)
    for owner, signature in statements.items():
        if not states(owner, signature, parameters, identities[owner], dealt):
            raise Tampering(
                f"client {owner} is listed as a survivor but masked under another list of dealers than this client's"
            )


def open_shares(survivors: frozenset[int], held: Mapping[int, Held]) -> Opened:
    """For every neighbour that dealt shares, the share that the list requires."""
    return Opened(
        seeds={owner: share.seed.reveal() for owner, share in held.items() if owner in survivors},
        keys={owner: share.key.reveal() for owner, share in held.items() if owner not in survivors},
    )


def confirmed(
    signers: frozenset[int], me: int, survivors: frozenset[int], graph: Topology, parameters: Parameters
) -> None:
    """Tampering or Aborted unless enough of the survivors have signed the list."""
    everybody = signers | {me}  # this client has signed, whether or not the server returns its signature
    strangers = everybody - survivors
    if strangers:
        raise Tampering(f"client {min(strangers)} signed a list of survivors that does not contain it")
    holders = len(everybody.intersection(graph.holders(me)))
    if holders < parameters.threshold or len(everybody) < parameters.signers:
        raise Aborted(
            f"the list of survivors is signed by {holders} holders of this client's shares and {len(everybody)} clients in "
            f"all, fewer than {parameters.threshold} and {parameters.signers}"
        )


@lru_cache(maxsize=4)
def signers(
    data: bytes, parameters: Parameters, identities: Identities, dealt: bytes, survivors: bytes
) -> frozenset[int]:
    """The clients that signed the lists with these digests. Tampering if a client signed others."""
    known = dict(identities)
    signatures = Confirmations.from_bytes(data, parameters).signatures
    for owner, signature in signatures.items():
        if owner not in known or not signs(owner, signature, parameters, known[owner], dealt, survivors):
            raise Tampering(f"client {owner} has not signed the list of survivors that was shown here")
    return frozenset(signatures)
