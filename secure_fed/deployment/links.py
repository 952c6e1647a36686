"""The members that the coordinator can reach: offers of the charter, requests and their answers, over any `Carrier`."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from protocols.keys import Identity
from secure_fed.deployment import messages
from secure_fed.deployment.charter import Charter
from secure_fed.deployment.envelope import ANSWER, REQUEST, SIGNATURE, Envelope, digest, opened, sealed, unsealed
from secure_fed.deployment.messages import Accepted, End, Ended, Left, Offer, Refusal
from secure_fed.errors import SecureFedError
from secure_fed.rounds.transport import Reply, Request, Stage, Staged
from secure_fed.tensors.tensors import Layout

_OFFER = 30.0  # seconds in which a node answers its first offer, and for which a round waits for a member that was lost
_LONGEST = 900.0  # seconds between two offers to a node that does not answer
_AGAIN = 60.0  # seconds until a node that refused the charter gets it again: its owner may have changed the policy
_MOST_EXAMPLES = 1e9  # of a member whose card declares no number; a far larger weight would overflow the sum
_PAUSE = 1.0  # seconds between two checks for reachable members
_GOODBYE = 30.0  # seconds
_FAILURES = ("NotSent", "NoAnswer", "Unreadable")  # of a carrier


class Carrier(Protocol):
    """Carries envelopes to nodes, which it identifies by numbers, and their answers back."""

    def nodes(self) -> set[int]:
        """The nodes that can be reached now."""

    def exchange(self, envelopes: Mapping[int, Envelope], seconds: float) -> Iterator[tuple[int, Envelope] | None]:
        """The answers as they arrive, until all have arrived or the time is over; None now and then while none arrives."""


@dataclass
class Links:
    """`Transport` over a carrier: the members that can be reached.

    The coordinator offers its charter to every new node, and again to every member whose last request got no usable answer: its
    node may have been started anew, under the same number. A node that accepts proves by a signature over a fresh nonce that it
    has a member's key. So members are identified by their keys, not by machine or node number, and a node that returns takes
    part from the next round on.

    A node's signature proves that the answer is from that member, to this very request; nothing more is assumed. Anything else
    (no answer before the deadline, a refusal, an unreadable answer) makes the member absent, and is reported in one line.

    A request whose answer is late is sent again, since an answer can be lost (`_sent`). A silent member costs one deadline, in
    the stage in which it falls silent, and one `_OFFER` before the next round. Then the
    rounds go on without it: offers are answered while rounds run, and are repeated after pauses that double, as does the time
    in which an offer may be answered: a node of a busy machine may need minutes to start Flower's process. A member that
    returns and falls silent again is offered the charter after pauses of deadlines that double, until it has ended a round.
    Nodes that are nobody's are offered the charter in the same way, and nothing waits for them.

    deadline: the seconds that a stage may take. say: gets each problem, and each wait, in one line.
    """

    carrier: Carrier
    charter: Charter
    identity: Identity
    deadline: float
    say: Callable[[str], None]
    _node: dict[int, int] = field(default_factory=dict)
    _offers: list[tuple[Iterator[Any], dict[int, Offer]]] = field(default_factory=list)  # under way
    # of a node: when it gets an offer, and its last pause
    _later: dict[int, tuple[float, float]] = field(default_factory=dict)
    _unsure: set[int] = field(default_factory=set)  # members whose last request got no usable answer
    _silences: dict[int, int] = field(default_factory=dict)  # of a member, since it ended a round
    _absent: set[int] = field(default_factory=set)  # members for which no round waits any more
    _told: dict[int, str] = field(default_factory=dict)  # of a node: the last line about it
    _begun: bool = False

    @property
    def present(self) -> frozenset[int]:
        """The members that can be reached, after `greet`."""
        return frozenset(self._node)

    def greet(self) -> None:
        """Offer the charter to new nodes, and to members that gave no usable answer, and read the answers so far. Waits for
        nobody.
        """
        there, now = self.carrier.nodes(), time.monotonic()
        known = {member: node for member, node in self._node.items() if member not in self._unsure}
        self._node = {member: node for member, node in known.items() if node in there}
        self._unsure.clear()
        asked = {node for _, offers in self._offers for node in offers}
        resting = {node for node, (until, _) in self._later.items() if now < until}
        if new := there - set(self._node.values()) - asked - resting:
            text = self.charter.signed(self.identity)
            for pause, nodes in groupby(sorted(new, key=self._next_pause), self._next_pause):
                offers = {node: Offer(text, node, secrets.token_bytes(32)) for node in nodes}
                sent = {node: self._sealed(messages.encode(offer)) for node, offer in offers.items()}
                self._offers.append((self.carrier.exchange(sent, min(pause, self.deadline)), offers))
        self._welcome_all()

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        """The answers that members give before the deadline."""
        member_of = {self._node[member]: member for member in requests if member in self._node}
        self._unsure.update(member_of.values())
        asked = {node: self._sealed(messages.encode(requests[member])) for node, member in member_of.items()}
        late, begun = False, time.monotonic()
        for found in self._sent(asked):
            if found is None:
                self._welcome_all()
                if not late and (late := time.monotonic() - begun > _OFFER):
                    self.say(f"waiting for {self._names(member_of.values())}, at most {self.deadline:g} s in all")
                continue
            node, envelope = found
            if (member := member_of.pop(node, None)) is not None:
                answer = self._answer(member, asked[node], envelope)
                if fits(answer, requests[member]) and may_count(self.charter, member, answer):
                    self._unsure.discard(member)
                    if not isinstance(requests[member], Stage) or requests[member].name == "unmask":
                        self._silences.pop(member, None)
                    yield answer
                elif answer is not None:
                    self.say(f"{self._names([member])} refuses: its answer does not fit the request")
        for node, member in member_of.items():
            self.say(f"{self._names([member])} did not answer in {self.deadline:g} s")
            self._silences[member] = silences = self._silences.get(member, 0) + 1
            if silences > 1:
                self._absent.add(member)
                self._later[node] = time.monotonic() + self.deadline * 2.0 ** (silences - 2), _OFFER
            if node not in self.carrier.nodes():
                self._node.pop(member, None)

    def _sent(self, asked: Mapping[int, Envelope]) -> Iterator[tuple[int, Envelope] | None]:
        """The answers of the carrier's `exchange` until the deadline; a request whose answer is late is sent once more.

        Late is an answer after twice the time in which half of the nodes answered, and at least a quarter of the deadline: slow
        nodes get few requests twice. A node gives the same answer again, so a member whose answer was lost stays in the sum. If
        one of two requests fails on its way, the other is waited for; that a node is gone, or was started anew, is an answer.
        """
        waiting, begun, late, under_way = dict(asked), time.monotonic(), math.inf, Counter(asked.keys())
        streams = [self.carrier.exchange(asked, self.deadline)]
        while waiting and streams:
            passed = time.monotonic() - begun
            if late == math.inf and 2 * len(waiting) <= len(asked):
                late = max(2 * passed, self.deadline / 4)
            if late < passed < self.deadline and len(streams) == 1:
                late = self.deadline
                under_way.update(waiting.keys())
                streams.append(self.carrier.exchange(dict(waiting), self.deadline - passed))
            for stream in tuple(streams):
                for found in stream:
                    if found is None:
                        break
                    node, envelope = found
                    under_way[node] -= 1
                    if (not under_way[node] or not _failed(envelope)) and waiting.pop(node, None) is not None:
                        yield found
                else:
                    streams.remove(stream)
            if waiting and streams:
                yield None

    def end(self, message: End, wait: float) -> str:
        """Send the final model to all members. A member that is not there misses it, until the coordinator's next start: the
        sentence that is returned names it.

        wait: the seconds to wait for members that no round has missed, at most those of an offer. A node that measures the
        model on its data may confirm later than this waits for.
        """
        until = time.monotonic() + min(wait, self._patience)
        everybody = set(range(len(self.charter.members)))
        self.greet()
        while everybody - self.present - self._absent and time.monotonic() < until:
            time.sleep(_PAUSE)
            self.greet()
        member_of = {node: member for member, node in self._node.items()}
        asked = {node: self._sealed(messages.encode(message)) for node in member_of}
        for found in self.carrier.exchange(asked, min(self.deadline, _GOODBYE)):
            if found is not None and found[0] in asked:
                node, envelope = found
                if isinstance(self._answer(member_of[node], asked[node], envelope), Ended):
                    everybody.discard(member_of[node])
        if not everybody:
            return ""
        self.say(missed := f"{self._names(everybody)} did not confirm the final model; the next start sends it again")
        return missed

    def await_members(self, members: Iterable[int], least: int, seconds: float) -> bool:
        """Wait until all of these members can be reached, or `least` of them while the others are late. Returns whether `least`
        can be reached after at most `seconds`.

        Late is a member that is missing after `_OFFER`; a deadline, before the first round, since its node may be loading the
        model. No later round waits for it, until it is back.
        """
        wanted, begun = set(members), time.monotonic()
        patience, self._begun, said = min(seconds, self._patience if self._begun else self.deadline), True, ""
        while True:
            self.greet()
            missing, passed = wanted - self.present, time.monotonic() - begun
            enough = len(wanted) - len(missing) >= least
            if enough and not missing - self._absent:
                return True
            if passed >= patience and missing - self._absent:
                self._absent |= missing
                if enough:
                    self.say(f"going on without {self._names(missing)}")
                    return True
            if passed >= seconds:
                return enough
            waits = f"waiting for {self._names(missing)}: {least} of {len(wanted)} are enough"
            if waits != said:
                self.say(waits)
                said = waits
            time.sleep(_PAUSE)

    @property
    def _patience(self) -> float:
        return min(self.deadline, _OFFER)

    def _welcome_all(self) -> None:
        """Read the answers to offers that have arrived. Also during a stage, since they expire."""
        self._offers = [one for one in self._offers if self._arriving(*one)]

    def _arriving(self, answers: Iterator[Any], offers: dict[int, Offer]) -> bool:
        """Read the answers to these offers that have arrived. Returns whether more may come."""
        for found in answers:
            if found is None:
                return True
            node, envelope = found
            if (offer := offers.pop(node, None)) is not None:
                self._welcome(node, offer, envelope)
        for node in offers:  # no answer in time
            pause = self._next_pause(node)
            self._later[node] = time.monotonic() + pause, pause
        return False

    def _next_pause(self, node: int) -> float:
        """The seconds that the next offer to a node is open, and then those until another one: twice the last pause."""
        return min(2 * self._later.get(node, (0.0, _OFFER / 2))[1], _LONGEST)

    def _sealed(self, envelope: Envelope) -> Envelope:
        return sealed(envelope, self.identity, REQUEST, self.charter.digest)

    def _welcome(self, node: int, offer: Offer, envelope: Envelope) -> None:
        """Note which member a node is, if its answer proves it."""
        try:
            found = messages.decode(unsealed(envelope))
        except SecureFedError as error:
            found = Refusal(type(error).__name__, str(error))
        if isinstance(found, Accepted) and 0 <= found.member < len(self.charter.members):
            if offer.accepted_by(self.charter.members[found.member].identity, self.charter.digest, found):
                if found.member not in self._node:
                    self.say(f"{self._names([found.member])} is connected")
                self._node[found.member] = node
                self._absent.discard(found.member)
                self._later.pop(node, None)
                self._told.pop(node, None)
                return
            found = Refusal(
                "Forged", f"it says that it is {self._names([found.member])}, and does not have that member's key"
            )
        self._later[node] = time.monotonic() + _AGAIN, _OFFER / 2
        sentence = found.sentence if isinstance(found, Refusal) else "its message does not answer the charter"
        if self._told.get(node) != sentence:
            self._told[node] = sentence
            self.say(f"node {node} does not take part: {sentence}")

    def _answer(self, member: int, asked: Envelope, envelope: Envelope) -> Any:
        """The member's answer; None if there is no readable answer."""
        public = self.charter.members[member].identity
        try:
            if SIGNATURE in envelope.arrays:
                envelope = opened(envelope, public, ANSWER, self.charter.digest, digest(asked))
                found = messages.decode(envelope, member)
            else:  # from an intermediary, such as the node's relay: it can only report an error
                found = messages.decode(envelope)
                found = found if isinstance(found, Refusal) else Refusal("Forged", "its answer is not signed")
        except SecureFedError as error:
            found = Refusal(type(error).__name__, str(error))
        if isinstance(found, Staged | Reply | Ended):
            return found
        if isinstance(found, Left):
            self.say(
                f"{self._names([member])} left the round: too few other members were left to hide its contribution"
            )
        else:
            why = found.sentence if isinstance(found, Refusal) else "its answer does not fit the request"
            self.say(f"{self._names([member])} refuses: {why}")
        return None

    def _names(self, members: Iterable[int]) -> str:
        """The names of these members, of many the first ones."""
        names = [self.charter.members[member].name for member in sorted(members)]
        return ", ".join(names[:8]) + (f" and {len(names) - 8} others" if names[8:] else "")


def _failed(envelope: Envelope) -> bool:
    """Whether a request or its answer failed on its way, by the word of whoever carries them."""
    if SIGNATURE in envelope.arrays:
        return False
    try:
        found = messages.decode(envelope)
    except SecureFedError:
        return True
    return isinstance(found, Refusal) and found.error in _FAILURES


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
