"""`GridCarrier` with a fake Grid and a fake clock that does not wait; the contents of messages, accepted and refused."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from hypothesis import strategies as st

from secure_fed.deployment.envelope import DTYPES, Envelope, EnvelopeError
from secure_fed.deployment.messages import Refusal, decode
from secure_fed.flower import carrier
from secure_fed.flower.carrier import MESSAGE_TYPE, CarrierError, GridCarrier, packed, unpacked


class Clock:
    """A clock that `sleep` advances at once."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, flower_task: None) -> Clock:
    found = Clock()
    monkeypatch.setattr(carrier, "time", found)
    return found


def echo(message: Message) -> RecordDict | Error:
    return message.content


@dataclass
class FakeGrid:
    """A Grid whose nodes are functions from a message to its answer.

    after: the seconds until a node's answer is there. lost: nodes that the SuperLink does not know. together: the most messages
    in one push.
    """

    clock: Clock
    answers: dict[int, Callable[[Message], Any]]
    after: dict[int, float] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    sent: list[Message] = field(default_factory=list)
    together: int = 0

    def get_node_ids(self) -> Iterable[int]:
        return list(self.answers)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:
        messages = list(messages)
        self.together = max(self.together, len(messages))
        self.sent += messages
        return [
            None if one.metadata.dst_node_id in self.lost else str(len(self.sent) - len(messages) + at)
            for at, one in enumerate(messages)
        ]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        (identifier,) = message_ids
        asked = self.sent[int(identifier)]
        node = asked.metadata.dst_node_id
        if self.clock.now < 1000 + self.after.get(node, 0):
            return []
        answer = self.answers[node](asked)
        return [Message(answer, reply_to=asked)] if answer is not None else []


ENVELOPE = Envelope(b'{"kind":"ended"}', {"a": np.arange(3, dtype=np.uint32)})


def exchanged(grid: Any, nodes: Iterable[int], seconds: float = 10) -> dict[int, Envelope]:
    return dict(filter(None, GridCarrier(grid).exchange(dict.fromkeys(nodes, ENVELOPE), seconds)))


def refusal(envelope: Envelope) -> Refusal:
    """The refusal in an envelope, decoded as the coordinator decodes it."""
    found = decode(envelope)
    assert isinstance(found, Refusal)
    return found


def test_the_nodes_are_those_of_the_grid(clock: Clock) -> None:
    assert GridCarrier(FakeGrid(clock, {5: echo, 7: echo})).nodes() == {5, 7}  # type: ignore[arg-type]


def test_a_superlink_that_is_gone_is_said_in_a_sentence() -> None:
    class Gone:
        def get_node_ids(self) -> Iterable[int]:
            raise ConnectionRefusedError("all attempts\nfailed")

    with pytest.raises(CarrierError, match="which nodes there are: ConnectionRefusedError: all attempts failed"):
        GridCarrier(Gone()).nodes()  # type: ignore[arg-type]


def test_answers_come_back_in_the_order_in_which_nodes_answer(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: echo, 2: echo, 3: echo}, after={1: 4, 2: 2})
    found = exchanged(grid, [1, 2, 3])
    assert list(found) == [3, 2, 1]
    assert all(np.array_equal(one.arrays["a"], ENVELOPE.arrays["a"]) for one in found.values())
    assert {one.metadata.message_type for one in grid.sent} == {MESSAGE_TYPE}
    assert 1004 <= clock.now < 1005  # it returned before the deadline


def test_messages_are_pushed_one_by_one(clock: Clock) -> None:
    grid = FakeGrid(clock, dict.fromkeys(range(1, 40), echo))
    assert len(exchanged(grid, grid.answers)) == 39
    assert grid.together == 1


def test_it_gives_way_while_no_answer_is_there(clock: Clock) -> None:
    begun = GridCarrier(FakeGrid(clock, {1: echo}, after={1: 4})).exchange({1: ENVELOPE}, 10)  # type: ignore[arg-type]
    assert next(begun) is None
    assert clock.now < 1001


