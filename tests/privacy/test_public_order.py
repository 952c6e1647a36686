"""A public order: whose turn it is, how often and how far apart turns are, and that nothing but its seed decides.

A member's own record of its turns: the turns that it refuses, and that it survives a restart and a torn write.
"""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from privacy.errors import LedgerError, PlanError
from privacy.sampling_and_turns import Attendance, NotYourTurn, PublicOrder
from tests.cells import every

ORDER, RUN = PublicOrder(9, 3, seed=1), 6
FIRST, SECOND = (round_ for round_ in range(RUN) if ORDER.has_turn(4, round_))  # member 4's turns
ROUNDS = 23
ORDERS = [
    PublicOrder(12, 3),
    PublicOrder(10, 3),  # the places of a round wrap around the end of the order
    PublicOrder(7, 7),
    PublicOrder(7, 5, seed=4),
    PublicOrder(8, 3, vacant=(0, 5, 9)),
    PublicOrder(1, 1, vacant=tuple(range(12))),
    PublicOrder(5, 1),
]


def turns(order: PublicOrder, rounds: int = ROUNDS) -> dict[int, list[int]]:
    """The rounds in which each member has a turn."""
    return {m: [r for r in range(rounds) if m in order.of_round(r)] for m in range(order.population)}


@every("order", ORDERS)
def test_turns_are_never_closer_than_the_gap_nor_more_than_counted(order: PublicOrder) -> None:
    for rounds in range(1, ROUNDS + 1):
        found = turns(order, rounds)
        assert all(later - earlier >= order.gap for own in found.values() for earlier, later in pairwise(own))
        assert max(map(len, found.values())) <= order.turns(rounds)


@every("order", [order for order in ORDERS if not order.vacant])
def test_gap_and_count_are_reached_so_that_neither_is_too_careful(order: PublicOrder) -> None:
    rounds = order.places + order.gap  # enough rounds for the shortest gap to occur
    found = turns(order, rounds).values()
    assert min(later - earlier for own in found for earlier, later in pairwise(own)) == order.gap
    assert max(map(len, found)) == order.turns(rounds)


@every("order", ORDERS)
def test_a_cohort_is_of_distinct_members_of_the_public_size(order: PublicOrder) -> None:
    cohorts = [order.of_round(round_) for round_ in range(ROUNDS)]
    assert all(cohort == sorted(set(cohort)) and set(cohort) <= set(range(order.population)) for cohort in cohorts)
    assert all(len(cohort) <= order.size for cohort in cohorts)
    if not order.vacant:
        assert {len(cohort) for cohort in cohorts} == {order.size} == {order.most} == {int(order.expected)}


@every("order", ORDERS)
def test_a_member_knows_its_turns(order: PublicOrder) -> None:
    for round_ in range(ROUNDS):
        assert [m for m in range(order.population) if order.has_turn(m, round_)] == order.of_round(round_)


def test_no_coin_is_tossed() -> None:
    assert PublicOrder(12, 3).draw(lambda count: pytest.fail("a coin"), 5) == PublicOrder(12, 3).of_round(5)


def test_the_seed_and_the_places_decide() -> None:
    """The order is the same on every machine and with every library version. A member that leaves moves no other's turns."""
    assert [PublicOrder(9, 3, seed=1).of_round(r) for r in range(3)] == [[3, 5, 7], [0, 2, 4], [1, 6, 8]]
    assert turns(PublicOrder(9, 3)) != turns(PublicOrder(9, 3, seed=1))
    whole, less = turns(PublicOrder(9, 3)), turns(PublicOrder(7, 3, vacant=(6, 2)))
    assert less == {member: whole[place] for member, place in enumerate((0, 1, 3, 4, 5, 7, 8))}


def test_a_place_comes_up_anywhere_in_the_order() -> None:
    """Over seeds, every member is as likely in the first cohort as any other."""
    first = np.array([np.isin(range(20), PublicOrder(20, 5, seed=seed).of_round(0)) for seed in range(400)])
    assert np.abs(first.mean(axis=0) - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 400)


@every("population, size, vacant", [(0, 1, ()), (3, 4, ()), (3, 0, ()), (3, 1, (4,)), (3, 1, (-1,)), (3, 1, (1, 1))])
def test_an_order_that_cannot_be_is_refused(population: int, size: int, vacant: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="members a round and each vacant place once"):
        PublicOrder(population, size, vacant)


def begun(path: Path | None = None) -> Attendance:
    found = Attendance(ORDER, RUN)
    found.begin(path)
    return found


def refuses(attendance: Attendance, round_: int, member: int = 4) -> bool:
    assert not attendance.admits(member, round_)
    with pytest.raises(NotYourTurn, match=rf"client {member} cannot take part in round {round_ + 1}:"):
        attendance.enter(member, round_)
    return True


def test_a_member_takes_each_of_its_turns_once_and_no_other() -> None:
    attendance = begun()
    others = [round_ for round_ in range(RUN) if round_ not in (FIRST, SECOND)]
    assert all(refuses(attendance, round_) for round_ in others)
    attendance.enter(4, FIRST)
    assert all(refuses(attendance, round_) for round_ in [FIRST, *others])
    attendance.enter(4, SECOND)
    assert all(refuses(attendance, round_) for round_ in range(RUN)), "nor an earlier one, when its time has come"
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


def full(file: int, record: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("write", [full, lambda file, record: 3], ids=["full", "short"])
def test_a_turn_that_cannot_be_noted_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object
) -> None:
    attendance = begun(tmp_path / "turns")
    monkeypatch.setattr("privacy.sampling_and_turns.os.write", write)
    with pytest.raises(LedgerError):
        attendance.enter(4, FIRST)
    assert attendance.last(4) is None
    with pytest.raises(LedgerError):
        begun(tmp_path)


def test_a_turn_that_a_full_disk_cut_does_not_garble_the_turns_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "attendance", os.write
    memory = begun(path)
    with monkeypatch.context() as full:
        full.setattr("privacy.sampling_and_turns.os.write", lambda file, record: write(file, record[:1]))
        with pytest.raises(LedgerError):
            memory.enter(4, SECOND)
    memory.enter(4, SECOND)  # the disk has room again
    memory.end()
    refuses(begun(path), SECOND)


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_record_is_on_disk_before_the_member_trains(
    tmp_path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("privacy.sampling_and_turns.os.fsync", synced.append)
    memory = Attendance(PublicOrder(2, 2), 5)
    memory.begin(tmp_path / "attendance", durable=durable)
    memory.enter(0, 0)
    memory.enter(0, 1)
    assert len(synced) == (2 if durable else 0)
    memory.end()
