"""What coordinator and nodes say to each other, as envelopes.

    coordinator    offer, request (a pass in the open), stage (of a masked sum), end
    node           accepted, reply, staged, left, ended; refused, also by whoever carries envelopes

A header is one JSON object with exactly the fields of its kind. Floats stand there in hexadecimal, so that both sides hold the
same number. Tensors and the messages of the protocol are arrays; bfloat16, which numpy lacks, travels as its bits. Whatever is
wrong with an envelope is a `MessageError`, found in time and memory bounded by the envelope's size.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from protocols.errors import ProtocolError
from protocols.keys import Identity, verify
from protocols.parameters import Parameters
from secure_fed.deployment.envelope import Envelope
from secure_fed.errors import SecureFedError
from secure_fed.methods.method import RoundPlan
from secure_fed.rounds.transport import ContributorList, Reply, Request, Stage, Staged
from secure_fed.tensors.tensors import Tensors

Made = TypeVar("Made")

STAGES = ("advertise", "share", "mask", "consistency", "unmask")
_SENTENCE = 2000  # characters of a refusal
_MEANS = 1000  # of earlier passes in a request


class MessageError(SecureFedError):
    """An envelope that is no message of this version."""


@dataclass(frozen=True)
class Offer:
    """The charter, for a node that the carrier knows by this number. nonce: 32 bytes that no other offer has."""

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
    """A node takes part, as this member of the charter."""

    member: int
    signature: bytes


@dataclass(frozen=True)
class Refusal:
    """Nothing else is answered. error: the kind of reason."""

    error: str
    sentence: str


@dataclass(frozen=True)
class Left:
    """The node leaves the round, as the protocol bids it."""


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
            return _envelope("offer", {"node": message.node, "nonce": _text(message.nonce)}, charter=message.charter)
        case Accepted():
            return _envelope("accepted", {"member": message.member, "signature": _text(message.signature)})
        case Refusal():
            return _envelope("refused", {"error": message.error, "sentence": message.sentence[:_SENTENCE]})
        case Left():
            return _envelope("left", {})
        case End():
            return _envelope("end", {})
        case Ended():
            return _envelope("ended", {})
        case Staged():
            return _envelope("staged", {}, message=message.message)
        case Reply():
            numbers = {"weight": _hex(message.weight), "loss": _hex(message.loss)}
            return _with_tensors("reply", numbers, {"contribution": message.contribution})
        case Request():
            return _with_tensors("request", _of_request(message), _tensors_of(message))
        case Stage():
            return _of_stage(message)


def decode(envelope: Envelope, client: int = 0) -> Message:
    """The message in an envelope. client: who sent it, which its signature says and the message does not."""
    fields = _fields(envelope)
    found = fields.pop("kind")
    made = _MADE.get(found) if isinstance(found, str) else None
    if made is None:
        raise MessageError(f"an envelope of the kind {found!r:.40} is none of this version")
    try:
        return made(fields, _Arrays(dict(envelope.arrays)), client)
    except SecureFedError:
        raise
    except ProtocolError as error:
        raise MessageError(f"an envelope of the kind {found!r} is damaged: {error}") from error
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError, binascii.Error) as error:
        raise MessageError(f"an envelope of the kind {found!r} is damaged: {error!s:.200}") from error


def kind(envelope: Envelope) -> str:
    """The kind of message in an envelope; "" of none."""
    try:
        found = _fields(envelope).get("kind")
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
        "lr": _hex(request.lr),
        "clip_norm": _hex(request.clip_norm),
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
        return _envelope("stage", fields | {"request": None}, **own)
    return _with_tensors("stage", fields | {"request": _of_request(stage.request)}, _tensors_of(stage.request), own)


class _Fields(dict[str, Any]):
    """The fields of a header, each taken once and with its type."""

    def take(self, name: str, *types: type) -> Any:
        value = self.pop(name)
        if type(value) not in types:
            raise ValueError(f"{name} is {value!r:.40}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        found = self.take(name, list)
        if not all(type(one) is str for one in found):
            raise ValueError(f"{name} is no list of texts")
        return tuple(found)

    def number(self, name: str) -> int:
        found: int = self.take(name, int)
        if not 0 <= found < 2**64:
            raise ValueError(f"{name} is {found:.40g}")
        return found

    def done(self) -> None:
        if self:
            raise ValueError(f"it has a field {next(iter(self))!r:.40} that its kind has not")


class _Arrays(dict[str, Any]):
    """The arrays of an envelope, each taken once."""

    def content(self, name: str) -> bytes:
        array = self.pop(name)
        if array.dtype != np.uint8 or array.ndim != 1:
            raise ValueError(f"{name} is no array of bytes")
        return bytes(array.tobytes())

    def tensors(self, owner: str, bits: frozenset[str]) -> Tensors:
        """The tensors of one owner. bits: names of arrays that are the bits of a bfloat16."""
        prefix = f"{owner}/"
        names = [name for name in self if name.startswith(prefix)]
        parts = {}
        for name in names:
            array = self.pop(name)
            tensor = torch.from_numpy(np.array(array))  # a copy that is writable and contiguous
            if name in bits:
                if tensor.dtype != torch.int16:
                    raise ValueError(f"{name} is not the bits of a bfloat16")
                tensor = tensor.view(torch.bfloat16)
            parts[name.removeprefix(prefix)] = tensor
        return Tensors.from_parts(parts)

    def done(self) -> None:
        if self:
            raise ValueError(f"it has an array {next(iter(self))!r:.40} that its kind has not")


def _offer(fields: _Fields, arrays: _Arrays, client: int) -> Offer:
    return _whole(Offer(arrays.content("charter"), fields.number("node"), _bytes(fields, "nonce", 32)), fields, arrays)


def _accepted(fields: _Fields, arrays: _Arrays, client: int) -> Accepted:
    return _whole(Accepted(fields.number("member"), _bytes(fields, "signature", 64)), fields, arrays)


def _refusal(fields: _Fields, arrays: _Arrays, client: int) -> Refusal:
    found = Refusal(fields.take("error", str)[:100], fields.take("sentence", str)[:_SENTENCE])
    return _whole(found, fields, arrays)


def _staged(fields: _Fields, arrays: _Arrays, client: int) -> Staged:
    return _whole(Staged(client, arrays.content("message")), fields, arrays)


def _reply(fields: _Fields, arrays: _Arrays, client: int) -> Reply:
    bits = frozenset(fields.texts("bfloat16"))
    contribution = arrays.tensors("contribution", bits)
    return _whole(Reply(client, contribution, _float(fields, "weight"), _float(fields, "loss")), fields, arrays)


def _request(fields: _Fields, arrays: _Arrays, client: int) -> Request:
    bits = frozenset(fields.texts("bfloat16"))
    return _whole(_read_request(fields, arrays, bits), fields, arrays)


def _stage(fields: _Fields, arrays: _Arrays, client: int) -> Stage:
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


def _read_request(fields: _Fields, arrays: _Arrays, bits: frozenset[str]) -> Request:
    plan = RoundPlan(fields.texts("trainable"), fields.texts("down"), fields.texts("passes"))
    means = fields.texts("means")
    if len(means) > _MEANS or len(set(means)) < len(means):  # each is looked for among all arrays
        raise ValueError(f"it names {len(means)} means, above {_MEANS} or one of them twice")
    return Request(
        round=fields.number("round"),
        pass_name=fields.take("pass", str),
        plan=plan,
        lr=_float(fields, "lr"),
        layout=fields.take("layout", str),
        tensors=arrays.tensors("tensors", bits),
        means={name: arrays.tensors(f"mean {name}", bits) for name in means},
        clip_norm=_float(fields, "clip_norm"),
        first=fields.take("first", str),
    )


def _read_listed(fields: _Fields) -> ContributorList:
    contributors = fields.take("contributors", list)
    if not all(type(one) is int and 0 <= one < 2**32 for one in contributors):
        raise ValueError("the contributors are not numbers of clients")
    return ContributorList(fields.take("request", str), tuple(contributors))


def _nested(inside: Mapping[str, Any], read: Callable[[_Fields], Any]) -> Any:
    fields = _Fields(inside)
    found = read(fields)
    fields.done()
    return found


def _whole(found: Made, fields: _Fields, arrays: _Arrays) -> Made:
    """The message, of which nothing is left over."""
    fields.done()
    arrays.done()
    return found


def _envelope(kind: str, fields: Mapping[str, Any], **content: bytes | bytearray) -> Envelope:
    header = json.dumps({"kind": kind, **fields}, separators=(",", ":"), allow_nan=False).encode()
    return Envelope(header, {name: np.frombuffer(bytes(one), np.uint8) for name, one in content.items()})


def _with_tensors(
    kind: str, fields: Mapping[str, Any], owned: Mapping[str, Tensors], content: Mapping[str, bytes] | None = None
) -> Envelope:
    arrays, bits = dict[str, Any](), list[str]()
    for owner, tensors in owned.items():
        for name, part in tensors.parts().items():
            part = part.detach().cpu().contiguous()
            if part.dtype == torch.bfloat16:
                bits.append(f"{owner}/{name}")
                part = part.view(torch.int16)
            arrays[f"{owner}/{name}"] = part.numpy()
    bare = _envelope(kind, {**fields, "bfloat16": bits}, **(content or {}))
    return Envelope(bare.header, {**bare.arrays, **arrays})


def _fields(envelope: Envelope) -> _Fields:
    try:
        found = json.loads(envelope.header.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the header of an envelope is no JSON: {error!s:.100}") from error
    if not isinstance(found, dict) or "kind" not in found:
        raise MessageError("the header of an envelope is no object with a kind")
    return _Fields(found)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(fields: _Fields, name: str, size: int) -> bytes:
    found = base64.b64decode(fields.take(name, str), validate=True)
    if len(found) != size:
        raise ValueError(f"{name} has {len(found)} bytes, and not {size}")
    return found


def _hex(number: float) -> str:
    return float(number).hex()


def _float(fields: _Fields, name: str) -> float:
    return float.fromhex(fields.take(name, str))


_ACCEPTED = "charter accepted"
_MADE: dict[str, Callable[[_Fields, _Arrays, int], Message]] = {
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
