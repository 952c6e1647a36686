"""Processes that are killed, or that use one ledger at the same time.

A process that charges before it releases has charged for every release, at whatever instant it is killed; exactly one of the
racing processes gets the rest of a budget, and no row is lost.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from privacy.errors import BudgetExhausted, LedgerError
from privacy.filters import Cost
from privacy.ledger import Ledger
from tests.cells import chosen
from tests.privacy.ledger_child import (
    ENOUGH,
    RECORD,
    RUN,
    UNIT,
    charge_and_release,
    heads_beside,
    kept_head,
    start,
)


class UnderpaidError(AssertionError):
    """More was released than was charged."""


def released_in(folder: Path) -> int:
    """The number of releases; a partly written one counts."""
    releases = folder / "releases"
    return -(-releases.stat().st_size // RECORD) if releases.exists() else 0


def audit(folder: Path) -> tuple[int, int]:
    """The numbers of charged and of released results. The ledger must verify, contain the run's and the user's head, and cover
    all releases.

    The oldest copy that could be restored unnoticed ends at the head that the user kept: it must cover all releases, too.
    """
    heads = heads_beside(folder / "ledger.db")
    ledger = Ledger.open(folder / "ledger.db", head=kept_head(folder), heads=heads)
    released, noted = released_in(folder), heads.newest(ledger.head.ledger)
    charged = sum(ledger.charged(RUN).values())
    charges = [row for row in ledger.rows() if row.kind == "charge" and noted is not None and row.id <= noted.row]
    known = sum(row.body["releases"] for row in charges)
    if min(charged, known) < released:
        raise UnderpaidError(f"{released} released, {charged} charged, {known} of them up to the head that is noted")
    return charged, released


def new(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    Ledger.create(folder / "ledger.db", data_set="ward", epsilon=ENOUGH.epsilon, delta=ENOUGH.delta)
    return folder


@pytest.mark.parametrize("kills", chosen([6, 50], [6]))
def test_kills_at_random_instants_leave_every_release_paid_for(tmp_path: Path, kills: int) -> None:
    folder, rng, killed_charging = new(tmp_path), random.Random(0), 0
    for kill in range(kills):
        before = audit(folder)
        child = start("release", folder, "honest", 1_000_000)
        if kill % 3:  # every third child may be killed before it is ready
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        while kill % 3 == 1 and released_in(folder) == before[1]:  # every third child charges, however slow the machine
            assert child.poll() is None
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.06))
        child.kill()
        _, errors = child.communicate()
        assert child.returncode == -signal.SIGKILL, errors
        charged, released = audit(folder)
        assert (charged, released) >= before
        killed_charging += charged > before[0]
    assert killed_charging > kills // 4
    assert charged - released <= kills  # one charge at most is lost to each kill


@pytest.fixture(scope="module")
def forked() -> Iterator[Callable[..., int]]:
    """The exit code of a fork that runs the child's `main`."""
    with start("serve") as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def asked(*arguments: object) -> int:
            print(json.dumps([str(one) for one in arguments]), file=server.stdin, flush=True)
            return int(server.stdout.readline())

        yield asked
        server.stdin.close()


def sweep(forked: Callable[..., int], tmp_path: Path, order: str, rounds: int) -> Iterator[bool]:
    """Kill a new run at each of its crash points in turn; yields whether the kill left a release that was not charged."""
    for deadly in range(1000):
        folder = new(tmp_path / f"{order}-{deadly}")
        ended = forked("release-and-die", folder, order, rounds, deadly)
        if ended == 0:
            assert audit(folder) == (rounds, rounds)
            return
        assert ended == -signal.SIGKILL
        try:
            audit(folder)
            yield False
        except UnderpaidError:
            yield True
        charge_and_release(folder, "honest", 1)  # what a kill left can be gone on with
    raise AssertionError("the child never came to its end")


