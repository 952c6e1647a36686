"""`GridCarrier` with a fake Grid, and with a fake clock that does not wait."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message, RecordDict

from secure_fed.deployment.envelope import Envelope
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
    return dict(GridCarrier(grid).exchange(dict.fromkeys(nodes, ENVELOPE), seconds))


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
    assert refusal(found[1]).error == "NoAnswer"
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
    assert dict(GridCarrier(grid).exchange(own, 10)) == own  # type: ignore[arg-type]
    assert [unpacked(one.content).header for one in grid.sent] == [own[1].header, own[2].header]
    assert packed(own[1]).keys() == grid.sent[0].content.keys()
