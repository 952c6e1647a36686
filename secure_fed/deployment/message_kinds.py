"""The kinds of messages between coordinator and nodes, apart from the requests and replies of a round (`rounds.transport`)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from protocols.keys import Identity, verify
from secure_fed.rounds.transport import Reply, Request, Stage, Staged

SENTENCE = 2000  # characters of a refusal
_ACCEPTED = "charter accepted"


@dataclass(frozen=True)
class Offer:
    """The charter, for the node with this number at the carrier. nonce: 32 bytes, unique to this offer."""

    charter: bytes
    node: int
    nonce: bytes

    def accepted(self, identity: Identity, charter: bytes, member: int) -> Accepted:
        """The acceptance by the member with this key. charter: its digest."""
        return Accepted(member, identity.sign(_ACCEPTED, charter, self._body(member)))

    def accepted_by(self, public: bytes, charter: bytes, answer: Accepted) -> bool:
        """Whether the holder of this key accepted this very offer, as this member."""
        return verify(public, answer.signature, _ACCEPTED, charter, self._body(answer.member))

    def _body(self, member: int) -> bytes:
        return json.dumps([self.node, self.nonce.hex(), member]).encode()


@dataclass(frozen=True)
class Accepted:
    """The node takes part as this member of the charter."""

    member: int
    signature: bytes


@dataclass(frozen=True)
class Refusal:
    """A refusal, in place of any other answer. error: the kind of reason."""

    error: str
    sentence: str


@dataclass(frozen=True)
class Left:
    """The node leaves the round, as the protocol requires."""


@dataclass(frozen=True)
class End:
    """The run is over."""


@dataclass(frozen=True)
class Ended:
    """The node has forgotten the run."""


Message = Offer | Request | Stage | End | Accepted | Reply | Staged | Left | Ended | Refusal
