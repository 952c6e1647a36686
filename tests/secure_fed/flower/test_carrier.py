"""`GridCarrier` with a fake Grid and a fake clock that does not wait; the contents of messages, accepted and refused.

The apps without Flower's processes: a node answers what its agent does, and the coordinator notes how its run ended.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from privacy.errors import BudgetExhausted
from secure_fed.deployment import relay
from secure_fed.deployment.coordinator import Settings
from secure_fed.deployment.envelope import Envelope, EnvelopeError
from secure_fed.deployment.home import ENDED
from secure_fed.deployment.messages import Refusal, decode
from secure_fed.errors import ConfigError, ModelError
from secure_fed.flower import carrier, coordinator_app, node_app
from secure_fed.flower.carrier import MESSAGE_TYPE, CarrierError, GridCarrier, packed, unpacked
from secure_fed.flower.coordinator_app import RunFailed, of_run_config
from tests.secure_fed.deployment.test_messages import one_array


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


def broken(_: Message) -> None:
    raise RecursionError("maximum recursion depth exceeded")


WROTE = "<class 'OSError'>:<'/home/clinic/notes.csv'>"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        *((Error(code, WROTE), "NotConnected" if code == 5 else "NoAnswer") for code in (1, 2, 3, 4, 5, 7, 8, 99)),
        (RecordDict(), "EnvelopeError"),
        (broken, "Unreadable"),  # by Flower
    ],
)
def test_what_is_no_answer_is_a_refusal_without_what_the_node_wrote_and_takes_no_other_with_it(
    answer: Any, error: str, clock: Clock
) -> None:
    found = exchanged(FakeGrid(clock, {1: answer if callable(answer) else lambda _: answer, 2: echo}), [1, 2])
    assert refusal(found[1]).error == error
    assert "clinic" not in refusal(found[1]).sentence
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


def record(data: bytes, stype: str = "secure-fed.envelope") -> RecordDict:
    """A message with these bytes, as a sender may write it without `packed`."""
    return RecordDict({"envelope": ArrayRecord({"bytes": Array("uint8", (len(data),), stype, data)})})


WHOLE = packed(ENVELOPE).array_records["envelope"]["bytes"].data


def test_all_arrays_are_one_of_flowers() -> None:
    content = packed(Envelope(b"{}", {"a": np.zeros(3), "b": np.ones((0, 4))}))
    assert [list(one) for one in content.array_records.values()] == [["bytes"]]


def test_a_message_is_read_to_its_last_byte_and_no_further() -> None:
    """`deployment/test_messages.py` has the bytes of an envelope."""
    for content, words in ((WHOLE[:-1], "shorter than"), (WHOLE + b"\0", "goes on")):
        with pytest.raises(EnvelopeError, match=words):
            unpacked(record(content))


def test_a_size_that_is_only_stated_is_not_made() -> None:
    """The stated size is within the limits of an envelope, but larger than the message."""
    content = one_array(0, (10**9,))
    with pytest.raises(EnvelopeError, match=f"above {len(content)}"):
        unpacked(record(content))


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
    "a file of numpy's": record(WHOLE, "numpy.ndarray"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_message_of_another_kind_is_refused(case: str) -> None:
    with pytest.raises(EnvelopeError, match="not one of secure-fed's"):
        unpacked(FOREIGN[case])


# The app of a node.

END = Envelope(b'{"kind":"end"}')


def asked(content: RecordDict, agent: Any = "/srv/clinic/agent.sock") -> Envelope:
    """The app's answer to a message with this content, at a node whose agent has this socket."""
    config = {} if agent is None else {node_app.AGENT: agent}
    context = Context(run_id=1, node_id=2, node_config=config, state=RecordDict(), run_config={})
    message = Message(content, 2, "query.secure_fed", ttl=7.0)
    return unpacked(node_app.app(message, context).content)


def test_the_agent_of_the_owners_folder_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    answer = Envelope(b'{"kind":"ended"}')
    monkeypatch.setattr(relay, "ask", lambda *given: seen.append(given) or answer)
    assert asked(packed(END)) == answer
    assert seen == [(Path("/srv/clinic/agent.sock"), END, 7.0)]