def test_who_is_late_is_left_out_at_the_deadline(clock: Clock) -> None:
    assert list(exchanged(FakeGrid(clock, {1: echo, 2: echo}, after={2: 11}), [1, 2])) == [1]
    assert clock.now == pytest.approx(1010)


def test_a_message_lives_no_longer_than_the_deadline(clock: Clock) -> None:
    class Slow(FakeGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:
            self.clock.now += 4
            return super().push_messages(messages)

    grid = Slow(clock, dict.fromkeys(range(1, 6), echo))
    exchanged(grid, grid.answers, 10)
    assert [one.metadata.ttl for one in grid.sent] == [10, 6, 2]  # no time is left to send the last two


def test_what_expires_with_the_deadline_is_silence(clock: Clock) -> None:
    """From the deadline on, Flower reports unanswered messages as expired. A late member must not count as refusing."""

    def expired(_: Message) -> Error:
        clock.now = 1010  # the deadline passes while the answer is fetched
        return Error(3, "expired")

    assert list(exchanged(FakeGrid(clock, {1: expired, 2: echo}, after={1: 9}), [1, 2])) == [2]


def test_nobody_waits_for_a_node_that_the_superlink_does_not_know(clock: Clock) -> None:
    found = exchanged(FakeGrid(clock, {1: echo, 2: echo}, lost=frozenset({2})), [1, 2])
    assert refusal(found[2]).error == "NotSent"
    assert clock.now == 1000


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 7, 8, 99])
def test_an_error_of_flowers_is_a_refusal_without_what_the_node_wrote(code: int, clock: Clock) -> None:
    grid = FakeGrid(clock, {1: lambda _: Error(code, "<class 'OSError'>:<'/home/clinic/notes.csv'>"), 2: echo})
    found = exchanged(grid, [1, 2])
    assert refusal(found[1]).error == ("NotConnected" if code == 5 else "NoAnswer")
    assert "clinic" not in refusal(found[1]).sentence
    assert found[2].header == ENVELOPE.header


def test_an_answer_that_is_no_envelope_is_a_refusal(clock: Clock) -> None:
    found = exchanged(FakeGrid(clock, {1: lambda _: RecordDict(), 2: echo}), [1, 2])
    assert refusal(found[1]).error == "EnvelopeError"
    assert found[2].header == ENVELOPE.header


def test_an_answer_that_flower_cannot_read_takes_no_other_with_it(clock: Clock) -> None:
    def broken(_: Message) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    found = exchanged(FakeGrid(clock, {1: broken, 2: echo}), [1, 2])
    assert refusal(found[1]) == Refusal(
        "Unreadable", "its answer cannot be read: RecursionError: maximum recursion depth exceeded"
    )
    assert found[2].header == ENVELOPE.header


def test_an_answer_is_that_of_the_node_that_was_asked(clock: Clock) -> None:
    """The sender that the answer's own metadata states is ignored."""

    class Claiming(FakeGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            found = list(super().pull_messages(message_ids))
            for one in found:
                one.metadata.__dict__["_src_node_id"] = 2
            return found

    assert set(exchanged(Claiming(clock, {1: echo, 2: echo}), [1, 2])) == {1, 2}


def test_each_node_gets_its_own_envelope(clock: Clock) -> None:
    grid = FakeGrid(clock, {1: echo, 2: echo})
    own = {node: Envelope(json.dumps({"kind": "ended", "for": node}).encode()) for node in (1, 2)}
    assert dict(filter(None, GridCarrier(grid).exchange(own, 10))) == own  # type: ignore[arg-type]
    assert [unpacked(one.content).header for one in grid.sent] == [own[1].header, own[2].header]
    assert packed(own[1]).keys() == grid.sent[0].content.keys()


ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "masked": np.arange(6, dtype=np.uint32).reshape(2, 3),
    "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "scalar": np.array(2.5, np.float16),
    "nothing": np.zeros((0, 4), np.int64),
    "signs": np.array([True, False]),
}
BOOL = DTYPES.index(np.dtype(np.bool_))


def record(data: bytes, stype: str = "secure-fed.envelope") -> RecordDict:
    """A message with these bytes, as a sender may write it without `packed`."""
    return RecordDict({"envelope": ArrayRecord({"bytes": Array("uint8", (len(data),), stype, data)})})


