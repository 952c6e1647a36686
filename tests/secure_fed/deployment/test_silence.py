"""What silent members and strangers cost, in seconds of a clock that the test moves: `Links` with members that only sign."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from protocols.keys import Identity
from secure_fed.config import RunConfig
from secure_fed.deployment import links, messages
from secure_fed.deployment.charter import Charter, Member
from secure_fed.deployment.coordinator import Settings
from secure_fed.deployment.envelope import ANSWER, Envelope, digest, refusal, sealed, unsealed
from secure_fed.methods.method import RoundPlan
from secure_fed.rounds.transport import Reply, Request
from secure_fed.tensors.tensors import Layout, Tensors

DEADLINE = Settings().deadline
ANSWERS_IN = 5.0  # seconds
MEMBERS, ENOUGH = 4, 3
COORDINATOR, KEYS = Identity.new(), [Identity.new() for _ in range(MEMBERS)]
CHANGE = Tensors({"bias": torch.zeros(3)})
CHARTER = Charter(
    "hospitals",
    "run",
    RunConfig().replace({("evaluation", "audit_fraction"): 0.0}),
    ("a", "b"),
    ("a", "b"),
    "model",
    tuple(Member(f"c{number}", key.public) for number, key in enumerate(KEYS)),
    COORDINATOR.public,
)
Mute = Callable[
    [int, int, str, float], bool
]  # from round, node, kind of message and time: whether the node gives no answer


@dataclass
class Clock:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Slow:
    """A carrier to nodes that answer after some seconds, or never. Node 100 + n is member n, every other one a stranger.

    late: the seconds of nodes that take longer than ANSWERS_IN. Node 7777 answers what it was not asked.
    """

    clock: Clock
    mute: Mute
    late: Mapping[int, float] = field(default_factory=dict)
    round: int = 0
    strangers: set[int] = field(default_factory=set)

    def nodes(self) -> set[int]:
        return {100 + number for number in range(MEMBERS)} | self.strangers

    def exchange(self, envelopes: Mapping[int, Envelope], seconds: float) -> Iterator[tuple[int, Envelope] | None]:
        begun, waiting = self.clock.now, dict(envelopes)
        answering = {node: not self.mute(self.round, node, messages.kind(one), begun) for node, one in waiting.items()}
        yield 7777, Envelope(b"an answer that nobody was asked for")
        while waiting and self.clock.now < begun + seconds:
            passed = self.clock.now - begun
            for node in [one for one in waiting if answering[one] and passed >= self.late.get(one, ANSWERS_IN)]:
                yield node, self.answer(node - 100, waiting.pop(node))
            if waiting:
                yield None
                self.clock.sleep(0.3)

    def answer(self, member: int, asked: Envelope) -> Envelope:
        message, found = messages.decode(unsealed(asked)), messages.Ended()
        if isinstance(message, messages.Offer):
            return messages.encode(message.accepted(KEYS[member], CHARTER.digest, member))
        if isinstance(message, Request):
            found = Reply(member, CHANGE, 1.0, 0.0)  # type: ignore[assignment]
        return sealed(messages.encode(found), KEYS[member], ANSWER, CHARTER.digest, digest(asked))


@dataclass
class Took:
    """What rounds took: the seconds of all, the number of members that answered each, and the coordinator's lines."""

    seconds: float
    answered: list[int]
    said: list[str]


def rounds(
    count: int, mute: Mute, monkeypatch: pytest.MonkeyPatch, strangers: bool = False, late: Mapping[int, float] = {}
) -> Took:
    """`count` rounds of one request. strangers: in every round another one connects, and gives no answer."""
    clock, said, answered = Clock(), list[str](), list[int]()
    monkeypatch.setattr(links, "time", clock)
    carrier = Slow(clock, lambda round_, node, kind, at: node >= 1000 or mute(round_, node, kind, at), late)
    reached = links.Links(carrier, CHARTER, COORDINATOR, DEADLINE, said.append)
    plan = RoundPlan((), (), ("only",))
    for number in range(1, count + 1):
        carrier.round, carrier.strangers = number, {1000 + number} if strangers else set()
        assert reached.await_members(range(MEMBERS), ENOUGH, Settings().wait)
        asked = Request(number - 1, "only", plan, 0.1, Layout.of(CHANGE).digest, Tensors())
        answered.append(len([*reached.exchange(dict.fromkeys(range(MEMBERS), asked))]))
    return Took(clock.now - 1000.0, answered, said)


def nobody(*_: object) -> bool:
    return False


