"""`Transport` over a carrier: matches nodes with members, and checks their answers.

Before a round's first stage the coordinator offers its charter to every new node, and again to every member whose last request
got no usable answer: its node may have been started anew, under the same number. A node that accepts proves by a signature over
a fresh nonce that it has a member's key. So members are identified by their keys, not by machine or node number, and a node
that returns takes part from the next round on.

A node's signature proves that the answer is from that member, to this very request; nothing more is assumed. Anything else (no
answer before the deadline, a refusal, an unreadable answer) makes the member absent, and is reported in one line.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from protocols.keys import Identity
from secure_fed.deployment import messages, seal
from secure_fed.deployment.charter import Charter
from secure_fed.deployment.envelope import Envelope
from secure_fed.deployment.message_kinds import Accepted, End, Left, Offer, Refusal
from secure_fed.errors import SecureFedError
from secure_fed.rounds.transport import Reply, Request, Staged
from secure_fed.tensors.tensors import Layout


class Carrier(Protocol):
    """Carries envelopes to nodes, which it identifies by numbers, and their answers back."""

    def nodes(self) -> set[int]:
        """The nodes that can be reached now."""

    def exchange(self, envelopes: Mapping[int, Envelope], seconds: float) -> Iterator[tuple[int, Envelope]]:
        """The answers as they arrive, until all have arrived or the time is over."""


@dataclass
class Links:
    """The members that can be reached. deadline: the seconds that a stage may take. say: gets each problem in one line."""

    carrier: Carrier
    charter: Charter
    identity: Identity
    deadline: float
    say: Callable[[str], None]
    _node: dict[int, int] = field(default_factory=dict)
    _refused: dict[int, float] = field(default_factory=dict)  # the time until which a node gets no new offer
    _unsure: set[int] = field(default_factory=set)  # members whose last request got no usable answer

    @property
    def present(self) -> frozenset[int]:
        """The members that can be reached, after `greet`."""
        return frozenset(self._node)

    def greet(self) -> None:
        """Offer the charter to new nodes, and to members that gave no usable answer, to find out which members are there."""
        there = self.carrier.nodes()
        known = {member: node for member, node in self._node.items() if member not in self._unsure}
        self._node = {member: node for member, node in known.items() if node in there}
        self._unsure.clear()
        refused = {node for node, until in self._refused.items() if time.monotonic() < until}
        new = there - set(self._node.values()) - refused
        if not new:
            return
        text = self.charter.signed(self.identity)
        offers = {node: Offer(text, node, secrets.token_bytes(32)) for node in new}
        asked = {node: self._sealed(messages.encode(offer)) for node, offer in offers.items()}
        for node, envelope in self.carrier.exchange(asked, self.deadline):
            self._welcome(node, offers[node], envelope)

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        """The answers that members give before the deadline."""
        member_of = {self._node[member]: member for member in requests if member in self._node}
        self._unsure.update(member_of.values())
        asked = {node: self._sealed(messages.encode(requests[member])) for node, member in member_of.items()}
        for node, envelope in self.carrier.exchange(asked, self.deadline):
            member = member_of.pop(node, None) if node in asked else None
            if member is not None:
                answer = self._answer(member, asked[node], envelope)
                if fits(answer, requests[member]) and may_count(self.charter, member, answer):
                    self._unsure.discard(member)
                    yield answer
                elif answer is not None:
                    self.say(f"{self._name(member)} refuses: its answer does not fit the request")
        for node, member in member_of.items():
            self.say(f"{self._name(member)} did not answer in {self.deadline:g} s")
            if node not in self.carrier.nodes():
                self._node.pop(member, None)

    def end(self) -> None:
        """Announce the end of the run to all nodes; a node that misses it forgets the run when its process ends."""
        goodbye = {node: self._sealed(messages.encode(End())) for node in self._node.values()}
        for _ in self.carrier.exchange(goodbye, min(self.deadline, _GOODBYE)):
            pass

    def await_members(self, members: Iterable[int], least: int, seconds: float) -> bool:
        """Wait at most `seconds` until `least` of these members can be reached. Returns whether they can."""
        wanted, until = set(members), time.monotonic() + seconds
        said = False
        while True:
            self.greet()
            if len(wanted & self.present) >= least:
                return True
            if time.monotonic() >= until:
                return False
            if not said:
                missing = ", ".join(sorted(self._name(one) for one in wanted - self.present)[:8])
                self.say(f"waiting for {least - len(wanted & self.present)} more of {missing}")
                said = True
            time.sleep(_PAUSE)

    def _sealed(self, envelope: Envelope) -> Envelope:
        return seal.sealed(envelope, self.identity, seal.REQUEST, self.charter.digest)

    def _welcome(self, node: int, offer: Offer, envelope: Envelope) -> None:
        """Note which member a node is, if its answer proves it."""
        try:
            found = messages.decode(seal.unsealed(envelope))
        except SecureFedError as error:
            found = Refusal(type(error).__name__, str(error))
        if isinstance(found, Accepted) and 0 <= found.member < len(self.charter.members):
            if offer.accepted_by(self.charter.members[found.member].identity, self.charter.digest, found):
                if found.member not in self._node:
                    self.say(f"{self._name(found.member)} is connected")
                self._node[found.member] = node
                return
            found = Refusal(
                "Forged", f"it says that it is {self._name(found.member)}, and does not have that member's key"
            )
        self._refused[node] = time.monotonic() + _AGAIN
        sentence = found.sentence if isinstance(found, Refusal) else "its message does not answer the charter"
        self.say(f"node {node} does not take part: {sentence}")

    def _answer(self, member: int, asked: Envelope, envelope: Envelope) -> Any:
        """The member's answer; None if there is no readable answer."""
        public = self.charter.members[member].identity
        try:
            if seal.SIGNATURE in envelope.arrays:
                envelope = seal.opened(envelope, public, seal.ANSWER, self.charter.digest, seal.digest(asked))
                found = messages.decode(envelope, member)
            else:  # from an intermediary, such as the node's relay: it can only report an error
                found = messages.decode(envelope)
                found = found if isinstance(found, Refusal) else Refusal("Forged", "its answer is not signed")
        except SecureFedError as error:
            found = Refusal(type(error).__name__, str(error))
        if isinstance(found, Staged | Reply):
            return found
        if isinstance(found, Left):
            self.say(f"{self._name(member)} left the round: too few other members were left to hide its contribution")
        else:
            why = found.sentence if isinstance(found, Refusal) else "its answer does not fit the request"
            self.say(f"{self._name(member)} refuses: {why}")
        return None

    def _name(self, member: int) -> str:
        return self.charter.members[member].name


def fits(answer: Any, asked: Any) -> bool:
    """Whether an answer is of the requested kind; without masks, whether it can be added to the others."""
    if not isinstance(asked, Request):
        return isinstance(answer, Staged)
    if not isinstance(answer, Reply):
        return False
    parts = answer.contribution.parts().values()
    return all(part.is_floating_point() for part in parts) and Layout.of(answer.contribution).digest == asked.layout


def may_count(charter: Charter, member: int, answer: Staged | Reply) -> bool:
    """Whether a member's contribution may have its weight: none or one, or at most its declared number of examples."""
    if not isinstance(answer, Reply):
        return True
    if charter.config.federation.weighting != "examples":
        return answer.weight in (0.0, 1.0)
    return 0 <= answer.weight <= (charter.members[member].examples or _MOST_EXAMPLES)


_AGAIN = 60.0  # seconds until a node that refused the charter gets it again: its owner may have changed the policy
_MOST_EXAMPLES = 1e9  # of a member whose card declares no number; a far larger weight would overflow the sum
_PAUSE = 1.0  # seconds between two checks for reachable members
_GOODBYE = 30.0  # seconds
