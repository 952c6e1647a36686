"""Two thousand random sessions in which clients drop out at any stage: the result is the survivors' plain sum, or no sum."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from protocols.client import Keys
from protocols.errors import MessageError, ProtocolError
from protocols.keys import Secret
from protocols.server import Server, masks_left
from protocols.wire import Masked
from tests.protocols.crowds import Session, agreement, foretold
from tests.protocols.looking import contents, remains

BLOCKS, SCHEDULES, FEW = 20, 100, 30  # blocks can run in parallel


def found(session: Session, held: bytes) -> list[str]:
    """The names of the secrets that these bytes contain. A value equal to the released sum is not a secret."""
    total = session.server.total().tobytes() if session.server.stage == "done" else None
    return [name for name, form in session.secrets() if form in held and form != total]


def judge(session: Session) -> str:
    """Play a session and check its result. Returns "sum", or the stage in which it aborted."""
    done, server = session.run(), session.server
    held = contents((server, remains(session.error)))
    assert found(session, held) == []
    assert (set(server.survivors) if done else None) == foretold(session)
    if done:
        assert server.total().tobytes() == session.plain().tobytes()
        assert server.total().tobytes() in held  # the search finds bytes that the server holds
        return "sum"
    assert server.stage == "aborted"
    assert session.error is not None
    assert session.error.stage == session.stage
    with pytest.raises(MessageError, match="there is no sum"):
        server.total()
    assert not server._accumulator.any()
    return session.stage


def judged(seeds: range) -> Counter[str]:
    outcomes = Counter[str]()
    for seed in seeds:
        try:
            outcomes[judge(Session(seed))] += 1
        except BaseException as error:
            error.add_note(f"in the session of seed {seed}: judge(Session({seed})) repeats it")
            raise
    return outcomes


def enough(outcomes: Counter[str], count: int) -> None:
    """Check that sums and aborts are both frequent, and that sessions abort in many stages."""
    assert count / 4 < outcomes["sum"] < 3 * count / 4, outcomes
    assert len(outcomes) >= 5, outcomes


def test_random_schedules() -> None:
    outcomes = judged(range(FEW))
    enough(outcomes, FEW)


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(2))
def test_hundreds_of_random_schedules(block: int) -> None:
    outcomes = judged(range(block * SCHEDULES, (block + 1) * SCHEDULES))
    enough(outcomes, SCHEDULES)


@pytest.mark.weekly
@pytest.mark.parametrize("block", range(2, BLOCKS))
def test_thousands_of_random_schedules(block: int) -> None:
    outcomes = judged(range(block * SCHEDULES, (block + 1) * SCHEDULES))
    enough(outcomes, SCHEDULES)


def keep_everything(server: Server) -> None:
    server.stage = "aborted"


def keep_shares(server: Server) -> None:
    server.stage = "aborted"
    server._accumulator[:] = 0


def keep_a_vector(server: Server, sender: int, message: bytes) -> None:
    vector = Masked.from_bytes(message, server.parameters, sender).vector
    server._accumulator += vector
    server.__dict__.setdefault("_log", []).append({sender: lambda: tuple(vector.tolist())})


def forget_a_mask(*arguments: Any) -> Any:
    masks, suspects = masks_left(*arguments)
    return masks[1:], suspects


@pytest.mark.parametrize(
    ("place", "broken", "first"),
    [
        ("protocols.server.Server._abort", keep_everything, 0),
        ("protocols.server.Server._abort", keep_shares, 0),
        ("protocols.server.Server._take_vector", keep_a_vector, 0),
        ("protocols.server.masks_left", forget_a_mask, 0),
        pytest.param(
            *("protocols.graph.Graph.holds_together", lambda graph, alive, window: True, 0), marks=pytest.mark.nightly
        ),
    ],
)
def test_a_machine_that_keeps_or_miscounts_something_is_caught(
    place: str, broken: Any, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, broken)
    with pytest.raises((AssertionError, ProtocolError, KeyError)) as caught:
        judged(range(first, first + SCHEDULES))
    assert "in the session of seed" in caught.value.__notes__[-1]


def test_the_search_goes_everywhere() -> None:
    """Bytes in any place where an object can keep them are found, and bytes that are not there are not."""
    words, key = np.arange(1, 9, dtype=np.uint32), agreement(random.Random(1))
    needle, other = words.tobytes(), key.private.reveal()

    class Slotted:
        __slots__ = ("inside",)

    def holder(value: object) -> Slotted:
        made = Slotted()
        made.inside = [{"deep": (value,)}]  # type: ignore[attr-defined]
        return made

    secret_number = int.from_bytes(needle, "little")
    hidden = [words, words[:2], words.tolist(), set(words.tolist()), needle.hex(), bytearray(needle), lambda: words]
    hidden += [
        memoryview(needle)[3:4],
        Secret(needle),
        secret_number,
        np.array([words, 1], dtype=object),
        iter([needle]),
    ]
    hidden += [dict(enumerate(words.tolist()))]
    for thing in hidden:
        assert needle in contents(holder(thing)), thing
        assert other not in contents(holder(thing))
    for thing in (key, Keys(key, key, Secret(b""), Secret(b"")), key.private):
        assert other in contents(holder(thing))
    assert needle not in contents(holder(words[::-1].copy()))
