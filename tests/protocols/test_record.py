"""A session is unmasked at most once, in spite of kills and simultaneous claims."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from protocols import record
from protocols.errors import ParameterError, ProtocolError, Spent
from protocols.record import HEADER, InMemory, OnDisk, Sessions


def session(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def is_spent(sessions: Sessions, number: int) -> bool:
    """Whether a claim is refused. If it is not, this call has made it."""
    try:
        sessions.claim(session(number))
    except Spent:
        return True
    return False


@pytest.fixture(params=["memory", "disk", "disk without fcntl"])
def sessions(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sessions:
    if request.param == "memory":
        return InMemory()
    if request.param == "disk without fcntl":
        monkeypatch.setattr(record, "fcntl", None)
    return OnDisk(tmp_path / "sessions")


def test_a_session_is_claimed_once(sessions: Sessions) -> None:
    for number in (1, 2, 3):
        sessions.claim(session(number))
    for number in (3, 1, 2, 2):
        with pytest.raises(Spent):
            sessions.claim(session(number))
    sessions.claim(session(4))


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_only_a_sessions_number_is_claimed(sessions: Sessions, length: int) -> None:
    with pytest.raises(ParameterError):
        sessions.claim(bytes(length))


def test_of_many_threads_one_wins(sessions: Sessions) -> None:
    start = threading.Barrier(8)

    def race(number: int) -> bool:
        start.wait()
        return is_spent(sessions, number)

    with ThreadPoolExecutor(8) as pool:
        for attempt in range(10):
            assert sorted(pool.map(race, [attempt] * 8)) == [False] + [True] * 7


def racer(path: Path, tries: int, barrier: Any, results: Any) -> None:
    sessions = OnDisk(path)
    for number in range(tries):
        barrier.wait(timeout=60)
        results.put((number, is_spent(sessions, number)))


def test_of_two_processes_one_wins(tmp_path: Path) -> None:
    tries = 20
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    racers = [context.Process(target=racer, args=(tmp_path / "sessions", tries, barrier, results)) for _ in range(2)]
    for process in racers:
        process.start()
    found = sorted(results.get(timeout=60) for _ in range(2 * tries))
    for process in racers:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert found == sorted([(number, spent) for number in range(tries) for spent in (False, True)])
    assert (tmp_path / "sessions").stat().st_size == 32 * (1 + tries)


def test_a_kill_at_any_byte_forgets_no_claim_that_returned(tmp_path: Path) -> None:
    """Complete entries are spent in a file cut at any length, or lengthened by zeros before its data were written."""
    assert len(HEADER) == 32
    whole = HEADER + b"".join(session(number) for number in range(3))
    path = tmp_path / "sessions"
    lengths = {0, 1, *(32 * entries + past for entries in range(1, 5) for past in (-1, 0, 1, 9))} & {
        *range(len(whole) + 1)
    }
    cuts = [(whole[:length], length // 32 - 1) for length in sorted(lengths)]
    for left, kept in cuts + [(whole[:64] + bytes(zeros), 1) for zeros in (1, 31, 32, 40, 64)]:
        path.write_bytes(left)
        assert [is_spent(OnDisk(path), number) for number in range(3)] == [number < kept for number in range(3)]
        assert left.endswith(b"\0") or path.read_bytes() == whole
        assert all(is_spent(OnDisk(path), number) for number in range(3))


def test_an_entry_is_no_part_of_two_others(tmp_path: Path) -> None:
    sessions = OnDisk(tmp_path / "sessions")
    sessions.claim(session(0))
    sessions.claim(session(1))
    sessions.claim((session(0) + session(1))[7:39])


def test_the_claim_is_on_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File and folder are synced, in this order, after the entry is complete."""
    path, synced = tmp_path / "sessions", list[str]()
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        is_file = os.path.sameopenfile(descriptor, reading)
        synced.append(f"{'file' if is_file else 'folder'} {path.stat().st_size}")
        fsync(descriptor)

    path.touch()
    with path.open("rb") as opened:
        reading = opened.fileno()
        monkeypatch.setattr(os, "fsync", seen)
        OnDisk(path).claim(session(0))
    assert synced == ["file 64", "folder 64"]


def test_a_write_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
    OnDisk(tmp_path / "sessions").claim(session(0))
    assert (tmp_path / "sessions").read_bytes() == HEADER + session(0)


def test_a_full_disk_is_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions, write = OnDisk(tmp_path / "sessions"), os.write
    sessions.claim(session(0))

    def full(file: int, data: bytes) -> int:
        write(file, data[:11])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(ProtocolError):
            sessions.claim(session(1))
    assert is_spent(sessions, 0)
    assert not is_spent(sessions, 1)


def test_what_cannot_be_a_record_is_an_error_and_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"weights" * 10)
    for place, error in ((path, ParameterError), (tmp_path / "missing" / "sessions", ProtocolError)):
        with pytest.raises(error):
            OnDisk(place).claim(session(0))
    assert path.read_bytes() == b"weights" * 10


def test_a_lock_file_left_behind_refuses_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "fcntl", None)
    monkeypatch.setattr(record, "WAIT_SECONDS", 0.05)
    lock = tmp_path / "sessions.lock"
    lock.touch()
    with pytest.raises(ProtocolError, match=r"sessions\.lock"):
        OnDisk(tmp_path / "sessions").claim(session(0))
    lock.unlink()
    OnDisk(tmp_path / "sessions").claim(session(0))
    assert not lock.exists()
