"""The server of one session: bytes in, bytes out, no input or output of its own.

It accepts one message from each client in each stage, in any order, and its caller decides when a stage ends. Masked vectors
are added to one accumulator as they arrive and are not kept. Its state at any time is the view of the honest-but-curious server
of the threat model; it can compute only the sum of the survivors, and only after `threshold` of each one's neighbours have
opened their shares.

The sum of the masked vectors of the survivors S contains, beside the plain sum, the self mask of every s in S, and for every
client d that dealt shares and then dropped out, the masks that its neighbours in S added for it. So one secret of each client
is rebuilt from opened shares: the seed of a survivor, checked against its commitment, or the mask key of a client that dropped
out, checked against its public key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from protocols.errors import Aborted, MessageError, Misdealt, ParameterError, ProtocolError, Tampering
from protocols.graph import ChosenGraph, Topology, complete
from protocols.keys import AgreementKey, Mask, Secret, belongs, commitment, pair_mask, registry_digest
from protocols.masking import Words, add_masks
from protocols.parameters import Parameters, stages
from protocols.roster import (
    Agreed,
    Identities,
    authentic,
    dealers_graph,
    judged,
    near,
    roster_graph,
    signs,
    states,
    usable,
)
from protocols.sharing import Rebuilder
from protocols.wire import (
    Advertise,
    Buffer,
    Confirm,
    Confirmations,
    Delivery,
    Masked,
    Opened,
    Roster,
    Shares,
    Survivors,
    word,
)

Near = Callable[[int], Collection[int]]
_PROTECTED = "no sum was released, and every vector stays under its masks"


class Server:
    """The server's side of one session. `identities`: the registry's public keys, needed in an active session.

    An error in `receive` leaves the session as it was. An error in `close` ends it: the accumulator is wiped, no sum is
    released.
    """

    def __init__(
        self, parameters: Parameters, *, identities: Mapping[int, bytes] | None = None, threads: int | None = None
    ) -> None:
        self.parameters = parameters
        identities = {} if identities is None else identities
        if parameters.active and registry_digest(identities, parameters.clients) != parameters.registry:
            raise ParameterError("the server's identities are not those of the session's registry")
        known = parameters.clients if parameters.active else ()
        self._identities: Identities = tuple((client, identities[client]) for client in known)
        self._known = dict(self._identities)
        self._threads = threads
        self._stages = stages(parameters)
        self.stage = self._stages[0]  # one of `stages`, then "done", or "aborted"
        self.survivors: tuple[int, ...] = ()  # the clients in the sum: known when "mask" is closed
        self.suspects: frozenset[int] = frozenset()  # opened a wrong share, or were dealt one
        self._waiting = set(parameters.clients)  # may still send in this stage
        self._heard: set[int] = set()  # have sent
        self._points: set[int] = set()
        self._adverts: dict[int, Advertise] = {}
        self._commitments: dict[int, bytes] = {}
        self._mail: dict[int, dict[int, bytes]] = {}  # by receiver, by sender
        self._statements: dict[int, bytes] = {}
        self._signatures: dict[int, bytes] = {}
        self._ballot = Ballot(complete(()), frozenset(), frozenset())
        self._accumulator: Words = np.zeros(0, dtype=word(parameters))

    @property
    def waiting(self) -> frozenset[int]:
        """The clients that may still send in this stage."""
        return frozenset(self._waiting)

    def receive(self, sender: int, message: Buffer) -> None:
        """Accept one client's message of this stage. MessageError if it is invalid or out of turn; Tampering if it lies."""
        steps = self._stage_steps()
        if steps is None:
            raise MessageError(f"the session is {self.stage}: it accepts no more messages", who=f"client {sender}")
        if sender not in self._waiting:
            repeated = "has sent its message already" if sender in self._heard else "takes no part"
            raise MessageError(f"client {sender} {repeated} in this stage", who=f"client {sender}", stage=self.stage)
        try:
            steps[0](sender, message)  # changes nothing until all is checked
        except ProtocolError as error:
            raise type(error)(error.what, who=f"client {sender}", stage=self.stage, protected="left out") from error
        self._waiting.discard(sender)
        self._heard.add(sender)

    def close(self) -> dict[int, bytes]:
        """End this stage. Returns the next stage's message for each client; nothing after the last stage: the sum is ready."""
        steps = self._stage_steps()
        if steps is None:
            raise MessageError(f"the session is {self.stage}: there is no stage to close")
        stage = self.stage
        try:
            sent = steps[1]()
        except BaseException as error:
            self._abort()
            if isinstance(error, ProtocolError):
                raise type(error)(error.what, who=error.who, stage=stage, protected=_PROTECTED) from error
            raise
        following = (*self._stages, "done")
        self.stage = following[following.index(stage) + 1]
        self._waiting, self._heard = set(sent), set()
        return sent

    def total(self) -> Words:
        """(length,) the sum of the survivors' vectors modulo 2^bits; read-only. MessageError unless the session is done."""
        if self.stage != "done":
            raise MessageError(f"there is no sum: the session is at {self.stage!r}", protected=_PROTECTED)
        return self._accumulator

    def _stage_steps(self) -> tuple[Callable[[int, Buffer], None], Callable[[], dict[int, bytes]]] | None:
        """How a message of this stage is taken, and how the stage ends; None after the last stage."""
        return {
            "advertise": (self._take_advert, self._show_roster),
            "share": (self._take_shares, self._deliver),
            "mask": (self._take_vector, self._list_survivors),
            "consistency": (self._take_signature, self._show_signatures),
            "unmask": (self._take_opened, self._unmask),
        }.get(self.stage)

    def _take_advert(self, sender: int, message: Buffer) -> None:
        advert = Advertise.from_bytes(message, self.parameters, sender)
        points = usable(sender, advert)
        if not self._points.isdisjoint(points):
            raise Tampering(f"client {sender} advertises a key of another client")
        authentic(sender, advert, self.parameters, self._known)
        self._points.update(points)
        self._adverts[sender] = advert

    def _show_roster(self) -> dict[int, bytes]:
        if not self.parameters.chosen:
            message = Roster(self._adverts).to_bytes(self.parameters)
            self._agreed: Agreed = judged(message, self.parameters, self._identities)
            self._graph: Topology = roster_graph(self.parameters, self._agreed)
            return dict.fromkeys(self._agreed.members, message)
        self._enough(len(self._adverts), "take part")
        self._agreed = Agreed(tuple(sorted(self._adverts)), self._adverts, b"")
        self._graph = dealers_graph(self._choices(self._agreed.members), self.parameters)
        rosters = {}
        for member in self._agreed.members:  # its choices, the clients that chose it, and itself
            shown = {member, *self._graph.holders(member), *self._graph.owners(member)}
            rosters[member] = Roster({one: self._adverts[one] for one in shown}).to_bytes(self.parameters)
        return rosters

    def _choices(self, members: Collection[int]) -> dict[int, bytes]:
        return {member: self._adverts[member].choice for member in sorted(members)}

    def _take_shares(self, sender: int, message: Buffer) -> None:
        shares = Shares.from_bytes(message, self.parameters, sender)
        if tuple(shares.sealed) != self._graph.holders(sender):
            raise MessageError(f"client {sender} dealt its shares to others than exactly its neighbours")
        self._commitments[sender] = shares.commitment
        for receiver, sealed in shares.sealed.items():
            self._mail.setdefault(receiver, {})[sender] = sealed

    def _deliver(self) -> dict[int, bytes]:
        members = core(self._graph, self._heard, self.parameters.threshold, self.parameters.partners)
        self._enough(len(members), "have dealt shares to enough others")
        self._accumulator = np.zeros(self.parameters.length, dtype=word(self.parameters))
        mail, self._mail = self._mail, {}
        dealt = self._choices(members) if self.parameters.active else {}
        if self.parameters.active:
            self._graph = dealers_graph(dealt, self.parameters)
        self._members, self._digest = members, Delivery({}, dealt).digest
        return {
            receiver: Delivery({k: v for k, v in mail.get(receiver, {}).items() if k in members}, dealt).to_bytes(
                self.parameters
            )
            for receiver in sorted(members)
        }

    def _take_vector(self, sender: int, message: Buffer) -> None:
        masked = Masked.from_bytes(message, self.parameters, sender)
        if self.parameters.active:
            if not states(sender, masked.signature, self.parameters, self._known[sender], self._digest):
                raise Tampering(f"client {sender} signed another list than that of the clients that dealt shares")
            self._statements[sender] = masked.signature
        np.add(self._accumulator, masked.vector, out=self._accumulator)

    def _list_survivors(self) -> dict[int, bytes]:
        self._enough(len(self._heard), "have sent their vectors")
        survivors = frozenset(self._heard)
        self._ballot = Ballot(self._graph, survivors, self._members - survivors)
        self._ballot.enough(survivors, self.parameters.threshold)
        if isinstance(self._graph, ChosenGraph):
            for survivor in sorted(survivors):
                self._graph.require_partners(survivor, survivors, self.parameters.partners)
        self.survivors = tuple(sorted(survivors))
        self._list = Survivors(self.survivors).digest
        lists = {}
        for survivor in self.survivors:
            around = near(survivor, self._graph, self.survivors) if self.parameters.active else ()
            statements = {one: self._statements[one] for one in around}
            lists[survivor] = Survivors(self.survivors, statements).to_bytes(self.parameters)
        return lists

    def _take_signature(self, sender: int, message: Buffer) -> None:
        signature = Confirm.from_bytes(message, self.parameters, sender).signature
        if not signs(sender, signature, self.parameters, self._known[sender], self._digest, self._list):
            raise Tampering(f"client {sender} signed another list than that of the survivors")
        self._signatures[sender] = signature

    def _show_signatures(self) -> dict[int, bytes]:
        needed = self.parameters.signers
        if len(self._heard) < needed:
            raise Aborted(f"{len(self._heard)} clients signed the list of survivors, fewer than the {needed} needed")
        self._ballot.enough(self._heard, self.parameters.threshold)
        message = Confirmations(self._signatures).to_bytes(self.parameters)
        return dict.fromkeys(sorted(self._heard), message)

    def _take_opened(self, sender: int, message: Buffer) -> None:
        opened = Opened.from_bytes(message, self.parameters, sender)
        if (frozenset(opened.seeds), frozenset(opened.keys)) != self._ballot.asked(sender):
            raise MessageError(f"client {sender} opened other shares than the list of survivors requires")
        self._ballot.add(sender, opened)

    def _unmask(self) -> dict[int, bytes]:
        self._ballot.enough(self._heard, self.parameters.threshold)
        masks, self.suspects = masks_left(self.parameters, self._agreed, self._commitments, self._ballot)
        add_masks(self._accumulator, masks, threads=self._threads)
        del masks  # an error below would keep this frame alive, and the secrets in it
        self._check_size()
        self._ballot.shares.clear()
        self._accumulator.flags.writeable = False
        return {}

    def _check_size(self) -> None:
        """Tampering if the sum exceeds the number of survivors times the bound: vectors within the bound cannot."""
        most = len(self.survivors) * self.parameters.bound
        signed = self._accumulator.view(f"i{self.parameters.bits // 8}")
        if most and not -most <= signed.min() <= signed.max() <= most:
            raise Tampering(f"a coordinate of the sum is beyond {most}, so some vector was beyond the session's bound")

    def _enough(self, count: int, done: str) -> None:
        least = max(self.parameters.survivors, self.parameters.threshold + 1)
        if count < least:
            raise Aborted(f"{count} clients {done}, fewer than the {least} that a sum needs")

    def _abort(self) -> None:
        """Wipe everything from which a sum could be computed."""
        self.stage = "aborted"
        self._accumulator[:] = 0
        self._waiting, self._mail, self._commitments = set(), {}, {}
        self._ballot.shares.clear()


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
    if isinstance(graph, ChosenGraph):
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
                masks.extend(  # the masks that the owner would have added
                    pair_mask(AgreementKey.from_secret(secret), agreed.adverts[other].mask, session, owner, other)
                    for other in sorted(others)
                )
                del secret
    except ProtocolError:
        masks.clear()  # the error keeps this frame alive, and with it the rebuilt secrets
        raise
    return masks, frozenset(rebuild.suspects)


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
