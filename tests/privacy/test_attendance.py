"""A member's own record of its turns: the turns that it refuses, and that it survives a restart and a torn write."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from privacy.errors import LedgerError
from privacy.sampling import Attendance, NotYourTurn, PublicOrder

ORDER, ROUNDS = PublicOrder(9, 3, seed=1), 6
FIRST, SECOND = (round_ for round_ in range(ROUNDS) if ORDER.has_turn(4, round_))  # member 4's turns


def begun(path: Path | None = None) -> Attendance:
    found = Attendance(ORDER, ROUNDS)
    found.begin(path)
    return found


def refuses(attendance: Attendance, round_: int, member: int = 4) -> bool:
    assert not attendance.admits(member, round_)
    with pytest.raises(NotYourTurn, match=rf"client {member} cannot take part in round {round_ + 1}: the public order"):
        attendance.enter(member, round_)
    return True


def test_a_member_takes_each_of_its_turns_once_and_no_other() -> None:
    attendance = begun()
    others = [round_ for round_ in range(ROUNDS) if round_ not in (FIRST, SECOND)]
    assert all(refuses(attendance, round_) for round_ in others)
    attendance.enter(4, FIRST)
    assert all(refuses(attendance, round_) for round_ in [FIRST, *others])
    attendance.enter(4, SECOND)
    assert all(refuses(attendance, round_) for round_ in range(ROUNDS)), "nor an earlier one, when its time has come"
    assert attendance.last(4) == SECOND


def test_there_are_no_rounds_before_the_first_and_after_the_last() -> None:
    attendance = begun()
    for round_ in (FIRST - 3, FIRST - 30, SECOND + 3, SECOND + 300):
        assert ORDER.has_turn(4, round_), "it would be its turn"
        assert refuses(attendance, round_)


def test_members_do_not_stand_in_for_each_other() -> None:
    attendance = begun()
    attendance.enter(4, FIRST)
    for member in range(9):
        assert member == 4 or attendance.admits(member, FIRST) == ORDER.has_turn(member, FIRST)


def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    first = begun(tmp_path / "turns")
    first.enter(4, FIRST)
    killed_here = begun(tmp_path / "turns")  # the first process did not call `end`
    assert refuses(killed_here, FIRST)
    killed_here.enter(4, SECOND)
    killed_here.end()
    again = begun(tmp_path / "turns")
    assert refuses(again, FIRST)
    assert refuses(again, SECOND)
    assert (tmp_path / "turns").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("torn", [1, 7])
def test_a_torn_record_is_dropped_and_the_next_is_whole(tmp_path: Path, torn: int) -> None:
    first = begun(tmp_path / "turns")
    first.enter(4, FIRST)
    first.end()
    with (tmp_path / "turns").open("ab") as file:
        file.write(bytes(torn))
    again = begun(tmp_path / "turns")
    assert refuses(again, FIRST)
    again.enter(4, SECOND)
    assert refuses(begun(tmp_path / "turns"), SECOND)
    assert (tmp_path / "turns").stat().st_size == 16


def test_a_run_that_begins_anew_has_a_memory_of_its_own(tmp_path: Path) -> None:
    attendance = begun(tmp_path / "turns")
    attendance.enter(4, FIRST)
    attendance.begin(None)
    attendance.enter(4, FIRST)
    assert (tmp_path / "turns").stat().st_size == 8


def _full(file: int, record: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("write", [_full, lambda file, record: 3], ids=["full", "short"])
def test_a_turn_that_cannot_be_noted_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object
) -> None:
    attendance = begun(tmp_path / "turns")
    monkeypatch.setattr("privacy.sampling.os.write", write)
    with pytest.raises(LedgerError, match=r"turn could not be recorded.*(disk is full|No space left)"):
        attendance.enter(4, FIRST)
    assert attendance.last(4) is None


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "turns").mkdir()
    with pytest.raises(LedgerError, match="the record of which client took part when, cannot be used"):
        begun(tmp_path / "turns")


def test_a_turn_that_a_full_disk_cut_does_not_garble_the_turns_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "attendance", os.write
    memory = begun(path)
    with monkeypatch.context() as full:
        full.setattr("privacy.sampling.os.write", lambda file, record: write(file, record[:1]))
        with pytest.raises(LedgerError, match="the disk is full"):
            memory.enter(4, SECOND)
    memory.enter(4, SECOND)  # the disk has room again
    memory.end()
    refuses(begun(path), SECOND)


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_record_is_on_disk_before_the_member_trains(
    tmp_path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("privacy.sampling.os.fsync", synced.append)
    memory = Attendance(PublicOrder(2, 2), 5)
    memory.begin(tmp_path / "attendance", durable=durable)
    memory.enter(0, 0)
    memory.enter(0, 1)
    assert len(synced) == (2 if durable else 0)
    memory.end()
