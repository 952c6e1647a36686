"""Envelopes as bytes: decoding returns the envelope that was sent, and a size beyond the limit takes no memory."""

from __future__ import annotations

import contextlib
import io
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fed.deployment import envelope
from secure_fed.deployment.envelope import DTYPES, Envelope, EnvelopeError, frames, read, require_bounded


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


@settings(max_examples=200, deadline=None)
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
