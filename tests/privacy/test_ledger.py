"""The ledger admits the costs that fit its budget and refuses all others with a reason.

An account charges before each release and keeps to its plan; the RDP filter is compared with exact Gaussian privacy; a ledger
adds up costs of one unit and one adjacency.
"""

from __future__ import annotations

import hashlib
import sqlite3
import stat
import tempfile
from contextlib import closing, nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy import ledger_file
from privacy.book import SAME_UNITS, Unit
from privacy.errors import BudgetExhausted, LedgerError, PlanError
from privacy.filters import ORDERS, Budget, Cost
from privacy.ledger import Account, Ledger
from privacy.ledger_file import Head
from tests.cells import every
from tests.privacy.ledger_child import UNIT


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=1.0, delta=1e-4)


def reserve(ledger: Ledger, run: str, epsilon: float, delta: float = 0.0, **more: Any) -> Head:
    return ledger.reserve(run, Cost(epsilon, delta), **{"data_digest": "d", "unit": UNIT, "terms": {}, **more})


def test_runs_draw_on_one_budget_and_a_run_replaces_its_own_share(ledger: Ledger) -> None:
    reserve(ledger, "a", 0.3, 5e-5)
    reserve(ledger, "b", 0.5)
    for epsilon, delta in ((0.3, 0.0), (0.0, 6e-5)):
        with pytest.raises(BudgetExhausted):
            reserve(ledger, "c", epsilon, delta)
    reserve(ledger, "a", 0.5, 5e-5)
    assert ledger.spent() == Cost(1.0, 5e-5)


def test_a_run_without_a_charge_is_closed_for_good(ledger: Ledger) -> None:
    assert (Ledger.open(ledger.path).spent(), ledger.orders) == (Cost(0.0, 0.0), ())
    reserve(ledger, "b", 0.7)
    head = ledger.close("b")
    assert ledger.close("b") == head, "closed once"
    again = Ledger.open(ledger.path, head=head)
    assert (again.closed("b"), again.closed("a"), again.reserved("b")) == (True, False, None)
    with pytest.raises(PlanError):
        again.extend("b", Cost(0.8, 0.0))


def test_a_closed_run_leaves_neither_its_unit_nor_its_data_behind(ledger: Ledger) -> None:
    other = replace(UNIT, neighbours="replace-one")
    reserve(ledger, "a", 0.3)
    for refused, about in ({"unit": other}, "neighbours"), ({"data_digest": "others"}, "data"):
        with pytest.raises(LedgerError, match=about):
            reserve(ledger, "b", 0.3, **refused)
    ledger.close("a")
    reserve(ledger, "b", 0.3, unit=other, data_digest="others")
    with pytest.raises(LedgerError, match="neighbours"):
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
    with pytest.raises(PlanError):
        ledger.charge("a", "", 1, {})
    reserve(ledger, "a", 0.3)
    ledger.charge("a", "", 2, {"round": 1})
    ledger.charge("a", "client-3", 1, {})
    assert ledger.charge("a", "", 3, {}) == ledger.head
    assert Ledger.open(ledger.path).charged("a") == {"": 5, "client-3": 1}
    assert ledger.charged("b") == {}
    for releases in (0, -1, True, 1.0):
        with pytest.raises(PlanError):
            ledger.charge("a", "", releases, {})  # type: ignore[arg-type]
    with pytest.raises(PlanError):
        ledger.charge("a", 5, 1, {})  # type: ignore[arg-type]


def test_data_binds_by_digest_unless_the_user_names_the_data_set(ledger: Ledger) -> None:
    reserve(ledger, "a", 0.1, data_digest="first")
    for refused in ({"data_digest": "second"}, {"data_digest": "first", "data_set": "clinic"}):
        with pytest.raises(LedgerError, match="data"):
            reserve(ledger, "b", 0.1, **refused)
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


@pytest.mark.parametrize(("epsilon", "parts"), [(0.3, 3), (1.0, 10), (2.1, 21)])
def test_an_exact_fit_fits_and_a_tiny_overspend_does_not(tmp_path: Path, epsilon: float, parts: int) -> None:
    ledger = Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=epsilon, delta=None)
    for run in range(parts):
        reserve(ledger, str(run), 0.1)
    for more in (1e-12, 1e-14):
        with pytest.raises(BudgetExhausted):
            reserve(ledger, "more", more)
    costs = [Cost(1.0, 0.0)]
    while Budget(1.0, None).holds([*costs, Cost(2.0**-54, 0.0)]):
        costs.append(Cost(2.0**-54, 0.0))
    assert sum(Fraction(cost.epsilon) for cost in costs) <= 1 + Fraction(2) ** -49, "nor do overspends add up"