@pytest.mark.parametrize("rounds", chosen([1, 2], [1]))
def test_no_named_instant_is_deadly_to_the_accounts(forked: Any, tmp_path: Path, rounds: int) -> None:
    found = list(sweep(forked, tmp_path, "honest", rounds))
    assert len(found) > 5 * rounds
    assert not any(found)


def test_charging_after_the_release_is_caught(forked: Any, tmp_path: Path) -> None:
    assert any(sweep(forked, tmp_path, "broken", rounds=1))


def test_creation_killed_at_any_instant_leaves_no_ledger_or_a_whole_one(forked: Any, tmp_path: Path) -> None:
    seen = []
    for deadly in range(1000):
        path = tmp_path / str(deadly) / "ledger.db"
        path.parent.mkdir()
        ended = forked("create-and-die", path, deadly)
        seen.append(path.exists())
        if not path.exists():
            Ledger.create(path, data_set="ward", epsilon=8.0, delta=1e-5)
        assert Ledger.open(path).data_set == "ward"
        if ended == 0:
            break
    assert seen[:2] == [False, True]


def test_a_folder_without_hard_links_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("privacy.ledger_file.os.link", no_links)
    with pytest.raises(LedgerError):
        Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=8.0, delta=1e-5)
    assert list(tmp_path.iterdir()) == []


def race(*children: tuple[str | int | Path, ...]) -> Counter[int]:
    """Start the children, release them once all are ready, and count their exit statuses."""
    running = [start(*arguments) for arguments in children]
    for child in running:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in running:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in running:
        child.communicate()
    return Counter(child.returncode for child in running)


def nearly_spent(path: Path) -> Ledger:
    """A ledger with an epsilon of 1 left of 8."""
    ledger = Ledger.create(path, data_set="ward", epsilon=8.0, delta=0.0)
    ledger.reserve("earlier", Cost(7.0, 0.0), data_digest="d", unit=UNIT, terms={})
    return ledger


@pytest.mark.slow
@pytest.mark.parametrize("racers", chosen([2, 8], [2]))
def test_exactly_one_of_the_racers_gets_the_last_of_a_budget(tmp_path: Path, racers: int) -> None:
    for heat in range(5):
        ledger = nearly_spent(tmp_path / f"{heat}.db")
        got = race(*(("reserve", ledger.path, f"run-{racer}") for racer in range(racers)))
        assert got == {0: 1, BudgetExhausted.exit_code: racers - 1}
        assert ledger.spent() == Cost(8.0, 0.0)


@pytest.mark.slow
def test_a_reservation_that_looks_too_early_is_caught(tmp_path: Path) -> None:
    ledger = nearly_spent(tmp_path / "ledger.db")
    got = race(*(("reserve-hastily", ledger.path, f"run-{racer}") for racer in range(2)))
    assert got == {0: 2}
    assert ledger.spent().epsilon > 8.0


@pytest.mark.slow
def test_no_charge_of_several_processes_is_lost(tmp_path: Path) -> None:
    ledger = nearly_spent(tmp_path / "ledger.db")
    assert race(*(("charge", ledger.path, "earlier", 25) for _ in range(4))) == {0: 4}
    assert ledger.charged("earlier") == {"": 100}
    heads = heads_beside(ledger.path)
    assert Ledger.open(ledger.path, head=ledger.head, heads=heads).charged("earlier") == {"": 100}
    assert heads.newest(ledger.head.ledger) == ledger.head


@pytest.mark.slow
def test_exactly_one_of_the_racers_creates_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    assert race(*(("create", path) for _ in range(8))) == {0: 1, 2: 7}
    assert Ledger.open(path).data_set == "ward"
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.db"]


def test_threads_share_a_ledger(tmp_path: Path) -> None:
    ledger = nearly_spent(tmp_path / "ledger.db")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: ledger.charge("earlier", "", 1, {}), range(40)))
    assert ledger.charged("earlier") == {"": 40}