def test_what_is_no_envelope_does_not_reach_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "ask", lambda *_: pytest.fail("the agent was asked"))
    assert "not one of secure-fed's" in refusal(asked(RecordDict())).sentence


@pytest.mark.parametrize("agent", [None, "", 3])
def test_a_node_without_an_agent_says_so_to_its_owner(agent: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(asked(packed(END), agent)).sentence == relay.UNREACHABLE
    assert "without secure-fed-agent in its --node-config" in capsys.readouterr().err


def test_what_goes_wrong_leaves_the_node_without_its_paths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: Any) -> Envelope:
        raise PermissionError(13, "Permission denied", "/home/clinic/agent.sock")

    monkeypatch.setattr(relay, "ask", ask)
    assert refusal(asked(packed(END))) == Refusal("PermissionError", relay.UNREACHABLE)
    assert "/home/clinic/agent.sock" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "error"), [("no folder/agent.sock", "NoAgent"), ("a" * 120, "NoAgent"), ("file/agent.sock", "NoAnswer")]
)
def test_an_agent_that_cannot_be_reached_leaves_the_node_without_its_paths(
    tmp_path: Path, name: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real relay: to a socket that is not there, to one whose path is too long, and to a file in a file's place."""
    (tmp_path / "file").touch()
    assert refusal(asked(packed(END), str(tmp_path / name))) == Refusal(error, relay.UNREACHABLE)
    assert "secure-fed: the node's agent gave no answer: " in capsys.readouterr().err


def test_the_process_of_a_message_loads_no_torch() -> None:
    code = "import sys, secure_fed.flower.node_app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# The coordinator's.


def test_every_key_is_read() -> None:
    given = {"coordinator": "/srv/c", "deadline": 60, "wait": 0.5, "too-few": "lose"}
    assert of_run_config(given) == (Path("/srv/c"), Settings(deadline=60.0, wait=0.5, too_few="lose"))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "coordinator"),
        ({"coordinator": "relative"}, "relative"),
        ({"coordinator": 3}, "3"),
        ({"coordinator": "/c", "deadline": 0}, "deadline"),
        ({"coordinator": "/c", "deadline": "60"}, "deadline"),
        ({"coordinator": "/c", "deadline": True}, "deadline"),
        ({"coordinator": "/c", "deadline": float("nan")}, "deadline"),
        ({"coordinator": "/c", "wait": -1}, "wait"),
        ({"coordinator": "/c", "too-few": "stop"}, "too-few"),
        ({"coordinator": "/c", "too_few": "lose"}, "too_few"),
    ],
)
def test_a_run_config_that_is_wrong_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        of_run_config(given)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, 0),
        (OSError(28, "No space left"), 1),
        (ModelError("another"), 2),
        (BudgetExhausted("spent"), 3),
        (RuntimeError("a bug"), None),
    ],
)
def test_the_folder_keeps_how_the_run_ended_and_the_log_has_one_sentence(
    error: Exception | None, status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower logs the exception at its own logger. A known failure is logged as one sentence; a bug keeps its stack trace."""

    def conduct(*_: Any) -> tuple[None, str]:
        if error:
            raise error
        return None, "south did not confirm"

    monkeypatch.setattr(coordinator_app, "conduct", conduct)
    flower, written = logging.getLogger("flwr"), io.StringIO()
    handler = logging.StreamHandler(written)
    flower.addHandler(handler)
    raises = pytest.raises(RuntimeError if status is None else RunFailed)
    try:
        with raises if error else nullcontext() as raised:
            coordinator_app.app(None, SimpleNamespace(run_config={"coordinator": str(tmp_path)}))  # type: ignore[arg-type]
        if raised:
            flower.error("%s raised an exception", "ServerApp", exc_info=raised.value)
    finally:
        flower.removeHandler(handler)
        flower.removeFilter(coordinator_app.in_one_sentence)
    if status is None:
        assert "Traceback" in written.getvalue()
        return
    assert written.getvalue() == (f"secure-fed: {error}\n" if error else "")
    kept = json.loads((tmp_path / ENDED).read_text())
    assert kept == {"status": status, "sentence": str(error or "south did not confirm")}
