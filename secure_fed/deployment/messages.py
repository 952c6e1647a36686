"""The messages between coordinator and nodes, as envelopes.

    coordinator    offer, request (an unmasked pass), stage (of a masked sum), end
    node           accepted, reply, staged, left, ended; refused, also by carriers of envelopes

A header is one JSON object with exactly the fields of its kind. Floats are written in hexadecimal, so that both sides have the
same number. Tensors and the messages of the protocol are arrays; bfloat16, which numpy lacks, travels as its bits. Any error in
an envelope is a `MessageError`, found in time and memory bounded by the envelope's size. The requests and replies of a round
are those of `rounds.transport`, as in a simulation.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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

KINDS = ("offer", "request", "stage", "end", "accepted", "reply", "staged", "left", "ended", "refused")
STAGES = ("advertise", "share", "mask", "consistency", "unmask")
_SENTENCE = 2000  # characters of a refusal
_MEANS = 1000  # of earlier passes in a request
_ACCEPTED = "charter accepted"


class MessageError(SecureFedError):
    """An envelope that is no message of this version."""


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
    """The run is over. tensors: of the model after `round` rounds, without personal ones; none if there is no model."""

    round: int = 0
    tensors: Tensors = field(default_factory=Tensors)


@dataclass(frozen=True)
class Ended:
    """The node has the final model, and leaves the run."""


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
            return made_with("end", {"round": message.round}, {"tensors": message.tensors})
        case Ended():
            return made("ended", {})
        case Staged():
            return made("staged", {}, message=message.message)
        case Reply():
            numbers = {"weight": hex_of(message.weight), "loss": hex_of(message.loss)}
            return made_with("reply", numbers, {"contribution": message.contribution})
        case Request():
            return made_with("request", *_of_request(message))
        case Stage():
            return _of_stage(message)


def _of_request(request: Request) -> tuple[dict[str, Any], dict[str, Tensors]]:
    """The fields of a request, and its tensors by their owners' names."""
    fields = {
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
    return fields, {"tensors": request.tensors, **{f"mean {name}": mean for name, mean in request.means.items()}}


def _of_stage(stage: Stage) -> Envelope:
    listed = stage.listed and {"request": stage.listed.request, "contributors": list(stage.listed.contributors)}
    fields = {"round": stage.round, "name": stage.name, "listed": listed}
    own = {"parameters": stage.parameters.to_bytes(), "message": stage.message}
    if stage.request is None:
        return made("stage", fields | {"request": None}, **own)
    asked, tensors = _of_request(stage.request)
    return made_with("stage", fields | {"request": asked}, tensors, own)


def made(kind: str, fields: Mapping[str, Any], **content: bytes | bytearray) -> Envelope:
    """An envelope of this kind. content: arrays of bytes."""
    header = json.dumps({"kind": kind, **fields}, separators=(",", ":"), allow_nan=False).encode()
    return Envelope(header, {name: np.frombuffer(bytes(one), np.uint8) for name, one in content.items()})


def made_with(
    kind: str, fields: Mapping[str, Any], owned: Mapping[str, Tensors], content: Mapping[str, bytes] | None = None
) -> Envelope:
    """An envelope of this kind with tensors, by their owners' names. content: other arrays, of bytes."""
    arrays, bits = dict[str, Any](), list[str]()
    for owner, tensors in owned.items():
        for name, part in tensors.parts().items():
            part = part.detach().cpu().contiguous()
            if part.dtype == torch.bfloat16:
                bits.append(f"{owner}/{name}")
                part = part.view(torch.int16)
            arrays[f"{owner}/{name}"] = part.numpy()
    bare = made(kind, {**fields, "bfloat16": bits}, **(content or {}))
    return Envelope(bare.header, {**bare.arrays, **arrays})


def base64_of(content: bytes) -> str:
    """The base 64 text that `Fields.content` reads."""
    return base64.b64encode(content).decode()


def hex_of(number: float) -> str:
    """The text that `Fields.real` reads back as the same number, including infinities and NaN."""
    return float(number).hex()


def decode(envelope: Envelope, client: int = 0) -> Message:
    """The message in an envelope: exactly the fields and arrays of its kind, none missing and none left over.

    client: the sender, known from the signature and not from the message.
    """
    fields, arrays = fields_of(envelope), Arrays(dict(envelope.arrays))
    found = fields.pop("kind")
    if not isinstance(found, str) or found not in KINDS:
        raise MessageError(f"an envelope of the kind {found!r:.40} is none of this version")
    try:
        message = _read(found, fields, arrays, client)
        fields.done()
        arrays.done()
    except SecureFedError:
        raise
    except ProtocolError as error:
        raise MessageError(f"an envelope of the kind {found!r} is damaged: {error}") from error
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError, binascii.Error) as error:
        raise MessageError(f"an envelope of the kind {found!r} is damaged: {error!s:.200}") from error
    return message


