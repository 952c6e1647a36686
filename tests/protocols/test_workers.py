"""Clients of a simulation: a pair's keys computed once for both ends, and clients in processes of their own.

The keys are the same, and deleted with the session. In separate processes sessions and errors are the same, and no process is
left behind.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest

from protocols import sharing
from protocols.client import Waiting
from protocols.errors import Aborted, ParameterError, ProtocolError, RangeError, Spent, Tampering
from protocols.keys import AgreementKey, Agreements, Alone, Secret
from protocols.workers import OneProcess, Workers
from tests.protocols.looking import everything
from tests.protocols.sessions import Cast, Play, cast, drawn, play

CASTS = {
    "complete": {"count": 6, "threshold": 3},
    "ring": {"count": 12, "neighbours": 6, "threshold": 3},
    "active": {"count": 7, "threshold": 4, "active": True},
    "chosen": {"count": 14, "neighbours": 10, "threshold": 6, "active": True, "survivors": 9},
}
SESSION, OTHER = bytes(range(32)), bytes(32)
SECRETS = {client: drawn(random.Random(client)) for client in range(40)}  # the same in every session
Silent = Mapping[str, list[int]]


def played_with_fixed_keys(
    made: Cast, silent: Silent, agreements: Agreements | None, monkeypatch: pytest.MonkeyPatch
) -> Play:
    """A session with fixed keys and fixed random numbers for the shares."""
    drawn = random.Random(0)
    monkeypatch.setattr(sharing.secrets, "randbelow", drawn.randrange)
    clients = {me: made.client(me, agreements=agreements, _keys=SECRETS[me]) for me in made.ids}
    return play(made, silent=silent, clients=clients)


@pytest.mark.parametrize("kind", CASTS)
def test_a_session_is_the_same_to_the_byte(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cast(**CASTS[kind])
    silent = {"mask": [made.ids[2]], "unmask": [made.ids[4]]}
    alone = played_with_fixed_keys(made, silent, None, monkeypatch)
    together = OneProcess()
    with together.session(made.parameters.session):
        shared = played_with_fixed_keys(made, silent, together, monkeypatch)
    assert (shared.said, shared.told) == (alone.said, alone.told)
    assert len(alone.server.survivors) == made.count - 1
    assert (alone.server.total() == shared.server.total()).all()
    assert (shared.server.total() == shared.expected()).all()


def agreed(monkeypatch: pytest.MonkeyPatch) -> Counter[frozenset[bytes]]:
    """The number of agreements for each pair of public keys, from either end."""
    seen: Counter[frozenset[bytes]] = Counter()
    agree = AgreementKey.agree

    def counted(self: AgreementKey, public: bytes) -> Secret:
        seen[frozenset((self.public, public))] += 1
        return agree(self, public)

    monkeypatch.setattr(AgreementKey, "agree", counted)
    return seen


def test_a_pair_agrees_once_for_both_ends_and_twice_without(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cast(count=12)
    seen = agreed(monkeypatch)
    played_with_fixed_keys(made, {}, None, monkeypatch)
    assert set(seen.values()) == {2}
    pairs = len(seen)
    assert pairs == 12 * 11  # 66 pairs, each with a channel and a mask
    seen.clear()
    together = OneProcess()
    with together.session(made.parameters.session):
        played_with_fixed_keys(made, {}, together, monkeypatch)
        assert together.waiting == 0, "both ends have taken every key"
    assert set(seen.values()) == {1}
    assert len(seen) == pairs


@pytest.mark.parametrize("ends", ["in time", "by an abort"])
def test_no_key_outlives_its_session(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, together = cast(count=8, threshold=3), OneProcess()
    lost = {"mask": [made.ids[0]] if ends == "in time" else list(made.ids[1:])}
    with nullcontext() if ends == "in time" else pytest.raises(Aborted), together.session(made.parameters.session):
        try:
            played_with_fixed_keys(made, lost, together, monkeypatch)
        finally:
            assert together.waiting > 0, "a key waits for the client that vanished"
            assert len(secrets_in(together)) >= together.waiting
    assert together.waiting == 0
    assert not secrets_in(together)


def secrets_in(thing: object) -> list[Secret]:
    return [one for one in everything(thing) if isinstance(one, Secret)]


@pytest.mark.parametrize("session", [None, OTHER])
def test_outside_its_session_nothing_is_kept(session: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a session, or for another session than the open one, each client computes its keys alone."""
    seen, together = agreed(monkeypatch), OneProcess()
    one, other = SECRETS[1].mask, SECRETS[2].mask
    with nullcontext() if session is None else together.session(session):
        assert together.masks(one, {2: other.public}, SESSION, 1) == Alone().masks(one, {2: other.public}, SESSION, 1)
        assert together.masks(other, {1: one.public}, SESSION, 2) == Alone().masks(other, {1: one.public}, SESSION, 2)
        together.channels(one, {2: other.public}, SESSION, 1)
        assert together.waiting == 0
    assert seen[frozenset((one.public, other.public))] == 5


def test_who_was_shown_another_key_than_its_peer_s_shares_nothing_with_it() -> None:
    """A server puts its own key between two clients: each end still gets the keys that it would compute alone."""
    one, other, liar = (SECRETS[client].mask for client in (1, 2, 3))
    together = OneProcess()
    with together.session(SESSION):
        first = together.masks(one, {2: liar.public}, SESSION, 1)
        second = together.masks(other, {1: one.public}, SESSION, 2)
        third = together.masks(liar, {1: one.public}, SESSION, 4)  # as client 4; client 1 saw this key as client 2's
        assert first == Alone().masks(one, {2: liar.public}, SESSION, 1)
        assert second == Alone().masks(other, {1: one.public}, SESSION, 2)
        assert third == Alone().masks(liar, {1: one.public}, SESSION, 4)
        assert first[2][0] != second[1][0]
        assert together.waiting == 3
        with pytest.raises(Tampering):
            together.channels(one, {other: bytes(32) for other in range(2, 12)}, SESSION, 1)
        assert together.waiting == 3


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


@pytest.mark.parametrize("kind", ["complete", "chosen"])
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
    with workers.session(made.parameters.session), pytest.raises(ParameterError):
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
    made, workers = cast(count=4), Workers(1)
    workers.client(made.parameters, made.ids[0], made.policy, None).advertise().result()
    (process,) = [process._process for process in workers._processes]
    assert process.poll() is None
    del workers
    gc.collect()
    assert process.poll() is not None


def test_a_process_that_ended_is_an_error_and_no_wait_for_ever() -> None:
    made, workers = cast(count=4), Workers(1)
    asked = workers.client(made.parameters, made.ids[0], made.policy, None)
    asked.advertise().result()
    workers._processes[0]._process.kill()
    workers._processes[0]._process.wait()
    for _ in range(2):
        with pytest.raises(ProtocolError):
            asked.advertise().result()
