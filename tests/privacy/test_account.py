"""An account charges before each release, keeps to its plan, and extends the plan only as far as the ledger admits."""

from __future__ import annotations

from pathlib import Path

import pytest

from privacy.errors import BudgetExhausted, LedgerError, PlanError
from privacy.filters import Cost
from privacy.ledger import Account, Ledger
from privacy.ledger_file import Head
from tests.privacy.ledger_child import UNIT


def linear(count: int) -> Cost:
    return Cost(count / 10, 0.0)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A ledger whose budget covers ten releases; run 'a' has reserved three."""
    ledger = Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=1.0, delta=0.0)
    ledger.reserve("a", linear(3), data_digest="d", unit=UNIT, terms={})
    return ledger


def planned(who: str) -> int:
    return {"": 3, "north": 2, "south": 1}[who]


def test_charges_count_down_what_is_left_for_each(ledger: Ledger) -> None:
    account = Account(ledger, "a", planned, None, lambda _: None)
    account.charge(2, "north", {"round": 1})
    account.charge(1, "south")
    assert (account.left("north"), account.left("south"), account.left()) == (0, 0, 3)
    assert (account.releases("north"), account.releases("south"), account.releases()) == (2, 1, 0)
    assert ledger.rows()[-2].body["note"] == {"round": 1}


def test_one_more_than_planned_is_refused_and_not_charged(ledger: Ledger) -> None:
    account = Account(ledger, "a", planned, None, lambda _: None)
    account.charge(2, "north")
    with pytest.raises(BudgetExhausted, match=r"release 3 of run 'a' by client 'north' is beyond the 2 planned: raise"):
        account.charge(who="north")
    account.charge(2)
    with pytest.raises(BudgetExhausted, match="release 4 of run"):
        account.charge(2)
    assert ledger.charged("a") == {"north": 2, "": 2}


def test_every_committed_row_is_told_after_it_is_on_disk(ledger: Ledger) -> None:
    told: list[Head] = []

    def after(head: Head) -> None:
        assert Ledger.open(ledger.path, head=head).head == head
        told.append(head)

    account = Account(ledger, "a", planned, linear, after)
    account.charge(3)
    account.charge()
    assert [(head.row, row.kind) for head, row in zip(told, ledger.rows()[2:], strict=True)] == [
        (3, "charge"),
        (4, "reserve"),
        (5, "charge"),
    ]


def test_a_plan_grows_as_far_as_the_ledger_admits(ledger: Ledger) -> None:
    account = Account(ledger, "a", planned, linear, lambda _: None)
    ledger.reserve("b", linear(5), data_digest="d", unit=UNIT, terms={})
    for _ in range(5):
        account.charge()
    assert ledger.spent() == Cost(1.0, 0.0)
    assert account.left() == 0
    with pytest.raises(
        BudgetExhausted, match=r"epsilon 0\.6 and delta 0, and epsilon 0.5 and delta 0 is left of epsilon 1"
    ):
        account.charge()
    assert account.releases() == 5
    with pytest.raises(BudgetExhausted):
        ledger.reserve("c", linear(1), data_digest="d", unit=UNIT, terms={})


def test_a_resumed_run_goes_on_where_the_killed_one_was(ledger: Ledger) -> None:
    Account(ledger, "a", planned, linear, lambda _: None).charge(4)
    resumed = Account(Ledger.open(ledger.path), "a", planned, linear, lambda _: None)
    assert (resumed.releases(), resumed.left()) == (4, 0)
    resumed.charge()
    assert ledger.reserved("a") == linear(5)


def test_a_head_that_cannot_be_kept_stops_the_release_and_stays_charged(ledger: Ledger) -> None:
    def full(_: Head) -> None:
        raise OSError(28, "No space left on device")

    account = Account(ledger, "a", planned, None, full)
    with pytest.raises(OSError, match="No space"):
        account.charge()
    assert account.releases() == 1


def test_nothing_is_charged_that_is_no_count_or_has_no_reservation(ledger: Ledger) -> None:
    account = Account(ledger, "a", planned, None, lambda _: None)
    for releases in (0, -1, True, 0.5):
        with pytest.raises(PlanError, match="whole number"):
            account.charge(releases)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="reserved nothing"):
        Account(ledger, "b", planned, None, lambda _: None).charge()
    assert ledger.charged("a") == {}


def test_a_ledger_changed_under_a_running_account_stops_it(ledger: Ledger, tmp_path: Path) -> None:
    account = Account(ledger, "a", planned, None, lambda _: None)
    account.charge()
    other = Ledger.create(tmp_path / "other.db", data_set="ward", epsilon=1.0, delta=0.0)
    other.reserve("a", linear(3), data_digest="d", unit=UNIT, terms={})
    other.path.replace(ledger.path)
    with pytest.raises(LedgerError, match=r"ledger.db has been cut: row 3, read before, is gone"):
        account.charge()
