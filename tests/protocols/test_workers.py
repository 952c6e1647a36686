"""Clients in separate processes: the same sessions, the same errors, and no process left behind."""

from __future__ import annotations

import gc
import os
import signal
from dataclasses import dataclass, replace
from typing import Any

import pytest

from protocols.client import Waiting
from protocols.errors import Aborted, ParameterError, ProtocolError, RangeError, Spent, Tampering
from protocols.workers import Workers
from tests.protocols.sessions import Cast, Play, cast, play

CASTS = {
    "complete": {"count": 6, "threshold": 3},
    "ring": {"count": 12, "neighbours": 6, "threshold": 3},
    "active": {"count": 7, "threshold": 4, "active": True},
    "chosen": {"count": 14, "neighbours": 10, "threshold": 6, "active": True, "survivors": 9},
}


@pytest.fixture(scope="module")
def workers() -> Workers:
    return Workers(2)


@dataclass(frozen=True)
class Waited:
    """A client in another process; every call waits for its answer."""

    played: Any

    def __getattr__(self, step: str) -> Any:
        def answer(*arguments: Any) -> bytes | bytearray:
            waiting = getattr(self.played, step)(*arguments)
            assert isinstance(waiting, Waiting)
            message, seconds = waiting.result()
            assert seconds > 0
            return message

        return answer


def client(made: Cast, workers: Workers, me: int) -> Any:
    return Waited(workers.client(made.parameters, me, made.policy, made.identities.get(me)))


def played(made: Cast, workers: Workers, **options: Any) -> Play:
    with workers.session(made.parameters.session):
        return play(made, clients={me: client(made, workers, me) for me in made.ids}, **options)


@pytest.mark.parametrize("kind", CASTS)
def test_a_session_gives_the_sum_of_the_survivors(kind: str, workers: Workers) -> None:
    made = cast(**CASTS[kind])
    found = played(made, workers, silent={"mask": [made.ids[2]], "unmask": [made.ids[4]]})
    assert len(found.server.survivors) == made.count - 1
    assert (found.server.total() == found.expected()).all()


def test_errors_are_those_of_a_client_in_this_process(workers: Workers) -> None:
    """The errors agree in type and in all attributes."""
    made = cast(count=6, threshold=3, bound=5)
    first, second = made.ids[:2]
    vectors = {**made.vectors(), first: made.vectors()[first] + 100}

    def told(stage: str, me: int, message: bytes) -> bytes:
        return message[:-1] + bytes([message[-1] ^ 1]) if (stage, me) == ("mask", second) else message

    alone = Play(made, made.server(), made.clients(), vectors)
    elsewhere = Play(made, made.server(), {me: client(made, workers, me) for me in made.ids}, vectors)
    for scene in (alone, elsewhere):
        play(made, after=scene, tell=told)
    assert {me: type(error) for me, error in elsewhere.errors.items()} == {first: RangeError, second: Tampering}
    assert {me: vars(error) for me, error in elsewhere.errors.items()} == {
        me: vars(error) for me, error in alone.errors.items()
    }
    assert (elsewhere.server.total() == elsewhere.expected()).all()


def test_a_session_too_small_is_aborted_and_a_policy_is_kept(workers: Workers) -> None:
    made = cast(count=6, threshold=4)
    with pytest.raises(Aborted):
        played(made, workers, silent={"mask": made.ids[:4]})
    strict = replace(made.policy, threshold=made.parameters.threshold + 1)
    with workers.session(made.parameters.session), pytest.raises(ParameterError, match="threshold"):
        workers.client(made.parameters, made.ids[0], strict, None).advertise().result()


def test_no_session_is_opened_twice(workers: Workers) -> None:
    """A client's record of opened sessions outlives the session."""
    made = cast(count=6, run="opened twice")
    played(made, workers)
    with pytest.raises(Aborted):
        played(made, workers)
    again = Play(made, made.server(), {me: client(made, workers, me) for me in made.ids}, made.vectors())
    with workers.session(made.parameters.session), pytest.raises(Aborted):
        play(made, after=again)
    assert {type(error) for error in again.errors.values()} == {Spent}


def test_an_interrupt_is_not_for_the_processes(workers: Workers) -> None:
    made = cast(count=6)
    played(made, workers)
    for process in workers._processes:
        os.kill(process._process.pid, signal.SIGINT)
    played(replace(made, run="after the interrupt"), workers)


def test_processes_end_with_the_object() -> None:
    made, workers = cast(count=4), Workers(2)
    played(made, workers)
    processes = [process._process for process in workers._processes]
    assert [process.poll() for process in processes] == [None, None]
    del workers
    gc.collect()
    assert None not in [process.poll() for process in processes]


def test_a_process_that_ended_is_an_error_and_no_wait_for_ever() -> None:
    made, workers = cast(count=4), Workers(1)
    asked = workers.client(made.parameters, made.ids[0], made.policy, None)
    asked.advertise().result()
    workers._processes[0]._process.kill()
    workers._processes[0]._process.wait()
    for _ in range(2):
        with pytest.raises(ProtocolError, match="has ended"):
            asked.advertise().result()
