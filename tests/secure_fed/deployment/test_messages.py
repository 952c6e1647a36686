"""Messages and their envelopes: decoding returns what was encoded, and anything else is a typed error that takes no memory."""

from __future__ import annotations

import contextlib
import io
import json
import math
import struct
import tracemalloc
from dataclasses import replace
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


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_decoded_is_what_was_encoded(message: Any) -> None:
    found = decode(encode(message), getattr(message, "client", 0))
    if isinstance(message, Stage) and message.request is not None:
        assert found.request.digest == message.request.digest  # of every number, name, type and shape
        assert replace(found, request=None) == replace(message, request=None)
    else:
        assert found == message


def test_a_request_has_the_same_digest_on_both_sides() -> None:
    assert decode(encode(REQUEST)).digest == REQUEST.digest  # type: ignore[union-attr]


def test_a_reply_brings_every_number() -> None:
    found = decode(encode(Reply(1, TENSORS, 3.0, math.nan)), 9)
    assert isinstance(found, Reply)
    assert found.client == 9, "who sent it is what its signature says"
    assert (found.weight, math.isnan(found.loss)) == (3.0, True)
    for name, part in TENSORS.parts().items():
        assert found.contribution.parts()[name].dtype == part.dtype
        assert torch.equal(found.contribution.parts()[name], part)


def test_the_end_brings_the_final_model() -> None:
    found = decode(encode(End(7, TENSORS)))
    assert isinstance(found, End)
    assert found.round == 7
    assert {name: part.tolist() for name, part in found.tensors.parts().items()} == {
        name: part.tolist() for name, part in TENSORS.parts().items()
    }


def changed(message: Any, **fields: Any) -> Envelope:
    envelope = encode(message)
    header = json.loads(envelope.header)
    for name, value in fields.items():
        header.pop(name, None)
        if value is not ...:
            header[name] = value
    return Envelope(json.dumps(header).encode(), envelope.arrays)


@pytest.mark.parametrize(
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
        changed(Offer(b"{}", 1, bytes(32)), nonce="short"),
        Envelope(encode(Left()).header, {"a": np.zeros(1)}),
        Envelope(encode(Staged(1, b"")).header, {"message": np.zeros(3, np.float32)}),
        Envelope(encode(STAGE).header, {**encode(STAGE).arrays, "parameters": np.zeros(5, np.uint8)}),
    ],
    ids=range(23),
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


@pytest.mark.parametrize("means", [["first", "first"], [str(i) for i in range(1001)]], ids=["twice", "many"])
def test_means_are_few_and_each_is_named_once(means: list[str]) -> None:
    with pytest.raises(MessageError, match="means"):
        decode(changed(REQUEST, means=means))


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
    assert {messages.kind(encode(message)) for message in [*MESSAGES, REQUEST, Reply(0, TENSORS, 1.0, 0.0)]} == set(
        KINDS
    )


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
    failures = []
    for end in range(len(content)):
        try:
            received(content[:end])
            failures.append(end)
        except EnvelopeError:
            pass
    assert failures == []


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 200), st.binary(min_size=1, max_size=8))
def test_any_bytes_are_an_envelope_or_the_typed_error(noise: bytes, at: int, put: bytes) -> None:
    whole = sent(WHOLE)
    for content in (noise, whole[:at] + put + whole[at + len(put) :]):
        with contextlib.suppress(EnvelopeError):
            require_bounded(received(content))


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 0) + struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 0) + struct.pack("<I", 1) + struct.pack("<H", 1) + b"a" + struct.pack("<BBQ", 0, 1, 2**62),
        struct.pack("<I", 0)
        + struct.pack("<I", 1)
        + struct.pack("<H", 1)
        + b"a"
        + struct.pack("<BB8Q", 0, 8, *[2**63] * 8),
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


def test_objects_do_not_travel() -> None:
    with pytest.raises(EnvelopeError, match="does not travel"):
        sent(Envelope(b"{}", {"a": np.array([print], dtype=object)}))
    assert np.dtype(object) not in envelope.DTYPES
