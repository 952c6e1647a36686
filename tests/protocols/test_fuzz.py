"""On any bytes a decoder raises only `MessageError`, at a cost bounded by the number of bytes.

The inputs are messages of real sessions, altered in all the ways of `tests.fuzz.mutations`. `tests/fuzz/decoders.py` does the
same guided by coverage, without a limit on its time.
"""

from __future__ import annotations

import struct
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocols.errors import MessageError
from protocols.parameters import SERVER, Parameters
from protocols.wire import (
    Advertise,
    Confirm,
    Confirmations,
    Delivery,
    Kind,
    Masked,
    Opened,
    Reader,
    Roster,
    Shares,
    Survivors,
)
from tests.fuzz.mutations import mutated
from tests.protocols.fooling import CASTS, choices, messages, pool, recorded

DECODERS: dict[int, Any] = {
    **{Kind.ADVERTISE: Advertise, Kind.SHARES: Shares, Kind.MASKED: Masked, Kind.CONFIRM: Confirm},
    **{Kind.OPENED: Opened, Kind.ROSTER: Roster, Kind.DELIVERY: Delivery},
    **{Kind.SURVIVORS: Survivors, Kind.CONFIRMATIONS: Confirmations},
}
every_cast = pytest.mark.parametrize("name", CASTS)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the executed lines of the package: a measure of time that is the same on every machine."""
    lines = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if "protocols" not in frame.f_code.co_filename:
            return None
        lines[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def read(kind: int, data: bytes, parameters: Parameters, sender: int) -> Any:
    if sender == SERVER:
        return DECODERS[kind].from_bytes(data, parameters)
    return DECODERS[kind].from_bytes(data, parameters, sender)


def written(decoded: Any, parameters: Parameters, sender: int) -> bytes:
    if isinstance(decoded, Masked):
        frame, view = Masked.frame(parameters, sender, decoded.signature)
        view[:] = decoded.vector
        return bytes(frame)
    return bytes(decoded.to_bytes(parameters) if sender == SERVER else decoded.to_bytes(parameters, sender))


def judged(kind: int, data: bytes, parameters: Parameters, sender: int) -> bool:
    """Whether the decoder accepts the bytes. It may raise only `MessageError`; accepted bytes equal their own re-encoding."""
    try:
        decoded = read(kind, data, parameters, sender)
    except MessageError:
        return False
    assert written(decoded, parameters, sender) == data
    return True


@every_cast
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_decoders(name: str, data: st.DataObject) -> None:
    scene, (pick, noise) = recorded(name), choices(data)
    message = data.draw(st.sampled_from(messages(scene)))
    judged(message[5], mutated(message, pool(), pick, noise), scene.cast.parameters, sender_of(message))


def sender_of(message: bytes) -> int:
    return int.from_bytes(message[40:44], "little")


def test_every_kind_of_message_is_among_those_that_are_changed() -> None:
    assert {message[5] for message in pool()} == set(DECODERS) == set(Kind)
    for name in CASTS:
        scene = recorded(name)
        for message in messages(scene):
            assert judged(message[5], message, scene.cast.parameters, sender_of(message))


COUNTS = [*range(3), *range(2**31 - 2, 2**31 + 3), *range(2**32 - 8, 2**32), 2**32 // 86 + 1, 2**32 // 37 + 1, 2**28]


@every_cast
@pytest.mark.parametrize("size", [0, 4, 400, 40_000])
def test_the_cost_of_a_message_is_bounded_by_its_size(name: str, size: int) -> None:
    """The messages are real ones, and their headers before bodies with wrong counts in all places where a count could be."""
    scene = recorded(name)
    for message in {message[5]: message for message in messages(scene)}.values():
        bodies = [message[48:], bytes(size), bytes(range(256)) * (size // 256)]
        for at in (0, 32):
            bodies += [bytes(at) + count.to_bytes(4, "little") + bytes(size) for count in COUNTS]
        for body in bodies:
            cheap(message[5], message[:48] + body, scene.cast.parameters, sender_of(message))


def cheap(kind: int, data: bytes, parameters: Parameters, sender: int) -> None:
    with counted() as lines:
        judged(kind, data, parameters, sender)
    assert lines[0] < 500 + 5 * len(data)
    allowed = 20_000 + 60 * len(data)
    # The peak includes all threads, and a thread of the test runner may allocate memory meanwhile. A decoder's own memory is
    # the same each time, so one measurement below the limit is enough.
    assert any(memory_peak(kind, data, parameters, sender) < allowed for _ in range(3))


def memory_peak(kind: int, data: bytes, parameters: Parameters, sender: int) -> int:
    tracemalloc.start()
    judged(kind, data, parameters, sender)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def believed(reader: Reader) -> int:
    """A broken `Reader.count` that allocates as many entries as the message claims."""
    number = int.from_bytes(reader.view(4), "little")
    bytearray(min(4 * number, 2**24))
    return number


def unchecked(reader: Reader, size: int) -> memoryview:
    start, reader.at = reader.at, reader.at + size
    return reader.data[start : reader.at]


@pytest.mark.parametrize(("name", "broken"), [("count", believed), ("view", unchecked), ("end", lambda reader: None)])
def test_a_decoder_that_believes_what_it_reads_is_caught(
    name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, name, broken)
    with pytest.raises((AssertionError, ValueError, struct.error)):
        test_the_cost_of_a_message_is_bounded_by_its_size("complete", 400)