amounts = st.integers(0, 12)
reservations = st.tuples(st.sampled_from("abc"), amounts, amounts)
requests = st.lists(st.one_of(reservations, st.tuples(st.sampled_from("abc"), st.sampled_from(["charge", "close"]))))


@settings(max_examples=40)
@given(requests)
def test_any_sequence_of_requests_goes_as_in_exact_arithmetic(sequence: list[Any]) -> None:
    held: dict[str, tuple[int, int]] = {}  # tenths of epsilon and of 1e-5
    charged: set[str] = set()
    closed: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.create(Path(folder) / "ledger.db", data_set="ward", epsilon=2.3, delta=2.1e-5)
        for run, *wish in sequence:
            if run in closed and wish != ["close"]:
                with pytest.raises(PlanError):
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
    given: dict[str, Any] = {"data_set": "ward", "epsilon": 1.0, "delta": 0.0}
    ledger = Ledger.create(tmp_path / "ledger #1?.db", **given)
    for path in (tmp_path / "missing" / "ledger.db", "", ledger.path):
        with pytest.raises(LedgerError):
            Ledger.create(path, **{**given, "epsilon": 9.0})
    assert Ledger.open(ledger.path).epsilon == 1.0
    assert [file.name for file in tmp_path.iterdir()] == [ledger.path.name]
    monkeypatch.setattr(Path, "exists", lambda _: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(LedgerError):
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
        with pytest.raises(LedgerError):
            Head.from_dict(kept)
    with pytest.raises(LedgerError, match="has been cut"):
        Ledger.open(ledger.path, head=replace(head, row=2))


def linear(count: int) -> Cost:
    return Cost(count / 10, 0.0)


@pytest.fixture
def three(tmp_path: Path) -> Ledger:
    """A ledger whose budget covers ten releases; run 'a' has reserved three."""
    ledger = Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=1.0, delta=0.0)
    reserve(ledger, "a", 0.3)
    return ledger


def planned(who: str) -> int:
    return {"": 3, "north": 2, "south": 1}[who]


def test_one_more_than_planned_is_refused_and_not_charged(three: Ledger) -> None:
    account = Account(three, "a", planned, None, lambda _: None)
    account.charge(2, "north")
    with pytest.raises(BudgetExhausted, match=r"release 3 .* 'north' .* 2 planned"):
        account.charge(who="north")
    account.charge(2, note={"round": 1})
    assert (account.left("north"), account.left("south"), account.left()) == (0, 1, 1)
    assert (account.releases("north"), account.releases("south"), account.releases()) == (2, 0, 2)
    assert three.rows()[-1].body["note"] == {"round": 1}
    with pytest.raises(BudgetExhausted):
        account.charge(2)
    assert three.charged("a") == {"north": 2, "": 2}


def test_every_committed_row_is_told_after_it_is_on_disk(three: Ledger) -> None:
    told: list[Head] = []

    def after(head: Head) -> None:
        assert Ledger.open(three.path, head=head).head == head
        told.append(head)

    account = Account(three, "a", planned, linear, after)
    account.charge(3)
    account.charge()
    assert [(head.row, row.kind) for head, row in zip(told, three.rows()[2:], strict=True)] == [
        (3, "charge"),
        (4, "reserve"),
        (5, "charge"),
    ]


def test_a_plan_grows_as_far_as_the_ledger_admits(three: Ledger) -> None:
    account = Account(three, "a", planned, linear, lambda _: None)
    reserve(three, "b", 0.5)
    for _ in range(5):
        account.charge()
    assert three.spent() == Cost(1.0, 0.0)
    assert account.left() == 0
    with pytest.raises(
        BudgetExhausted, match=r"epsilon 0\.6 and delta 0, and epsilon 0.5 and delta 0 is left of epsilon 1"
    ):
        account.charge()
    assert account.releases() == 5
    resumed = Account(Ledger.open(three.path), "a", planned, linear, lambda _: None)
    assert (resumed.releases(), resumed.left()) == (5, 0), "it goes on where a killed one was"


def test_a_head_that_cannot_be_kept_stops_the_release_and_stays_charged(three: Ledger) -> None:
    def full(_: Head) -> None:
        raise OSError(28, "No space left on device")

    account = Account(three, "a", planned, None, full)
    with pytest.raises(OSError, match="No space"):
        account.charge()
    assert account.releases() == 1


