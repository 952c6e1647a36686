"""Processes that use one ledger at the same time: exactly one gets the rest of a budget, and no row is lost."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from privacy.errors import BudgetExhausted
from privacy.filters import Cost
from privacy.ledger import Ledger
from tests.cells import chosen
from tests.privacy.ledger_child import UNIT, heads_beside, start


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
    threads = [
        threading.Thread(target=lambda: [ledger.charge("earlier", "", 1, {}) for _ in range(10)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.charged("earlier") == {"": 40}
