"""The ledger admits the costs that fit its budget and refuses all others with a reason."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing, nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy import ledger_file
from privacy.errors import BudgetExhausted, LedgerError, PlanError
from privacy.filters import Budget, Cost
from privacy.ledger import Ledger
from privacy.ledger_file import Head
from tests.cells import every
from tests.privacy.ledger_child import UNIT


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=1.0, delta=1e-4)


def reserve(ledger: Ledger, run: str, epsilon: float, delta: float = 0.0, **more: Any) -> Head:
    return ledger.reserve(run, Cost(epsilon, delta), **{"data_digest": "d", "unit": UNIT, "terms": {}, **more})


def test_a_new_ledger_has_spent_nothing_and_is_found_again(ledger: Ledger) -> None:
    again = Ledger.open(ledger.path, head=ledger.head)
    assert (again.data_set, again.epsilon, again.delta, again.composition) == ("ward", 1.0, 1e-4, "basic")
    assert again.orders == ()
    assert again.spent() == Cost(0.0, 0.0)
    assert again.reserved("a") is None
    assert again.head == ledger.head


def test_runs_draw_on_one_budget_and_a_run_replaces_its_own_share(ledger: Ledger) -> None:
    reserve(ledger, "a", 0.3, 5e-5)
    reserve(ledger, "b", 0.5)
    with pytest.raises(BudgetExhausted, match=r"run 'c': .* epsilon 0\.3 .*, and epsilon 0\.2 .* left of epsilon 1 "):
        reserve(ledger, "c", 0.3)
    reserve(ledger, "a", 0.5, 5e-5)
    assert ledger.spent() == Cost(1.0, 5e-5)
    with pytest.raises(BudgetExhausted, match="delta 6e-05, and epsilon 0 and delta 5e-05 is left"):
        reserve(ledger, "c", 0.0, 6e-5)
    assert [row.kind for row in ledger.rows()] == ["open", "reserve", "reserve", "reserve"]


def test_nothing_is_given_back(ledger: Ledger) -> None:
    reserve(ledger, "a", 0.3, 5e-5)
    for smaller in (Cost(0.2, 5e-5), Cost(0.4, 4e-5)):
        with pytest.raises(PlanError, match="cannot lower that"):
            ledger.reserve("a", smaller, data_digest="d", unit=UNIT, terms={})
    assert ledger.reserved("a") == Cost(0.3, 5e-5)


def test_a_run_without_a_charge_is_closed_whole_and_for_good(ledger: Ledger) -> None:
    reserve(ledger, "a", 0.3, 5e-5)
    reserve(ledger, "b", 0.7, data_digest="d")
    head = ledger.close("b")
    assert ledger.close("b") == head, "closed once"
    assert (ledger.spent(), ledger.reserved("b")) == (Cost(0.3, 5e-5), None)
    again = Ledger.open(ledger.path, head=head)
    assert [row.kind for row in again.rows()] == ["open", "reserve", "reserve", "close"]
    assert (again.closed("b"), again.closed("a")) == (True, False)
    for spends in (
        lambda: reserve(again, "b", 0.1),
        lambda: again.extend("b", Cost(0.8, 0.0)),
        lambda: again.charge("b", "", 1, {}),
    ):
        with pytest.raises(PlanError, match="'b' was closed"):
            spends()
    reserve(again, "c", 0.7)
    assert ledger.spent().epsilon == 1.0


def test_a_run_that_has_charged_or_reserved_nothing_is_not_closed(ledger: Ledger) -> None:
    reserve(ledger, "a", 0.3)
    ledger.charge("a", "client-3", 1, {})
    before = ledger.head
    with pytest.raises(PlanError, match=r"'a' has charged 1 releases .* is spent"):
        ledger.close("a")
    with pytest.raises(PlanError, match="'b' has reserved nothing"):
        ledger.close("b")
    assert Ledger.open(ledger.path).head == before


def test_a_closed_run_leaves_neither_its_unit_nor_its_data_behind(ledger: Ledger) -> None:
    other = replace(UNIT, neighbours="replace-one")
    reserve(ledger, "a", 0.3)
    for refused, about in ({"unit": other}, "neighbours"), ({"data_digest": "others"}, "the data of run 'b'"):
        with pytest.raises(LedgerError, match=about):
            reserve(ledger, "b", 0.3, **refused)
    ledger.close("a")
    reserve(ledger, "b", 0.3, unit=other, data_digest="others")
    with pytest.raises(LedgerError, match="counts privacy for neighbours"):
        reserve(Ledger.open(ledger.path), "c", 0.3, data_digest="others")


def test_extending_keeps_data_and_terms_and_writes_nothing_for_what_is_held(ledger: Ledger) -> None:
    reserve(ledger, "a", 0.3, 5e-5, terms={"unit": "client"})
    head = ledger.head
    assert ledger.extend("a", Cost(0.2, 0.0)) == head
    ledger.extend("a", Cost(0.4, 0.0))
    assert ledger.reserved("a") == Cost(0.4, 5e-5)
    assert ledger.rows()[-1].body["terms"] == {"unit": "client"}
    with pytest.raises(BudgetExhausted):
        ledger.extend("a", Cost(1.1, 0.0))


def test_what_is_admitted_can_be_asked_without_taking_it(ledger: Ledger) -> None:
    reserve(ledger, "a", 0.3)
    assert ledger.admits("a", Cost(1.0, 0.0))
    assert not ledger.admits("b", Cost(1.0, 0.0))
    assert ledger.spent().epsilon == 0.3


def test_charges_are_counted_by_who_and_need_a_reservation(ledger: Ledger) -> None:
    with pytest.raises(PlanError, match="reserved nothing"):
        ledger.charge("a", "", 1, {})
    reserve(ledger, "a", 0.3)
    ledger.charge("a", "", 2, {"round": 1})
    ledger.charge("a", "client-3", 1, {})
    assert ledger.charge("a", "", 3, {}) == ledger.head
    assert Ledger.open(ledger.path).charged("a") == {"": 5, "client-3": 1}
    assert ledger.charged("b") == {}
    for releases in (0, -1, True, 1.0):
        with pytest.raises(PlanError, match="whole number"):
            ledger.charge("a", "", releases, {})  # type: ignore[arg-type]


def test_data_binds_by_digest_unless_the_user_names_the_data_set(ledger: Ledger) -> None:
    reserve(ledger, "a", 0.1, data_digest="first")
    with pytest.raises(LedgerError, match=r"no reservation for the data of run 'b'.*set privacy.data_set to 'ward'"):
        reserve(ledger, "b", 0.1, data_digest="second")
    with pytest.raises(LedgerError, match=r"is the ledger of data set 'ward', not of 'clinic'"):
        reserve(ledger, "b", 0.1, data_digest="first", data_set="clinic")
    reserve(ledger, "b", 0.1, data_digest="second", data_set="ward")
    reserve(ledger, "c", 0.1, data_digest="second")
    assert len(ledger.rows()) == 4


@every("value", [float("nan"), float("inf"), -0.1, -1e-300, True, "1"])
def test_a_cost_that_is_no_number_from_0_on_is_refused(value: Any) -> None:
    for cost in ((value, 0.0), (0.0, value), (0.0, 0.0, (value,))):
        with pytest.raises(PlanError, match="finite number of at least 0"):
            Cost(*cost)


def test_what_cannot_be_written_as_json_is_refused(ledger: Ledger) -> None:
    for terms in ({"x": float("nan")}, {"x": object()}, {"x": {1, 2}}):
        with pytest.raises(PlanError, match="cannot be stored"):
            reserve(ledger, "a", 0.1, terms=terms)
    for run in ("", "a\nb", "\ud800"):
        with pytest.raises(PlanError, match="printable"):
            reserve(ledger, run, 0.1)
    reserve(ledger, "a", 0.1, terms={10: "é", 9: [None, True]})
    assert Ledger.open(ledger.path).rows()[-1].body["terms"] == {"10": "é", "9": [None, True]}


@pytest.mark.parametrize(("epsilon", "parts"), [(0.3, 3), (1.0, 10), (0.7, 7), (2.1, 21), (5.5, 55)])
def test_an_exact_fit_fits_and_a_tiny_overspend_does_not(tmp_path: Path, epsilon: float, parts: int) -> None:
    ledger = Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=epsilon, delta=None)
    for run in range(parts):
        reserve(ledger, str(run), 0.1)
    for more in (1e-12, 1e-14):
        with pytest.raises(BudgetExhausted):
            reserve(ledger, "more", more)


def test_overspends_within_the_tolerance_do_not_add_up() -> None:
    budget = Budget(1.0, None)
    costs = [Cost(1.0, 0.0)]
    while budget.holds([*costs, Cost(2.0**-54, 0.0)]):
        costs.append(Cost(2.0**-54, 0.0))
    assert sum(Fraction(cost.epsilon) for cost in costs) <= 1 + Fraction(2) ** -49


amounts = st.integers(0, 12)
reservations = st.tuples(st.sampled_from("abc"), amounts, amounts)
requests = st.lists(st.one_of(reservations, st.tuples(st.sampled_from("abc"), st.sampled_from(["charge", "close"]))))


@settings(max_examples=100)
@given(requests)
def test_any_sequence_of_requests_goes_as_in_exact_arithmetic(sequence: list[Any]) -> None:
    held: dict[str, tuple[int, int]] = {}  # tenths of epsilon and of 1e-5
    charged: set[str] = set()
    closed: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.create(Path(folder) / "ledger.db", data_set="ward", epsilon=2.3, delta=2.1e-5)
        for run, *wish in sequence:
            if run in closed and wish != ["close"]:
                with pytest.raises(PlanError, match="was closed"):
                    ledger.charge(run, "", 1, {}) if wish == ["charge"] else reserve(ledger, run, 0.0)
                continue
            if len(wish) == 1:
                admitted = run in held and (wish == ["charge"] or run not in charged)
                with nullcontext() if admitted or run in closed else pytest.raises(PlanError):
                    ledger.charge(run, "", 1, {}) if wish == ["charge"] else ledger.close(run)
                if admitted and wish == ["charge"]:
                    charged.add(run)
                elif admitted:
                    held.pop(run)
                    closed.add(run)
                continue
            epsilon, delta = wish
            wanted = {**held, run: (epsilon, delta)}
            shrinks = run in held and (epsilon < held[run][0] or delta < held[run][1])
            fits = sum(e for e, _ in wanted.values()) <= 23 and sum(d for _, d in wanted.values()) <= 21
            try:
                reserve(ledger, run, float(Fraction(epsilon, 10)), float(Fraction(delta, 10**6)))
                outcome = "held"
            except PlanError:
                outcome = "shrinks"
            except BudgetExhausted:
                outcome = "exhausted"
            assert outcome == ("shrinks" if shrinks else "held" if fits else "exhausted")
            held = wanted if outcome == "held" else held
        spent = Ledger.open(ledger.path, head=ledger.head).spent()
    assert spent.epsilon == pytest.approx(sum(e for e, _ in held.values()) / 10)
    assert spent.delta == pytest.approx(sum(d for _, d in held.values()) / 10**6)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.write_bytes(b"no ledger at all\n" * 500), "damaged, or is not a ledger"),
        (lambda path: sqlite3.connect(path).execute("CREATE TABLE other (x)").connection.close(), "not a ledger"),
    ],
)
def test_what_is_no_ledger_is_refused_in_one_sentence(tmp_path: Path, make: Any, sentence: str) -> None:
    path = tmp_path / "ledger #1?.db"  # characters with a meaning in a file's URI
    make(path)
    with pytest.raises(LedgerError, match=sentence) as error:
        Ledger.open(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_cannot_be_opened_or_created_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger.create(tmp_path / "missing" / "ledger.db", data_set="ward", epsilon=1.0, delta=0.0)
    with pytest.raises(LedgerError, match=r"names no file; give one, such as ledger\.sqlite"):
        Ledger.create("", data_set="ward", epsilon=1.0, delta=0.0)
    ledger = Ledger.create(tmp_path / "ledger #1?.db", data_set="ward", epsilon=1.0, delta=0.0)
    with pytest.raises(LedgerError, match="exists already"):
        Ledger.create(ledger.path, data_set="ward", epsilon=9.0, delta=0.0)
    assert Ledger.open(ledger.path).epsilon == 1.0
    assert [file.name for file in tmp_path.iterdir()] == [ledger.path.name]
    monkeypatch.setattr(Path, "exists", lambda _: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(LedgerError, match="cannot be read"):
        Ledger.open(ledger.path)


def test_a_ledger_locked_for_too_long_is_refused_and_nothing_is_charged(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(ledger, "a", 0.1)
    monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 0.01)
    with closing(sqlite3.connect(ledger.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="locked by another process"):
            ledger.charge("a", "", 1, {})
    assert ledger.charged("a") == {}


def test_a_row_that_does_not_reach_the_disk_is_in_no_book(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(ledger, "a", 0.1)
    before = ledger.head
    with monkeypatch.context() as patch:
        patch.setattr(ledger_file, "crash_point", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ledger.charge("a", "", 1, {})
    assert ledger.head == before
    assert ledger.charged("a") == {}
    ledger.charge("a", "", 1, {})
    assert ledger.charged("a") == {"": 1}


def test_rows_are_synced_and_so_is_the_folder_after_the_journal_is_gone(
    ledger: Ledger, durable_pragmas: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "PRAGMAS", durable_pragmas)
    with ledger_file.transaction(ledger.path, write=False) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_head_survives_being_kept_and_nothing_else_passes_for_one(ledger: Ledger) -> None:
    head = ledger.head
    assert Head.from_dict(head.to_dict()) == head
    for kept in ({}, {**head.to_dict(), "row": "1"}, {**head.to_dict(), "more": 1}, {**head.to_dict(), "row": 0}):
        with pytest.raises(LedgerError, match="not the head of a ledger"):
            Head.from_dict(kept)
    with pytest.raises(LedgerError, match="has been cut"):
        Ledger.open(ledger.path, head=replace(head, row=2))


def test_the_ledger_loads_nothing_heavy() -> None:
    probe = "import privacy.ledger, sys; print({'torch', 'scipy', 'numpy', 'dp_accounting'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
