"""The server of one session: bytes in, bytes out, no input or output of its own.

It accepts one message from each client in each stage, in any order, and its caller decides when a stage ends. Masked vectors
are added to one accumulator as they arrive and are not kept. Its state at any time is the view of the honest-but-curious server
of the threat model; it can compute only the sum of the survivors, and only after `threshold` of each one's neighbours have
opened their shares.

An error in `receive` leaves the session as it was. An error in `close` ends it: the accumulator is wiped, no sum is released.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from protocols.chosen import Chosen
from protocols.codec import Words
from protocols.errors import Aborted, MessageError, ParameterError, ProtocolError, Tampering
from protocols.graph import complete
from protocols.keys import registry_digest
from protocols.masking import add_masks
from protocols.messages import (
    Advertise,
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
from protocols.parameters import Parameters, stages
from protocols.rebuilding import Ballot, core, masks_left
from protocols.roster import (
    Agreed,
    Identities,
    Topology,
    authentic,
    judged,
    near,
    signs,
    states,
    topology,
    topology_of,
    usable,
)
from protocols.wire import Buffer


class Server:
    """The server's side of one session. `identities`: the registry's public keys, needed in an active session."""

    def __init__(
        self, parameters: Parameters, *, identities: Mapping[int, bytes] | None = None, threads: int | None = None
    ) -> None:
        self.parameters = parameters
        self._identities = _registered(parameters, {} if identities is None else identities)
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
        take = self._takes().get(self.stage)
        if take is None:
            raise MessageError(f"the session is {self.stage}: it accepts no more messages", who=f"client {sender}")
        if sender not in self._waiting:
            repeated = "has sent its message already" if sender in self._heard else "takes no part"
            raise MessageError(f"client {sender} {repeated} in this stage", who=f"client {sender}", stage=self.stage)
        try:
            take(sender, message)  # changes nothing until all is checked
        except ProtocolError as error:
            raise type(error)(error.what, who=f"client {sender}", stage=self.stage, protected="left out") from error
        self._waiting.discard(sender)
        self._heard.add(sender)

    def close(self) -> dict[int, bytes]:
        """End this stage. Returns the next stage's message for each client; nothing after the last stage: the sum is ready."""
        end = self._ends().get(self.stage)
        if end is None:
            raise MessageError(f"the session is {self.stage}: there is no stage to close")
        stage = self.stage
        try:
            sent = end()
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

    def _takes(self) -> dict[str, Callable[[int, Buffer], None]]:
        return {
            "advertise": self._take_advert,
            "share": self._take_shares,
            "mask": self._take_vector,
            "consistency": self._take_signature,
            "unmask": self._take_opened,
        }

    def _ends(self) -> dict[str, Callable[[], dict[int, bytes]]]:
        return {
            "advertise": self._show_roster,
            "share": self._deliver,
            "mask": self._list_survivors,
            "consistency": self._show_signatures,
            "unmask": self._unmask,
        }

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
            self._graph: Topology = topology(self.parameters, self._agreed)
            return dict.fromkeys(self._agreed.members, message)
        self._enough(len(self._adverts), "take part")
        self._agreed = Agreed(tuple(sorted(self._adverts)), self._adverts, b"")
        self._graph = topology_of(self._choices(self._agreed.members), self.parameters)
        return {member: self._roster_of(member) for member in self._agreed.members}

    def _roster_of(self, member: int) -> bytes:
        """The roster for a client: its choices, the clients that chose it, and itself."""
        shown = {member, *self._graph.holders(member), *self._graph.owners(member)}
        return Roster({one: self._adverts[one] for one in shown}).to_bytes(self.parameters)

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
            self._graph = topology_of(dealt, self.parameters)
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
        if isinstance(self._graph, Chosen):
            for survivor in sorted(survivors):
                self._graph.require_partners(survivor, survivors, self.parameters.partners)
        self.survivors = tuple(sorted(survivors))
        self._list = Survivors(self.survivors).digest
        return {survivor: self._list_for(survivor) for survivor in self.survivors}

    def _list_for(self, survivor: int) -> bytes:
        around = near(survivor, self._graph, self.survivors) if self.parameters.active else ()
        return Survivors(self.survivors, {one: self._statements[one] for one in around}).to_bytes(self.parameters)

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


_PROTECTED = "no sum was released, and every vector stays under its masks"


def _registered(parameters: Parameters, identities: Mapping[int, bytes]) -> Identities:
    if not parameters.active:
        return ()
    if registry_digest(identities, parameters.clients) != parameters.registry:
        raise ParameterError("the server's identities are not those of the session's registry")
    return tuple((client, identities[client]) for client in parameters.clients)
