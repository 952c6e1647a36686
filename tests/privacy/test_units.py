"""A ledger adds up costs of one unit and one adjacency. Another unit is refused unless the user declares it the same."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from privacy.book import SAME_UNITS, Unit
from privacy.errors import LedgerError, PlanError
from privacy.filters import Cost
from privacy.ledger import Ledger

PATIENT = Unit("patient", "group", "who is which patient", "add-remove")
DOCTOR = Unit("doctor", "group", "who has which doctor", "add-remove")
GROWN = replace(PATIENT, name="patient 2027", members="who is which patient by now")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=8.0, delta=1e-4)


def reserve(ledger: Ledger, run: str, unit: Unit) -> None:
    """Reserve for a run whose user names the data set, so that data of any digest are admitted."""
    ledger.reserve(run, Cost(1.0, 0.0), data_digest=run, unit=unit, terms={}, data_set="ward")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (DOCTOR, r"unit 'patient', and costs of unit 'doctor' do not add up with it \(row 2\).* patient doctor`"),
        (
            replace(PATIENT, members=GROWN.members),
            r"knows unit 'patient' with other rows \(row 2\).* patient NEW-NAME`",
        ),
        (replace(PATIENT, kind="client"), r"with privacy\.unit = 'group', not 'client' \(row 2\)"),
        (replace(PATIENT, neighbours="replace-one"), r"neighbours 'add-remove', not 'replace-one' \(row 2\)"),
    ],
)
def test_another_unit_is_refused_and_nothing_is_written(ledger: Ledger, other: Unit, says: str) -> None:
    reserve(ledger, "first", PATIENT)
    before = ledger.path.read_bytes()
    for attempt in (lambda: ledger.require("x", "ward", other), lambda: reserve(ledger, "second", other)):
        with pytest.raises(LedgerError, match=says) as refused:
            attempt()
        assert "\n" not in str(refused.value)
    assert ledger.path.read_bytes() == before
    reserve(ledger, "second", PATIENT)
    assert ledger.spent().epsilon == 2.0


def test_a_holder_that_states_that_units_are_the_same_may_change_their_rows(ledger: Ledger) -> None:
    """Another name, kind or neighbours are still refused, and so is a later reservation without that statement."""
    reserve(ledger, "first", PATIENT)
    same = replace(PATIENT, members=SAME_UNITS)
    reserve(ledger, "second", same)
    assert Ledger.open(ledger.path).spent().epsilon == 2.0
    for other in (
        replace(same, name="doctor"),
        replace(same, kind="client"),
        replace(same, neighbours="replace-one"),
        replace(PATIENT, members=GROWN.members),
    ):
        with pytest.raises(LedgerError):
            reserve(ledger, "third", other)


def test_who_reserves_first_decides_though_both_have_looked(ledger: Ledger) -> None:
    """Two runs that start together both find an empty ledger; only the unit of the first reservation is admitted."""
    other = Ledger.open(ledger.path)
    for each, unit in ((ledger, PATIENT), (other, DOCTOR)):
        each.require("x", "ward", unit)
    reserve(ledger, "first", PATIENT)
    with pytest.raises(LedgerError, match="'doctor' do not add up"):
        reserve(other, "second", DOCTOR)


def test_what_is_declared_the_same_adds_up_and_nothing_else_does(ledger: Ledger) -> None:
    reserve(ledger, "first", PATIENT)
    ledger.declare_same("patient", "patient 2027")
    ledger.declare_same("person", "patient 2027")
    reserve(ledger, "second", GROWN)
    reserve(ledger, "third", replace(GROWN, name="person", kind="client", members="all of one client"))
    again = Ledger.open(ledger.path)
    assert again.spent().epsilon == 3.0
    assert list(again.units.used) == ["patient", "patient 2027", "person"]
    assert [row.body["units"] for row in again.rows() if row.kind == "same"] == [
        ["patient", "patient 2027"],
        ["person", "patient 2027"],
    ]
    with pytest.raises(LedgerError, match="do not add up"):
        reserve(again, "fourth", DOCTOR)
    with pytest.raises(LedgerError, match="with other rows"):
        reserve(again, "fourth", replace(GROWN, members="and more"))
    with pytest.raises(LedgerError, match="neighbours"):
        reserve(again, "fourth", replace(GROWN, neighbours="replace-one"))
    with pytest.raises(PlanError, match="cannot be called"):
        reserve(again, "fourth", replace(GROWN, name=""))


@pytest.mark.parametrize("first", ["client", "example"])
def test_an_example_is_never_declared_to_be_a_client_or_a_group(ledger: Ledger, first: str) -> None:
    other = {"client": "example", "example": "client"}[first]
    known, foreign = (Unit(kind, kind, "the same rows", "add-remove") for kind in (first, other))
    reserve(ledger, "first", known)
    with pytest.raises(
        LedgerError, match=r"an example is no client and no group \(.*'client' is of kind 'client'"
    ) as refused:
        ledger.declare_same(first, other)
    assert "\n" not in str(refused.value)
    ledger.declare_same(first, "somebody")  # a unit whose kind is known once it reserves
    ledger.declare_same("somebody", "anybody")
    with pytest.raises(LedgerError, match="an example is no client"):
        ledger.declare_same("anybody", other)
    before = ledger.path.read_bytes()
    with pytest.raises(LedgerError, match=rf"privacy\.unit was '{first}' and is '{other}'") as refused:
        reserve(ledger, "second", replace(foreign, name="anybody"))
    assert refused.value.exit_code == 2
    assert ledger.path.read_bytes() == before
    reserve(ledger, "second", replace(known, name="anybody"))


def test_no_digest_of_rows_is_kept_that_would_confirm_a_guess(tmp_path: Path) -> None:
    """The same rows have different digests in every ledger, and only the owner of the file can read its key."""
    kept = []
    for name in ("one", "two"):
        ledger = Ledger.create(tmp_path / name, data_set="ward", epsilon=8.0, delta=1e-4)
        reserve(ledger, "first", PATIENT)
        assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
        content = ledger.path.read_bytes()
        for plain in ("first", PATIENT.members):
            assert hashlib.sha256(plain.encode()).hexdigest().encode() not in content
        body = ledger.rows()[1].body
        kept += [body["unit"]["members"], body["data"]]
    assert PATIENT.members not in kept
    assert len(set(kept)) == 4
