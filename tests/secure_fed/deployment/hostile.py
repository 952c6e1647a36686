"""A run with another attack in every round: scripts for the same attacks in memory and over Flower.

`ATTACKS[r]` is the attack in round r, with the number of members that are in that round's sum nevertheless (None: the round is
lost) and the line that the coordinator prints about it. VICTIM is the member that is attacked, or that is dishonest itself;
false statements are about PEER.

    Lying      the links of a dishonest coordinator, which signs the requests that the script gives it
    OnTheWay   a carrier with a network attacker, who changes messages
    Member     the node of a dishonest member, which signs the answers that the script gives it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from protocols.keys import AgreementKey, Identity
from protocols.wire import SIGNATURE, Advertise, Confirmations, Masked, Roster, Shares, Survivors
from secure_fed.deployment import messages
from secure_fed.deployment.envelope import ANSWER, Envelope, digest, sealed, unsealed
from secure_fed.deployment.envelope import SIGNATURE as SEAL
from secure_fed.deployment.links import Links
from secure_fed.deployment.messages import Accepted
from secure_fed.deployment.node import Node
from secure_fed.errors import SecureFedError
from secure_fed.rounds.transport import Stage, Staged

PEER, VICTIM = 0, 3
Told = Callable[[int, Stage], Stage]  # from the member and the honest request to it, the dishonest request
OnWay = Callable[["OnTheWay", Envelope], Envelope]
Said = Callable[[Staged, Stage], Staged]


@dataclass(frozen=True)
class Attack:
    """One attack: at most one of `told`, `again`, `asked`, `answered` and `says` is set. It acts in the stage `at`.

    told: changes the coordinator's requests. again: changes the requests that the coordinator sends a second time. asked,
    answered: change the victim's request or its answer on the way. says: changes the answer that the victim signs.

    survivors: the number of members in the sum; None: the round is lost. said: a pattern of a line that reports the attack.
    """

    name: str
    survivors: int | None
    said: str = ""
    at: str = ""
    sum: int = 0  # the number of the masked sum in its round, from 0
    told: Told | None = None
    again: Told | None = None
    asked: OnWay | None = None
    answered: OnWay | None = None
    says: Said | None = None


def _terms(**changes: Callable[[Any], Any]) -> Callable[[Stage], Stage]:
    def told(stage: Stage) -> Stage:
        own = stage.parameters
        return replace(
            stage, parameters=replace(own, **{name: how(getattr(own, name)) for name, how in changes.items()})
        )

    return told


def _all(change: Callable[[Stage], Stage]) -> Told:
    return lambda member, stage: change(stage)


def _one(change: Callable[[Stage], Stage]) -> Told:
    return lambda member, stage: change(stage) if member == VICTIM else stage


def _other_keys(stage: Stage) -> Stage:
    roster = Roster.from_bytes(stage.message, stage.parameters)
    mine = Advertise(AgreementKey.new().public, AgreementKey.new().public, roster.adverts[PEER].choice)
    signature = Identity.new().sign("advertise", stage.parameters.session, mine.signed(PEER))
    adverts = {**roster.adverts, PEER: replace(mine, signature=signature)}
    return replace(stage, message=Roster(adverts).to_bytes(stage.parameters))


def _without_peer(stage: Stage) -> Stage:
    shown = Survivors.from_bytes(stage.message, stage.parameters)
    others = {client: said for client, said in shown.statements.items() if client != PEER}
    listed = Survivors(tuple(client for client in shown.clients if client != PEER), others)
    return replace(stage, message=listed.to_bytes(stage.parameters))


def _forged_signatures(stage: Stage) -> Stage:
    shown = Confirmations.from_bytes(stage.message, stage.parameters)
    stranger = Identity.new()
    forged = {client: stranger.sign("survivors", stage.parameters.session, bytes(68)) for client in shown.signatures}
    assert all(len(one) == SIGNATURE for one in forged.values())
    return replace(stage, message=Confirmations(forged).to_bytes(stage.parameters))


def _other_model(stage: Stage) -> Stage:
    assert stage.request is not None
    name = next(iter(stage.request.tensors))
    tensors = stage.request.tensors | {name: stage.request.tensors.tensor(name) + 1.0}
    return replace(stage, request=replace(stage.request, tensors=tensors))


def _other_first(stage: Stage) -> Stage:
    assert stage.request is not None
    assert stage.request.first
    return replace(stage, request=replace(stage.request, first="00" * 32))


def _bit(_: OnTheWay, envelope: Envelope) -> Envelope:
    arrays = {name: np.array(array) for name, array in envelope.arrays.items()}
    largest = max(arrays.keys() - {SEAL}, key=lambda name: arrays[name].nbytes)
    arrays[largest].reshape(-1).view(np.uint8)[0] ^= 1
    return Envelope(envelope.header, arrays)


def _beyond(staged: Staged, stage: Stage) -> Staged:
    vector = Masked.from_bytes(data := bytearray(staged.message), stage.parameters, VICTIM).vector
    vector[0] += vector.dtype.type(2 ** (stage.parameters.bits - 2))
    return replace(staged, message=bytes(data))


def _over(stage: Stage) -> Stage:
    assert stage.request is not None
    return replace(stage, round=0, request=replace(stage.request, round=0))


def _for_peer(staged: Staged, stage: Stage) -> Staged:
    shares = Shares.from_bytes(staged.message, stage.parameters, VICTIM)
    return replace(staged, message=shares.to_bytes(stage.parameters, PEER))


def _misdealt(staged: Staged, stage: Stage) -> Staged:
    shares = Shares.from_bytes(staged.message, stage.parameters, VICTIM)
    return replace(staged, message=replace(shares, commitment=bytes(32)).to_bytes(stage.parameters, VICTIM))


REFUSES, REJECTED = r"c3 refuses: .*", "rejected: c3"
ATTACKS: Sequence[Attack] = (
    Attack("nobody lies", 4),
    Attack("terms by which fewer would do", None, "not those of the run's configuration", "advertise",
           told=_all(_terms(survivors=lambda least: least - 1))),
    Attack("other words for one member", 3, REFUSES, "mask", told=_one(_terms(bound=lambda bound: bound + 1))),
    Attack("keys of its own in the place of a member's", 3, REFUSES + "signature", "share", told=_one(_other_keys)),
    Attack("two lists of survivors", 4, REJECTED, "consistency", told=_one(_without_peer)),
    Attack("signatures of its own under the list", 4, REFUSES + "has not signed", "unmask", told=_one(_forged_signatures)),
    Attack("both secrets of a member", None, "c1 refuses: .*out of turn", "consistency", again=_all(_without_peer)),
    Attack("another model for one member", 3, REFUSES, "mask", told=_one(_other_model)),
    Attack("a round that is over", None, "c1 refuses: .*took part in round", "mask", told=_all(_over)),
    Attack("a bit of an answer", 3, "c3 .*not signed", "mask", answered=_bit),
    Attack("an earlier answer", 3, "c3 .*not signed", "share", answered=lambda way, now: way.kept["answer", 0, "share"]),
    Attack("an answer signed by another", 3, "c3 .*not signed", "mask",
           answered=lambda way, now: sealed(unsealed(now), Identity.new(), ANSWER, bytes(32))),
    Attack("an answer without its signature", 3, "c3 ", "mask", answered=lambda way, now: unsealed(now)),
    Attack("no answer", 3, "c3 ", "mask", answered=lambda way, now: Envelope(b"{}")),
    Attack("a bit of a request", 3, "c3 ", "mask", asked=_bit),
    Attack("an earlier request", 3, "c3 ", "mask", asked=lambda way, now: way.kept["request", 0, "mask"]),
    Attack("an answer under another's number", 4, "", "share", says=lambda said, stage: replace(said, client=PEER)),
    Attack("shares in another's name", 3, REJECTED, "share", says=_for_peer),
    Attack("rubbish", 3, REJECTED, "share", says=lambda said, stage: replace(said, message=b"rubbish")),
    Attack("an input beyond its bound", None, "a coordinate of the sum is beyond", "mask", says=_beyond),
    Attack("wrong shares", None, "dealt shares that do not fit", "share", says=_misdealt),
)  # fmt: skip
TWO_SUMS: Sequence[Attack] = (
    Attack("a second sum of another first one", None, REFUSES, "mask", sum=1, told=_one(_other_first)),
    Attack("nobody lies", 4),
)

SCRIPTS = {"one sum": ATTACKS, "two sums": TWO_SUMS}


def found(records: Sequence[Mapping[str, Any]], said: Sequence[str], script: Sequence[Attack]) -> list[str]:
    """For each attack: "" if its outcome is the one in the script, otherwise the outcome.

    said: the lines that the coordinator printed. A round's lines end with the line "round N/...".
    """
    ends = [at for at, line in enumerate(said) if re.match(r"round \d+/", line)]
    parts = [said[start : end + 1] for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
    assert len(parts) == len(records) == len(script), said
    return [_came(*one) for one in zip(records, parts, script, strict=True)]


def _came(record: Mapping[str, Any], lines: Sequence[str], attack: Attack) -> str:
    survivors = None if record.get("lost") else record["masked"]["survivors"]
    lines = [*lines, f"rejected: {', '.join(record.get('rejected', []))}"]
    heard = not attack.said or any(re.search(attack.said, line) for line in lines)
    if survivors == attack.survivors and heard:
        return ""
    return f"{attack.name}: {survivors} in the sum; " + " / ".join(lines)


@dataclass
class Lying(Links):
    """The links of a coordinator that follows the script."""

    script: Sequence[Attack] = ATTACKS
    _sums: dict[int, int] = field(default_factory=dict)

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        stage = next(iter(requests.values()))
        self._sums[stage.round] = self._sums.get(stage.round, -1) + (stage.name == "advertise")
        attack = self.script[stage.round]
        here = stage.name == attack.at and self._sums[stage.round] == attack.sum
        if here and attack.told:
            requests = {member: attack.told(member, asked) for member, asked in requests.items()}
        yield from super().exchange(requests)
        if here and attack.again:
            assert not list(super().exchange({one: attack.again(one, asked) for one, asked in requests.items()}))


@dataclass
class OnTheWay:
    """A carrier with an attacker between the coordinator and the victim, who keeps messages to replay them."""

    inner: Any
    script: Sequence[Attack] = ATTACKS
    kept: dict[tuple[str, int, str], Envelope] = field(default_factory=dict)
    _victim: int | None = None

    def nodes(self) -> set[int]:
        found: set[int] = self.inner.nodes()
        return found

    def exchange(self, envelopes: Mapping[int, Envelope], seconds: float) -> Iterator[tuple[int, Envelope] | None]:
        asked = {node: self._touched("request", node, one, one) for node, one in envelopes.items()}
        for found in self.inner.exchange(asked, seconds):
            if found is None:
                yield None
                continue
            node, answer = found
            self._know(node, answer)
            yield node, self._touched("answer", node, envelopes[node], answer)

    def _touched(self, which: str, node: int, request: Envelope, envelope: Envelope) -> Envelope:
        stage = _decoded(request)
        if node != self._victim or not isinstance(stage, Stage):
            return envelope
        self.kept.setdefault((which, stage.round, stage.name), envelope)
        attack = self.script[stage.round]
        change = attack.asked if which == "request" else attack.answered
        return change(self, envelope) if change and stage.name == attack.at else envelope

    def _know(self, node: int, answer: Envelope) -> None:
        told = _decoded(answer)
        if isinstance(told, Accepted) and told.member == VICTIM:
            self._victim = node


@dataclass
class Member:
    """The victim's node, which gives the answers of the script."""

    node: Node
    script: Sequence[Attack] = ATTACKS

    def answer(self, asked: Envelope) -> Envelope:
        answer = self.node.answer(asked)
        stage, told = _decoded(asked), _decoded(answer)
        if not isinstance(stage, Stage) or not isinstance(told, Staged):
            return answer
        attack = self.script[stage.round]
        if not attack.says or stage.name != attack.at:
            return answer
        identity, charter = self.node.home.identity, self.node._joined.charter.digest  # type: ignore[union-attr]
        said = messages.encode(attack.says(told, stage))
        return sealed(said, identity, ANSWER, charter, digest(asked))


def _decoded(envelope: Envelope) -> Any:
    try:
        return messages.decode(unsealed(envelope))
    except SecureFedError:
        return None