BUDGETS = [(0.5, 1e-6), (1.0, 1e-5), (3.0, 1e-5), (8.0, 1e-5), (8.0, 1e-9), (50.0, 1e-3)]


@every(("epsilon", "delta"), BUDGETS)
def test_the_limit_is_what_dp_accounting_converts_to_the_budget(epsilon: float, delta: float) -> None:
    budget = Budget.fixed(epsilon, delta, "rdp")
    converted, _ = compute_epsilon([budget.order], [budget.limits[0]], delta)
    assert converted == pytest.approx(epsilon, rel=1e-9)


@pytest.fixture
def rdp(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=3.0, delta=1e-5, composition="rdp")


def test_the_order_is_the_best_for_gaussians_and_is_kept(rdp: Ledger) -> None:
    (order,) = rdp.orders
    at = {order: Budget(3.0, 1e-5, "rdp", order).limits[0] / order for order in ORDERS}
    assert at[order] == max(at.values())
    assert Ledger.open(rdp.path).orders == (order,)


def test_rho_is_added_up_and_the_rest_is_not(rdp: Ledger) -> None:
    (limit,) = rdp.budget.limits
    for run in range(10):  # basic composition would admit six of these
        rdp.reserve(str(run), Cost(0.5, 1e-5, (limit / 10,)), data_digest="d", unit=UNIT, terms={})
    assert (rdp.spent().epsilon, rdp.spent().delta) == (pytest.approx(3.0), 1e-5)
    with pytest.raises(BudgetExhausted, match=r"needs RDP 0\.01 at order .*, and RDP .* is left of RDP"):
        rdp.reserve("more", Cost(0.5, 1e-5, (0.01,)), data_digest="d", unit=UNIT, terms={})


def test_an_rdp_ledger_is_not_given_an_epsilon_alone(rdp: Ledger) -> None:
    for rho in (None, (), (0.1, 0.2)):
        with pytest.raises(PlanError):
            rdp.reserve("a", Cost(0.5, 1e-5, rho), data_digest="d", unit=UNIT, terms={})
    assert rdp.spent() == Cost(0.0, 0.0, (0.0,))


def test_a_ledger_without_limits_holds_everything_but_infinity(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=None, delta=None)
    reserve(ledger, "a", 1e308, 1.0)
    with pytest.raises(BudgetExhausted):
        reserve(ledger, "b", 1e308, 1.0)
    assert ledger.spent() == Cost(1e308, 1.0)


NOTHING = [
    (float("nan"), 1e-5),
    (-1.0, 1e-5),
    (1.0, 1.0),
    (1.0, -1e-5),
    (None, 1e-5),
    (1.0, None),
    (1.0, 0.0),
    (1e-4, 1e-5),
]


def test_a_budget_of_which_nothing_follows_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    given: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "composition": "rdp"}
    wrong = [{"epsilon": epsilon, "delta": delta} for epsilon, delta in NOTHING]
    for one in (*wrong, {"composition": "strong"}, {"epsilon": -1.0, "composition": "basic"}, {"data_set": 5}):
        with pytest.raises(PlanError):
            Ledger.create(tmp_path / "ledger.db", **{"data_set": "ward"} | given | one)
    assert list(tmp_path.iterdir()) == []


PATIENT = Unit("patient", "person", "who is which patient", "add-remove")
DOCTOR = Unit("doctor", "person", "who has which doctor", "add-remove")
GROWN = replace(PATIENT, name="patient 2027", members="who is which patient by now")


def reserve_for(ledger: Ledger, run: str, unit: Unit) -> None:
    """Reserve for a run whose user names the data set, so that data of any digest are admitted."""
    reserve(ledger, run, 0.1, data_digest=run, unit=unit, data_set="ward")


OTHERS = [
    (DOCTOR, "'patient'.*'doctor'.* patient doctor`"),
    (replace(PATIENT, members=GROWN.members), "'patient' with other rows.* patient NEW-NAME`"),
    (replace(PATIENT, kind="client"), "'person', not 'client'"),
    (replace(PATIENT, neighbours="replace-one"), "'add-remove', not 'replace-one'"),
]