def silent(round_: int, node: int, kind: str, at: float) -> bool:
    return node == 103 and round_ >= 2


def test_a_silent_member_costs_one_deadline_and_one_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four members, one silent from round 2 of 100, at the default deadline."""
    whole = rounds(100, nobody, monkeypatch)
    assert whole.answered == [4] * 100
    found = rounds(100, silent, monkeypatch)
    assert found.answered == [4] + [3] * 99
    extra = found.seconds - whole.seconds
    assert DEADLINE < extra < DEADLINE + 1.2 * links._OFFER + 60, extra
    assert [line for line in found.said if "connected" not in line] == [
        "waiting for c0, c1, c2, c3: 3 of 4 are enough",
        "waiting for c3, at most 600 s in all",
        "c3 did not answer in 600 s",
        "waiting for c3: 3 of 4 are enough",
        "going on without c3",
    ]


def test_a_lost_answer_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs a quarter of a deadline, or twice what the others took, and not the member's part in the sum."""
    lost = dict[int, float]()  # by round: when the answer to its first request was lost

    def mute(round_: int, node: int, kind: str, at: float) -> bool:
        return node == 103 and kind != "offer" and lost.setdefault(round_, at) == at

    found = rounds(10, mute, monkeypatch)
    assert found.answered == [4] * 10
    assert found.seconds < 10 * (DEADLINE / 4 + 3 * ANSWERS_IN)
    lost.clear()
    late = {100 + one: 100.0 for one in range(MEMBERS)}
    slow, without = rounds(1, mute, monkeypatch, late=late), rounds(1, nobody, monkeypatch, late=late)
    assert slow.answered == [4]
    assert 190 < slow.seconds - without.seconds < 210


def test_a_slow_member_is_not_asked_again_and_a_request_that_fails_costs_it_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, error = list[int](), "NotSent"

    def exchange(self: Slow, envelopes: Mapping[int, Envelope], seconds: float) -> Iterator[Any]:
        if {messages.kind(one) for one in envelopes.values()} == {"offer"}:
            yield from passed(replace(self, late={}), envelopes, seconds)
            return
        sent.extend(envelopes)
        if sent.count(103) == 2:
            yield 103, refusal(error, "by the carrier's word")
        else:
            yield from passed(self, envelopes, seconds)

    passed = Slow.exchange
    monkeypatch.setattr(Slow, "exchange", exchange)
    found = rounds(1, nobody, monkeypatch, late={103: 140.0})
    assert (found.answered, sent.count(103)) == ([4], 1)
    sent.clear()
    found = rounds(1, nobody, monkeypatch, late={103: 200.0})
    assert (found.answered, sent.count(103)) == ([4], 2)
    sent.clear()
    error = "NotConnected"
    found = rounds(1, nobody, monkeypatch, late={103: 900.0})
    assert (found.answered, found.said[-1]) == ([3], "c3 refuses: by the carrier's word")
    assert found.seconds < DEADLINE / 4 + 3 * ANSWERS_IN, "and no deadline"


def test_a_member_that_comes_back_takes_part_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rounds(100, lambda round_, *one: silent(round_, *one) and round_ < 30, monkeypatch)
    assert found.answered[:29] == [4] + [3] * 28
    assert found.answered[-1] == 4
    assert found.said[-1] == "c3 is connected"


def test_a_member_that_accepts_and_never_answers_a_round_costs_ever_fewer_deadlines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = rounds(300, lambda round_, node, kind, at: silent(round_, node, kind, at) and kind != "offer", monkeypatch)
    deadlines = found.said.count("c3 did not answer in 600 s")
    assert 2 < deadlines <= 6, "of 299 rounds"
    assert set(found.answered) == {3, 4}


@pytest.mark.parametrize("mute", [nobody, silent], ids=["all members there", "one member silent"])
def test_strangers_never_block(monkeypatch: pytest.MonkeyPatch, mute: Mute) -> None:
    alone = rounds(100, mute, monkeypatch)
    found = rounds(100, mute, monkeypatch, strangers=True)
    assert found.answered == alone.answered
    assert found.seconds - alone.seconds < 100 * 2.5, "polls, and no offer's time"
    assert links._OFFER > 20


def test_a_node_that_takes_minutes_for_its_model_or_each_answer_is_in_the_first_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = rounds(2, lambda round_, node, kind, at: node == 103 and at < 1000.0 + 240, monkeypatch)
    assert found.answered == [4, 4]
    assert found.seconds < 500
    assert rounds(2, nobody, monkeypatch, late={103: 100.0}).answered == [4, 4]