def kind(envelope: Envelope) -> str:
    """The kind of message in an envelope; "unknown" if it is none of this version, "" if there is no kind."""
    try:
        found = fields_of(envelope).get("kind")
    except MessageError:
        return ""
    if not isinstance(found, str):
        return ""
    return found if found in KINDS else "unknown"


def _read(kind: str, fields: Fields, arrays: Arrays, client: int) -> Message:
    match kind:
        case "offer":
            return Offer(arrays.content("charter"), fields.number("node"), fields.content("nonce", 32))
        case "accepted":
            return Accepted(fields.number("member"), fields.content("signature", 64))
        case "refused":
            return Refusal(_line(fields.take("error", str))[:100], _line(fields.take("sentence", str))[:_SENTENCE])
        case "staged":
            return Staged(client, arrays.content("message"))
        case "reply":
            contribution = arrays.tensors("contribution", frozenset(fields.texts("bfloat16")))
            return Reply(client, contribution, fields.real("weight"), fields.real("loss"))
        case "request":
            return _read_request(fields, arrays, frozenset(fields.texts("bfloat16")))
        case "stage":
            return _read_stage(fields, arrays)
        case "left":
            return Left()
        case "end":
            bits = frozenset(fields.texts("bfloat16"))
            return End(fields.number("round"), arrays.tensors("tensors", bits))
        case _:
            return Ended()


def _line(text: str) -> str:
    """The text as one line that people may be shown: a space for white space and for what cannot be printed."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


def _read_stage(fields: Fields, arrays: Arrays) -> Stage:
    asked, listed = fields.take("request", dict, type(None)), fields.take("listed", dict, type(None))
    bits = frozenset(fields.texts("bfloat16") if asked is not None else ())
    parameters = Parameters.from_bytes(arrays.content("parameters"))
    name = fields.take("name", str)
    if name not in STAGES:
        raise ValueError(f"there is no stage {name!r:.40}")
    return Stage(
        fields.number("round"),
        name,
        parameters,
        arrays.content("message"),
        None if asked is None else _nested(asked, lambda inner: _read_request(inner, arrays, bits)),
        None if listed is None else _nested(listed, _read_listed),
    )


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


def fields_of(envelope: Envelope) -> Fields:
    """The fields of an envelope's header, its kind among them. MessageError unless it is one object with each field once."""
    try:
        found = json.loads(envelope.header.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the header of an envelope is no JSON: {error!s:.100}") from error
    if not isinstance(found, dict) or "kind" not in found:
        raise MessageError("the header of an envelope is no object with a kind")
    return Fields(found)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


class Fields(dict[str, Any]):
    """The fields of a header, each taken once, with a check of its type.

    For invalid content it raises ValueError, KeyError, TypeError or OverflowError, and `Arrays` RuntimeError too; `decode`
    turns these into one error.
    """

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

    def content(self, name: str, size: int) -> bytes:
        """Bytes of this size, from base 64."""
        found = base64.b64decode(self.take(name, str), validate=True)
        if len(found) != size:
            raise ValueError(f"{name} has {len(found)} bytes, and not {size}")
        return found

    def real(self, name: str) -> float:
        return float.fromhex(self.take(name, str))

    def done(self) -> None:
        """Require that no field is left over."""
        if self:
            raise ValueError(f"it has a field {next(iter(self))!r:.40} that its kind has not")


class Arrays(dict[str, Any]):
    """The arrays of an envelope, each taken once."""

    def content(self, name: str) -> bytes:
        array = self.pop(name)
        if array.dtype != np.uint8 or array.ndim != 1:
            raise ValueError(f"{name} is no array of bytes")
        return bytes(array.tobytes())

    def tensors(self, owner: str, bits: frozenset[str]) -> Tensors:
        """The tensors of one owner. bits: names of arrays that contain the bits of a bfloat16 tensor."""
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