@pytest.mark.parametrize(("other", "says"), OTHERS)
def test_another_unit_is_refused_and_nothing_is_written(ledger: Ledger, other: Unit, says: str) -> None:
    reserve_for(ledger, "first", PATIENT)
    before = ledger.path.read_bytes()
    for attempt in (lambda: ledger.require("x", "ward", other), lambda: reserve_for(ledger, "second", other)):
        with pytest.raises(LedgerError, match=says):
            attempt()
    assert ledger.path.read_bytes() == before
    reserve_for(ledger, "second", PATIENT)
    assert ledger.spent().epsilon == 0.2


def test_a_holder_that_states_that_units_are_the_same_may_change_their_rows(ledger: Ledger) -> None:
    """Another name, kind or neighbours are still refused, and so is a later reservation without that statement."""
    reserve_for(ledger, "first", PATIENT)
    same = replace(PATIENT, members=SAME_UNITS)
    reserve_for(ledger, "second", same)
    assert Ledger.open(ledger.path).spent().epsilon == 0.2
    for other in (
        replace(same, name="doctor"),
        replace(same, kind="client"),
        replace(same, neighbours="replace-one"),
        replace(PATIENT, members=GROWN.members),
    ):
        with pytest.raises(LedgerError):
            reserve_for(ledger, "third", other)


def test_who_reserves_first_decides_though_both_have_looked(ledger: Ledger) -> None:
    """Two runs that start together both find an empty ledger; only the unit of the first reservation is admitted."""
    other = Ledger.open(ledger.path)
    for each, unit in ((ledger, PATIENT), (other, DOCTOR)):
        each.require("x", "ward", unit)
    reserve_for(ledger, "first", PATIENT)
    with pytest.raises(LedgerError, match="'doctor' do not add up"):
        reserve_for(other, "second", DOCTOR)


def test_what_is_declared_the_same_adds_up_and_nothing_else_does(ledger: Ledger) -> None:
    reserve_for(ledger, "first", PATIENT)
    ledger.declare_same("patient", "patient 2027")
    ledger.declare_same("person", "patient 2027")
    reserve_for(ledger, "second", GROWN)
    reserve_for(ledger, "third", replace(GROWN, name="person", kind="client", members="all of one client"))
    again = Ledger.open(ledger.path)
    assert again.spent().epsilon == pytest.approx(0.3)
    assert list(again.units.used) == ["patient", "patient 2027", "person"]
    assert [row.body["units"] for row in again.rows() if row.kind == "same"] == [
        ["patient", "patient 2027"],
        ["person", "patient 2027"],
    ]
    for changes in ({"name": "doctor"}, {"members": "and more"}, {"neighbours": "replace-one"}):
        with pytest.raises(LedgerError):
            reserve_for(again, "fourth", replace(GROWN, **changes))
    with pytest.raises(PlanError):
        reserve_for(again, "fourth", replace(GROWN, name=""))


@pytest.mark.parametrize("first", ["client", "example"])
def test_an_example_is_never_declared_to_be_a_client_or_a_group(ledger: Ledger, first: str) -> None:
    other = {"client": "example", "example": "client"}[first]
    known, foreign = (Unit(kind, kind, "the same rows", "add-remove") for kind in (first, other))
    reserve_for(ledger, "first", known)
    with pytest.raises(LedgerError, match="an example is no client"):
        ledger.declare_same(first, other)
    ledger.declare_same(first, "somebody")  # a unit whose kind is known once it reserves
    ledger.declare_same("somebody", "anybody")
    with pytest.raises(LedgerError, match="an example is no client"):
        ledger.declare_same("anybody", other)
    before = ledger.path.read_bytes()
    with pytest.raises(LedgerError, match=f"'{first}' and is '{other}'"):
        reserve_for(ledger, "second", replace(foreign, name="anybody"))
    assert ledger.path.read_bytes() == before
    reserve_for(ledger, "second", replace(known, name="anybody"))


def test_no_digest_of_rows_is_kept_that_would_confirm_a_guess(tmp_path: Path) -> None:
    """The same rows have different digests in every ledger, and only the owner of the file can read its key."""
    kept = []
    for name in ("one", "two"):
        ledger = Ledger.create(tmp_path / name, data_set="ward", epsilon=8.0, delta=1e-4)
        reserve_for(ledger, "first", PATIENT)
        assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
        content = ledger.path.read_bytes()
        for plain in ("first", PATIENT.members):
            assert hashlib.sha256(plain.encode()).hexdigest().encode() not in content
        body = ledger.rows()[1].body
        kept += [body["unit"]["members"], body["data"]]
    assert PATIENT.members not in kept
    assert len(set(kept)) == 4
