"""The messages between coordinator and nodes, as envelopes.

    coordinator    offer, request (an unmasked pass), stage (of a masked sum), end
    node           accepted, reply, staged, left, ended; refused, also by carriers of envelopes

A header is one JSON object with exactly the fields of its kind. Floats are written in hexadecimal, so that both sides have the
same number. Tensors and the messages of the protocol are arrays; bfloat16, which numpy lacks, travels as its bits. Any error in
an envelope is a `MessageError`, found in time and memory bounded by the envelope's size.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from protocols.errors import ProtocolError
from protocols.keys import Identity, verify
from protocols.parameters import Parameters
from secure_fed.deployment.contents import Arrays, Fields, MessageError, base64_of, fields_of, hex_of, made, made_with
from secure_fed.deployment.envelope import Envelope
from secure_fed.errors import SecureFedError
from secure_fed.methods.method import RoundPlan
from secure_fed.rounds.transport import ContributorList, Reply, Request, Stage, Staged
from secure_fed.tensors.tensors import Tensors

Made = TypeVar("Made")

STAGES = ("advertise", "share", "mask", "consistency", "unmask")
_SENTENCE = 2000  # characters of a refusal
_MEANS = 1000  # of earlier passes in a request


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


def encode(message: Message) -> Envelope:
    """The envelope of a message."""
    match message:
        case Offer():
            return made("offer", {"node": message.node, "nonce": base64_of(message.nonce)}, charter=message.charter)
        case Accepted():
            return made("accepted", {"member": message.member, "signature": base64_of(message.signature)})
        case Refusal():
            return made("refused", {"error": message.error, "sentence": message.sentence[:_SENTENCE]})
        case Left():
            return made("left", {})
        case End():
            return made("end", {})
        case Ended():
            return made("ended", {})
        case Staged():
            return made("staged", {}, message=message.message)
        case Reply():
            numbers = {"weight": hex_of(message.weight), "loss": hex_of(message.loss)}
            return made_with("reply", numbers, {"contribution": message.contribution})
        case Request():
            return made_with("request", _of_request(message), _tensors_of(message))
        case Stage():
            return _of_stage(message)


def decode(envelope: Envelope, client: int = 0) -> Message:
    """The message in an envelope. client: the sender, known from the signature and not from the message."""
    fields = fields_of(envelope)
    found = fields.pop("kind")
    read = _READ.get(found) if isinstance(found, str) else None
    if read is None:
        raise MessageError(f"an envelope of the kind {found!r:.40} is none of this version")
    try:
        return read(fields, Arrays(dict(envelope.arrays)), client)
    except SecureFedError:
        raise
    except ProtocolError as error:
        raise MessageError(f"an envelope of the kind {found!r} is damaged: {error}") from error
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError, binascii.Error) as error:
        raise MessageError(f"an envelope of the kind {found!r} is damaged: {error!s:.200}") from error


def kind(envelope: Envelope) -> str:
    """The kind of message in an envelope; "" if it has none."""
    try:
        found = fields_of(envelope).get("kind")
    except MessageError:
        return ""
    return found if isinstance(found, str) else ""


def _of_request(request: Request) -> dict[str, Any]:
    return {
        "round": request.round,
        "pass": request.pass_name,
        "trainable": list(request.plan.trainable),
        "down": list(request.plan.down),
        "passes": list(request.plan.passes),
        "lr": hex_of(request.lr),
        "clip_norm": hex_of(request.clip_norm),
        "layout": request.layout,
        "first": request.first,
        "means": list(request.means),
    }


def _tensors_of(request: Request) -> dict[str, Tensors]:
    return {"tensors": request.tensors, **{f"mean {name}": mean for name, mean in request.means.items()}}


def _of_stage(stage: Stage) -> Envelope:
    listed = stage.listed and {"request": stage.listed.request, "contributors": list(stage.listed.contributors)}
    fields = {"round": stage.round, "name": stage.name, "listed": listed}
    own = {"parameters": stage.parameters.to_bytes(), "message": stage.message}
    if stage.request is None:
        return made("stage", fields | {"request": None}, **own)
    return made_with("stage", fields | {"request": _of_request(stage.request)}, _tensors_of(stage.request), own)


def _offer(fields: Fields, arrays: Arrays, client: int) -> Offer:
    return _whole(Offer(arrays.content("charter"), fields.number("node"), fields.content("nonce", 32)), fields, arrays)


def _accepted(fields: Fields, arrays: Arrays, client: int) -> Accepted:
    return _whole(Accepted(fields.number("member"), fields.content("signature", 64)), fields, arrays)


def _refusal(fields: Fields, arrays: Arrays, client: int) -> Refusal:
    found = Refusal(fields.take("error", str)[:100], fields.take("sentence", str)[:_SENTENCE])
    return _whole(found, fields, arrays)


def _staged(fields: Fields, arrays: Arrays, client: int) -> Staged:
    return _whole(Staged(client, arrays.content("message")), fields, arrays)


def _reply(fields: Fields, arrays: Arrays, client: int) -> Reply:
    bits = frozenset(fields.texts("bfloat16"))
    contribution = arrays.tensors("contribution", bits)
    return _whole(Reply(client, contribution, fields.real("weight"), fields.real("loss")), fields, arrays)


def _request(fields: Fields, arrays: Arrays, client: int) -> Request:
    bits = frozenset(fields.texts("bfloat16"))
    return _whole(_read_request(fields, arrays, bits), fields, arrays)


def _stage(fields: Fields, arrays: Arrays, client: int) -> Stage:
    asked, listed = fields.take("request", dict, type(None)), fields.take("listed", dict, type(None))
    bits = frozenset(fields.texts("bfloat16") if asked is not None else ())
    parameters = Parameters.from_bytes(arrays.content("parameters"))
    name = fields.take("name", str)
    if name not in STAGES:
        raise ValueError(f"there is no stage {name!r:.40}")
    found = Stage(
        fields.number("round"),
        name,
        parameters,
        arrays.content("message"),
        None if asked is None else _nested(asked, lambda inner: _read_request(inner, arrays, bits)),
        None if listed is None else _nested(listed, _read_listed),
    )
    return _whole(found, fields, arrays)


def _read_request(fields: Fields, arrays: Arrays, bits: frozenset[str]) -> Request:
    plan = RoundPlan(fields.texts("trainable"), fields.texts("down"), fields.texts("passes"))
    means = fields.texts("means")
    if len(means) > _MEANS or len(set(means)) < len(means) or any("/" in name for name in means):
        # each mean is looked up among all arrays by the prefix before "/"
        raise ValueError(f"it names {len(means)} means, above {_MEANS}, one of them twice, or one with a '/'")
    return Request(
        round=fields.number("round"),
        pass_name=fields.take("pass", str),
        plan=plan,
        lr=fields.real("lr"),
        layout=fields.take("layout", str),
        tensors=arrays.tensors("tensors", bits),
        means={name: arrays.tensors(f"mean {name}", bits) for name in means},
        clip_norm=fields.real("clip_norm"),
        first=fields.take("first", str),
    )


def _read_listed(fields: Fields) -> ContributorList:
    contributors = fields.take("contributors", list)
    if not all(type(one) is int and 0 <= one < 2**32 for one in contributors):
        raise ValueError("the contributors are not numbers of clients")
    return ContributorList(fields.take("request", str), tuple(contributors))


def _nested(inside: Mapping[str, Any], read: Callable[[Fields], Any]) -> Any:
    fields = Fields(inside)
    found = read(fields)
    fields.done()
    return found


def _whole(found: Made, fields: Fields, arrays: Arrays) -> Made:
    """The message, after checking that no field and no array is left over."""
    fields.done()
    arrays.done()
    return found


_ACCEPTED = "charter accepted"
_READ: dict[str, Callable[[Fields, Arrays, int], Message]] = {
    "offer": _offer,
    "request": _request,
    "stage": _stage,
    "end": lambda fields, arrays, client: _whole(End(), fields, arrays),
    "accepted": _accepted,
    "reply": _reply,
    "staged": _staged,
    "left": lambda fields, arrays, client: _whole(Left(), fields, arrays),
    "ended": lambda fields, arrays, client: _whole(Ended(), fields, arrays),
    "refused": _refusal,
}
