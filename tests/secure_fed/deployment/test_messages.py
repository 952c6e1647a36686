"""Messages and their envelopes: decoding returns what was encoded, and anything else is a typed error that takes no memory."""

from __future__ import annotations

import contextlib
import io
import json
import math
import struct
import tracemalloc
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.keys import Identity
from protocols.parameters import ParameterError, Parameters
from secure_fed.deployment import envelope, messages
from secure_fed.deployment.envelope import DTYPES, Envelope, EnvelopeError, frames, read, require_bounded
from secure_fed.deployment.messages import (
    KINDS,
    Accepted,
    End,
    Ended,
    Left,
    MessageError,
    Offer,
    Refusal,
    decode,
    encode,
)
from secure_fed.methods.method import RoundPlan
from secure_fed.rounds.transport import ContributorList, Reply, Request, Stage, Staged
from secure_fed.tensors.low_rank import LowRank
from secure_fed.tensors.tensors import Tensors
from tests.cells import every

TENSORS = Tensors(
    {
        "a.weight": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
        "c": LowRank(torch.ones(4, 2), torch.ones(2, 3)),
        "n": torch.zeros(()),
    }
)
REQUEST = Request(
    3,
    "second",
    RoundPlan(("a", "b"), ("a",), ("first", "second")),
    0.1,
    "d" * 64,
    TENSORS,
    {"first": TENSORS},
    math.inf,
    "f" * 64,
)
PARAMETERS = Parameters("run", 7, bytes(32), 10, 32, (0, 2, 5), 2, 2, 2, False, bound=9)
STAGE = Stage(3, "mask", PARAMETERS, b"\x00\x01", REQUEST, ContributorList("e" * 64, (0, 2)))
REPLY = Reply(1, TENSORS, 3.0, math.nan)
MESSAGES = [
    Offer(b"{}", 12345678901234567890, bytes(range(32))),
    Accepted(3, bytes(64)),
    Refusal("PolicyError", "no"),
    Left(),
    End(),
    End(2, Tensors()),
    Ended(),
    Staged(4, b"\x05\x06"),
    STAGE,
    replace(STAGE, name="share", request=None, listed=None),
]


def plain(one: Any) -> Any:
    """The content of a message, with the bytes of tensors, which tell each number, name, type and shape."""
    if isinstance(one, Tensors):
        return one.to_bytes()
    if isinstance(one, Mapping):
        return {name: plain(part) for name, part in one.items()}
    if is_dataclass(one):
        return {field.name: plain(getattr(one, field.name)) for field in fields(one)}
    return "NaN" if isinstance(one, float) and math.isnan(one) else one


@every("message", [*MESSAGES, REQUEST, REPLY, End(7, TENSORS)])
def test_what_is_decoded_is_what_was_encoded(message: Any) -> None:
    found = decode(encode(message), getattr(message, "client", 0))
    assert type(found) is type(message)
    assert plain(found) == plain(message)
    if isinstance(message, Request):
        assert found.digest == message.digest  # type: ignore[union-attr]


def test_who_sent_a_reply_is_what_its_signature_says() -> None:
    assert plain(decode(encode(REPLY), 9)) == plain(replace(REPLY, client=9))


def changed(message: Any, **fields: Any) -> Envelope:
    envelope = encode(message)
    header = json.loads(envelope.header)
    for name, value in fields.items():
        header.pop(name, None)
        if value is not ...:
            header[name] = value
    return Envelope(json.dumps(header).encode(), envelope.arrays)


@every(
    "damaged",
    [
        Envelope(b""),
        Envelope(b"[]"),
        Envelope(b'{"kind": "stage"}'),
        Envelope(b'{"kind": ["stage"]}'),
        Envelope(b'{"kind": "left", "kind": "end"}'),
        Envelope(b'{"kind": "left"} '.replace(b" }", b"}") + b"x"),
        Envelope(b"[" * 100_000),
        Envelope(b'{"kind": "accepted", "member": NaN, "signature": ""}'),
        changed(Left(), more=1),
        changed(STAGE, round=-1),
        changed(STAGE, round=True),
        changed(STAGE, round=2**64),
        changed(STAGE, name="reveal"),
        changed(STAGE, request=...),
        changed(STAGE, bfloat16=["tensors/a.weight"]),
        changed(STAGE, listed={"request": "e", "contributors": [-1]}),
        changed(REQUEST, lr="zero"),
        changed(REQUEST, lr=0.1),
        changed(REQUEST, means="first"),
        changed(REQUEST, means=["first", "first"]),
        changed(REQUEST, means=[str(number) for number in range(1001)]),
        changed(Offer(b"{}", 1, bytes(32)), nonce="short"),
        Envelope(encode(Left()).header, {"a": np.zeros(1)}),
        Envelope(encode(Staged(1, b"")).header, {"message": np.zeros(3, np.float32)}),
        Envelope(encode(STAGE).header, {**encode(STAGE).arrays, "parameters": np.zeros(5, np.uint8)}),
    ],
)
def test_damage_is_the_typed_error(damaged: Envelope) -> None:
    with pytest.raises(MessageError):
        decode(damaged)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_damage_is_a_message_or_the_typed_error(data: st.DataObject) -> None:
    envelope = encode(data.draw(st.sampled_from([*MESSAGES, REQUEST])))
    at = data.draw(st.integers(0, len(envelope.header)))
    header = (
        envelope.header[:at] + data.draw(st.binary(max_size=6)) + envelope.header[at + data.draw(st.integers(0, 6)) :]
    )
    arrays = {
        name: data.draw(st.sampled_from([array, array[:0], array.reshape(-1).view(np.uint8), np.zeros(3)]))
        for name, array in envelope.arrays.items()
        if array.ndim and data.draw(st.booleans())
    }
    with contextlib.suppress(MessageError):
        decode(Envelope(header, arrays))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.binary(max_size=9), st.integers(0, 9))
