"""A node: it checks every envelope that it receives, and answers those that its owner, its policy and the protocol admit.

An offer brings a charter. The node accepts it if its owner named the coordinator that signed it, if the policy admits its
terms, if model and data are as the charter states, and if the owner's budget has room for its cost; then the node proves which
member it is. The budget is reserved before the first answer to a round. Every other envelope must be signed by that
coordinator. The node signs every answer together with the request. It answers nothing of a federation that its owner closed.

An error of this package, of `privacy` or of `protocols` becomes a refusal of one sentence, which is noted for the owner
(`journal`). The coordinator gets the sentence only if it contains neither data nor paths (`refusals`), else the kind of error;
agent.log then has the sentence too. An unexpected error is described in agent.log alone, and not to the coordinator.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from privacy.entropy import Entropy
from privacy.errors import PrivacyError
from protocols.errors import ProtocolError
from secure_fed.deployment import messages, refusals, seal
from secure_fed.deployment.charter import Charter
from secure_fed.deployment.envelope import Envelope
from secure_fed.deployment.home import Home
from secure_fed.deployment.journal import Journal
from secure_fed.deployment.memberships import closed
from secure_fed.deployment.message_kinds import End, Ended, Left, Message, Offer, Refusal
from secure_fed.deployment.own_function import function_in
from secure_fed.deployment.own_ledger import OwnLedger
from secure_fed.deployment.party import Own, Party
from secure_fed.deployment.policy import PolicyError, named, require
from secure_fed.deployment.refusals import Refused
from secure_fed.errors import SecureFedError
from secure_fed.rounds.transport import Request, Stage

_log = logging.getLogger(__name__)


@dataclass
class _Joined:
    """The federation that this node takes part in now."""

    charter: Charter
    party: Party


class Node:
    """The node's answers to envelopes, one at a time.

    entropy: the source of noise and coins; the operating system, except in tests.
    """

    def __init__(self, folder: Path, entropy: Entropy | None = None) -> None:
        self.home = Home.load(folder)
        self._local = function_in(folder, self.home.local) if self.home.local else None
        self._journal = Journal(folder)
        self._entropy = entropy
        self._joined: _Joined | None = None

    def answer(self, envelope: Envelope) -> Envelope:
        """The signed answer, or a refusal. Never raises an exception of this package."""
        asked, known = "", False
        try:
            asked = messages.kind(envelope)
            charter, message = (self._offer if asked == "offer" else self._request)(envelope)
            known = named(self.home.policy, charter)
            answer, told = self._answered(charter, message, asked)
        except (SecureFedError, PrivacyError, ProtocolError) as error:
            answer, told = refusals.refusal(error), str(error)
            if answer.sentence != told:
                _log.warning("%s refused: %s", asked, told)
        name = self._joined.charter.name if self._joined else ""
        self._journal.note(asked, name, told, refused=isinstance(answer, Refusal), known=known)
        return self._sealed(answer, envelope)

    def close(self) -> None:
        if self._joined:
            self._joined.party.close()
            self._joined = None

    def _offer(self, envelope: Envelope) -> tuple[Charter, Message]:
        """A charter and its offer, both signed by the coordinator that the charter names."""
        offer = messages.decode(seal.unsealed(envelope))
        if not isinstance(offer, Offer):
            raise Refused("an envelope is labelled as an offer and contains none")
        charter = Charter.verified(offer.charter)
        seal.opened(envelope, charter.coordinator, seal.REQUEST, charter.digest)
        return charter, offer

    def _request(self, envelope: Envelope) -> tuple[Charter, Message]:
        """A message of the coordinator of this node's federation."""
        if self._joined is None:
            raise Refused("this node takes part in no federation now: it was started anew, and waits for the charter")
        charter = self._joined.charter
        return charter, messages.decode(seal.opened(envelope, charter.coordinator, seal.REQUEST, charter.digest))

    def _join(self, charter: Charter) -> None:
        """Take part in this federation, and leave any other."""
        number = charter.number(self.home.identity.public)
        if (name := charter.members[number].name) != self.home.name:
            raise PolicyError(f"the charter calls this node {name!r}, and its own name is {self.home.name!r}")
        home = self.home
        own = Own(home.identity, home.train, OwnLedger.of(home), home.model, self._local)
        party = Party(charter, own, self.home.federation(charter.digest), self._entropy)
        self.close()
        self._joined = _Joined(charter, party)

    def _answered(self, charter: Charter, message: Message, asked: str) -> tuple[Message, str]:
        """The answer, and a sentence for the journal. A repeated offer of the same charter starts nothing anew."""
        if not isinstance(message, End) and closed(self.home.federation(charter.digest)):
            raise Refused(f"this node's owner has closed the federation {charter.name!r} at this node, for good")
        if isinstance(message, Offer):
            require(self.home.policy, charter)
            if self._joined is None or self._joined.charter.digest != charter.digest:
                self._join(charter)
            number = charter.number(self.home.identity.public)
            accepted = message.accepted(self.home.identity, charter.digest, number)
            told = f"accepted as member {number + 1} of {len(charter.members)}"
            room = self._joined.party.room if self._joined else None
            return accepted, f"{told}; {room}" if room else told
        if isinstance(message, End):
            self.close()
            return Ended(), "ended"
        if self._joined is None or not isinstance(message, Request | Stage):
            raise Refused(f"the server asks for {asked!r:.40}, which a node does not answer")
        stage = message.name if isinstance(message, Stage) else message.pass_name
        answer = self._joined.party.answer(message)
        done = "left, since too few others are there" if answer is None else "answered"
        return Left() if answer is None else answer, f"round {message.round + 1}, {stage}: {done}"

    def _sealed(self, answer: Message, envelope: Envelope) -> Envelope:
        bare = messages.encode(answer)
        if self._joined is None:
            return bare
        charter = self._joined.charter.digest
        return seal.sealed(bare, self.home.identity, seal.ANSWER, charter, seal.digest(envelope))