def content_of(envelope: Envelope) -> bytes:
    return packed(envelope).array_records["envelope"]["bytes"].data


def one_array(kind: int, shape: tuple[int, ...], numbers: bytes = b"") -> bytes:
    """The bytes of an envelope with one array, whose header may state any type and shape."""
    head = struct.pack("<I2sI", 2, b"{}", 1) + struct.pack("<H1sBB", 1, b"a", kind, len(shape))
    return head + struct.pack(f"<{len(shape)}Q", *shape) + numbers


def test_an_envelope_comes_back_as_it_was() -> None:
    found = unpacked(packed(Envelope(b'{"kind":"stage"}', ARRAYS)))
    assert found.header == b'{"kind":"stage"}'
    assert list(found.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found.arrays[name].dtype, found.arrays[name].shape) == (array.dtype, array.shape), name
        assert np.array_equal(found.arrays[name], array), name


def test_all_arrays_are_one_of_flowers() -> None:
    content = packed(Envelope(b"{}", ARRAYS))
    assert [list(one) for one in content.array_records.values()] == [["bytes"]]


def test_a_message_is_read_to_its_last_byte_and_no_further() -> None:
    whole = content_of(Envelope(b"{}", ARRAYS))
    for content, words in ((whole[:-1], "shorter than"), (whole + b"\0", "goes on")):
        with pytest.raises(EnvelopeError, match=words):
            unpacked(record(content))


def test_a_size_that_is_only_stated_is_not_made() -> None:
    """The stated size is within the limits of an envelope, but larger than the message."""
    with pytest.raises(EnvelopeError, match=f"above {len(one_array(0, (1,)))}"):
        unpacked(record(one_array(0, (10**9,))))


def test_a_shape_beyond_numpy_is_refused() -> None:
    with pytest.raises(EnvelopeError, match="shape"):
        unpacked(record(one_array(0, (0, 2**63, 2**63))))


def test_a_truth_value_is_0_or_1() -> None:
    assert unpacked(record(one_array(BOOL, (2,), b"\0\1"))).arrays["a"].tolist() == [False, True]
    with pytest.raises(EnvelopeError, match="truth"):
        unpacked(record(one_array(BOOL, (2,), b"\0\7")))


class Planted:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was loaded",)


def test_no_pickle_and_no_file_of_numpys_is_parsed() -> None:
    file = io.BytesIO()
    np.save(file, np.array([Planted()], dtype=object), allow_pickle=True)
    for data in (file.getvalue(), pickle.dumps(Planted())):
        for stype in ("secure-fed.envelope", "numpy.ndarray"):
            with pytest.raises(EnvelopeError):
                unpacked(record(data, stype))


GOOD = packed(Envelope(b"{}"))
FOREIGN = {
    "empty": RecordDict(),
    "another record": RecordDict({**GOOD, "more": ConfigRecord({"a": 1})}),
    "a configuration": RecordDict({"envelope": ConfigRecord({"bytes": b"{}"})}),
    "no array": RecordDict({"envelope": ArrayRecord()}),
    "two arrays": RecordDict({"envelope": ArrayRecord(dict.fromkeys(("bytes", "b"), GOOD["envelope"]["bytes"]))}),
    "a file of numpy's": record(content_of(Envelope(b"{}")), "numpy.ndarray"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_message_of_another_kind_is_refused(case: str) -> None:
    with pytest.raises(EnvelopeError, match="not one of secure-fed's"):
        unpacked(FOREIGN[case])


CASES = st.binary(max_size=60) | st.builds(
    one_array,
    st.integers(0, 255),
    st.lists(st.integers(0, 5) | st.sampled_from([2**31, 2**40, 2**63, 2**64 - 1]), max_size=9).map(tuple),
    st.binary(max_size=60),
)


@hypothesis.given(data=CASES)
def test_whatever_comes_is_an_envelope_or_refused(data: bytes) -> None:
    try:
        found = unpacked(record(data))
    except EnvelopeError:
        return
    assert content_of(found) == data