def test_parameters_read_back_are_those_that_were_written(at: int, put: bytes, cut: int) -> None:
    content = PARAMETERS.to_bytes()
    assert Parameters.from_bytes(content) == PARAMETERS
    try:
        damaged = content[:at] + put + content[at + cut :]
        assert Parameters.from_bytes(damaged).to_bytes() == damaged
    except ParameterError:
        pass


def test_an_acceptance_is_of_one_offer_and_one_member() -> None:
    identity, other = Identity.new(), Identity.new()
    charter, offer = bytes(32), Offer(b"{}", 5, bytes(32))
    accepted = offer.accepted(identity, charter, 2)
    assert offer.accepted_by(identity.public, charter, accepted)
    for wrong in (
        offer.accepted_by(other.public, charter, accepted),
        offer.accepted_by(identity.public, bytes([1] * 32), accepted),
        offer.accepted_by(identity.public, charter, replace(accepted, member=1)),
        replace(offer, node=6).accepted_by(identity.public, charter, accepted),
        replace(offer, nonce=bytes([1] * 32)).accepted_by(identity.public, charter, accepted),
    ):
        assert not wrong


def test_every_kind_is_known() -> None:
    assert {messages.kind(encode(message)) for message in [*MESSAGES, REQUEST, REPLY]} == set(KINDS)


def test_a_refusal_is_one_line_that_a_terminal_shows_as_it_is() -> None:
    forged = Refusal("x\n", "its disk is full\r\nround 1/2,  accuracy\t99 %\x1b[2K\u202eno\u2028")
    assert decode(encode(forged)) == Refusal("x", "its disk is full round 1/2, accuracy 99 % [2K no")


# Envelopes as bytes.


def sent(one: Envelope) -> bytes:
    return b"".join(bytes(part) for part in frames(one))


def received(content: bytes, most: int = 10**6) -> Envelope:
    return read(io.BufferedReader(io.BytesIO(content)), most)  # type: ignore[arg-type]


WHOLE = Envelope(
    b'{"kind":"x"}',
    {
        **{f"of {dtype}": np.arange(3).astype(dtype) for dtype in DTYPES},
        "matrix": np.arange(12.0).reshape(3, 4).T,
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 4), np.float32),
    },
)


def test_what_is_read_is_what_was_sent() -> None:
    back = received(sent(WHOLE))
    assert back.header == WHOLE.header
    assert back.arrays.keys() == WHOLE.arrays.keys()
    for name, array in WHOLE.arrays.items():
        assert back.arrays[name].dtype == array.dtype
        assert np.array_equal(back.arrays[name], array)


def test_every_cut_is_refused() -> None:
    content = sent(WHOLE)
    for end in range(len(content)):
        with pytest.raises(EnvelopeError):
            received(content[:end])


def one_array(kind: int, shape: tuple[int, ...], numbers: bytes = b"") -> bytes:
    """The bytes of an envelope with one array, whose header may state any type and shape."""
    head = struct.pack("<I2sI", 2, b"{}", 1) + struct.pack("<H1sBB", 1, b"a", kind, len(shape))
    return head + struct.pack(f"<{len(shape)}Q", *shape) + numbers


def replaced(at: int, put: bytes) -> bytes:
    whole = sent(WHOLE)
    return whole[:at] + put + whole[at + len(put) :]


SIDES = st.integers(0, 5) | st.sampled_from([2**31, 2**40, 2**63, 2**64 - 1])
SHAPES = st.lists(SIDES, max_size=9).map(tuple)


@settings(max_examples=120, deadline=None)
@given(
    st.binary(max_size=300)
    | st.builds(replaced, st.integers(0, 200), st.binary(min_size=1, max_size=8))
    | st.builds(one_array, st.integers(0, 255), SHAPES, st.binary(max_size=60))
)
def test_any_bytes_are_an_envelope_or_the_typed_error(content: bytes) -> None:
    with contextlib.suppress(EnvelopeError):
        found = received(content)
        assert content.startswith(sent(found))
        require_bounded(found)


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<I", 2**32 - 1),
        struct.pack("<II", 0, 2**32 - 1),
        one_array(0, (2**62,)),
        one_array(0, (2**63,) * 8),
    ],
)
def test_a_size_beyond_the_limit_takes_no_memory(content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(EnvelopeError, match="too large"):
            received(content)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_shapes_beyond_numpy_and_truth_values_beyond_1_are_refused() -> None:
    truth = DTYPES.index(np.dtype(np.bool_))
    assert received(one_array(truth, (2,), b"\0\1")).arrays["a"].tolist() == [False, True]
    for content, words in ((one_array(truth, (2,), b"\0\7"), "truth"), (one_array(0, (0, 2**63, 2**63)), "shape")):
        with pytest.raises(EnvelopeError, match=words):
            received(content)


def test_objects_do_not_travel() -> None:
    with pytest.raises(EnvelopeError, match="does not travel"):
        sent(Envelope(b"{}", {"a": np.array([print], dtype=object)}))
    assert np.dtype(object) not in envelope.DTYPES
