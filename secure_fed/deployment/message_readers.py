"""Messages read from the fields and arrays of an envelope: exactly those of the kind, none missing and none left over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from protocols.parameters import Parameters
from secure_fed.deployment.contents import Arrays, Fields
from secure_fed.deployment.message_kinds import SENTENCE, Accepted, End, Ended, Left, Message, Offer, Refusal
from secure_fed.methods.method import RoundPlan
from secure_fed.rounds.transport import ContributorList, Reply, Request, Stage, Staged

Made = TypeVar("Made")

STAGES = ("advertise", "share", "mask", "consistency", "unmask")
_MEANS = 1000  # of earlier passes in a request


def _offer(fields: Fields, arrays: Arrays, client: int) -> Offer:
    return _whole(Offer(arrays.content("charter"), fields.number("node"), fields.content("nonce", 32)), fields, arrays)


def _accepted(fields: Fields, arrays: Arrays, client: int) -> Accepted:
    return _whole(Accepted(fields.number("member"), fields.content("signature", 64)), fields, arrays)


def _refusal(fields: Fields, arrays: Arrays, client: int) -> Refusal:
    found = Refusal(_line(fields.take("error", str))[:100], _line(fields.take("sentence", str))[:SENTENCE])
    return _whole(found, fields, arrays)


def _line(text: str) -> str:
    """The text as one line that people may be shown: a space for white space and for what cannot be printed."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


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


READ: dict[str, Callable[[Fields, Arrays, int], Message]] = {
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
