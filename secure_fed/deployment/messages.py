"""The messages between coordinator and nodes, as envelopes.

    coordinator    offer, request (an unmasked pass), stage (of a masked sum), end
    node           accepted, reply, staged, left, ended; refused, also by carriers of envelopes

A header is one JSON object with exactly the fields of its kind. Floats are written in hexadecimal, so that both sides have the
same number. Tensors and the messages of the protocol are arrays; bfloat16, which numpy lacks, travels as its bits. Any error in
an envelope is a `MessageError`, found in time and memory bounded by the envelope's size.
"""

from __future__ import annotations

import binascii
from typing import Any

from protocols.errors import ProtocolError
from secure_fed.deployment.contents import Arrays, MessageError, base64_of, fields_of, hex_of, made, made_with
from secure_fed.deployment.envelope import Envelope
from secure_fed.deployment.message_kinds import SENTENCE, Accepted, End, Ended, Left, Message, Offer, Refusal
from secure_fed.deployment.message_readers import READ
from secure_fed.errors import SecureFedError
from secure_fed.rounds.transport import Reply, Request, Stage, Staged
from secure_fed.tensors.tensors import Tensors


def encode(message: Message) -> Envelope:
    """The envelope of a message."""
    match message:
        case Offer():
            return made("offer", {"node": message.node, "nonce": base64_of(message.nonce)}, charter=message.charter)
        case Accepted():
            return made("accepted", {"member": message.member, "signature": base64_of(message.signature)})
        case Refusal():
            return made("refused", {"error": message.error, "sentence": message.sentence[:SENTENCE]})
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
    read = READ.get(found) if isinstance(found, str) else None
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
    """The kind of message in an envelope; "unknown" if it is none of this version, "" if there is no kind."""
    try:
        found = fields_of(envelope).get("kind")
    except MessageError:
        return ""
    if not isinstance(found, str):
        return ""
    return found if found in READ else "unknown"


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
