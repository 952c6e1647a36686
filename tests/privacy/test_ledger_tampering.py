"""Every change of a ledger's file is noticed: by the chain of digests, or else by a head kept elsewhere.

A ledger with damaged bytes, wherever they are, is refused or reads the same.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from privacy import ledger_file
from privacy.errors import LedgerError
from privacy.filters import Cost
from privacy.ledger import Ledger
from privacy.ledger_file import Head, Row
from tests.privacy.ledger_child import UNIT

FIELDS = ("id", "kind", "run", "body", "digest")
ROWS = 8


def filled(path: Path) -> Ledger:
    ledger = Ledger.create(path, data_set="ward", epsilon=8.0, delta=1e-4)
    ledger.reserve("a", Cost(3.0, 1e-5), data_digest="d", unit=UNIT, terms={"unit": "client"})
    ledger.charge("a", "", 1, {"round": 1})
    ledger.reserve("b", Cost(2.0, 1e-5), data_digest="d", unit=UNIT, terms={})
    ledger.charge("b", "north", 2, {})
    ledger.charge("a", "", 1, {"round": 2})
    ledger.reserve("c", Cost(1.0, 1e-5), data_digest="d", unit=UNIT, terms={})
    ledger.close("c")
    return ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return filled(tmp_path / "ledger.db")


@contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection without the table's triggers, which are restored afterwards, so that only the chain can notice a change."""
    with closing(sqlite3.connect(path)) as connection, connection:
        triggers = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE type = 'trigger'")]
        connection.execute("DROP TRIGGER never_updated")
        connection.execute("DROP TRIGGER never_deleted")
        yield connection
        for sql in triggers:
            connection.execute(sql)


def change(path: Path, row: int, field: str, value: Any) -> None:
    with raw(path) as connection:
        connection.execute(f"UPDATE chain SET {field} = ? WHERE id = ?", (value, row))


def bodies(ledger: Ledger, row: int) -> Iterator[str]:
    """The row's body with each of its values changed in turn, with one key more, and with other white space."""
    body = dict(ledger.rows()[row - 1].body)
    for key, value in body.items():
        other = {str: "x", int: 9, float: 9.0, dict: {"x": 1}, type(None): 9.0}[type(value)]
        yield ledger_file.canonical({**body, key: other})
    yield ledger_file.canonical({**body, "more": 1})
    yield json.dumps(body, indent=1)


@pytest.mark.parametrize("row", range(1, ROWS + 1))
def test_a_change_of_any_field_of_any_row_is_seen(ledger: Ledger, row: int, tmp_path: Path) -> None:
    stored = ledger.rows()[row - 1]
    changes: list[tuple[str, Any]] = [("id", 100 + row), ("id", -row), ("kind", "other"), ("kind", "charge" * 2)]
    changes += [("kind", kind) for kind in ("open", "reserve", "charge") if kind != stored.kind]
    changes += [("run", stored.run + "x"), ("digest", "0" * 64), ("digest", stored.digest.upper())]
    changes += [("body", body) for body in bodies(ledger, row)]
    changes += [(field, value) for field in FIELDS[1:] for value in (b"\xff", 7, "", "{", "[]", "null")]
    for number, (field, value) in enumerate(changes):
        if value == getattr(stored, field):
            continue
        copy = Path(shutil.copy(ledger.path, tmp_path / f"{number}.db"))
        change(copy, row, field, value)
        with pytest.raises(LedgerError, match=r"\d+\.db has been tampered with: row -?\d+ ") as error:
            Ledger.open(copy)
        if field != "id":
            assert f"row {row} " in str(error.value)


def test_without_the_chain_the_same_edit_would_pass(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    body = dict(ledger.rows()[1].body)
    change(ledger.path, 2, "body", ledger_file.canonical({**body, "cost": {"epsilon": 0.1, "delta": 0.0, "rdp": None}}))
    with pytest.raises(LedgerError, match="row 2 "):
        Ledger.open(ledger.path)

    def gullible(path: Path, previous: Row | None, stored: tuple[Any, ...]) -> Row:
        place, kind, run, text, digest = stored
        return Row(place, kind, run, json.loads(text), digest)

    monkeypatch.setattr(ledger_file, "_verified", gullible)
    assert Ledger.open(ledger.path).spent().epsilon == 2.1


@pytest.mark.parametrize("row", range(1, ROWS))
def test_a_row_taken_out_is_seen(ledger: Ledger, row: int) -> None:
    with raw(ledger.path) as connection:
        connection.execute("DELETE FROM chain WHERE id = ?", (row,))
    with pytest.raises(LedgerError, match=f"row {row + 1} stands where row {row} should"):
        Ledger.open(ledger.path)


def test_a_row_taken_out_and_the_others_moved_up_is_seen(ledger: Ledger) -> None:
    with raw(ledger.path) as connection:
        connection.execute("DELETE FROM chain WHERE id = 3")
        for row in range(4, ROWS + 1):
            connection.execute("UPDATE chain SET id = id - 1 WHERE id = ?", (row,))
    with pytest.raises(LedgerError, match="row 3 does not follow"):
        Ledger.open(ledger.path)


def test_rows_that_changed_places_are_seen(ledger: Ledger) -> None:
    with raw(ledger.path) as connection:
        for old, new in ((3, 99), (6, 3), (99, 6)):
            connection.execute("UPDATE chain SET id = ? WHERE id = ?", (new, old))
    with pytest.raises(LedgerError, match="row 3 does not follow"):
        Ledger.open(ledger.path)


@pytest.mark.parametrize("place", [-1, 0, ROWS + 1, ROWS + 2])
def test_a_row_put_in_is_seen(ledger: Ledger, place: int) -> None:
    with raw(ledger.path) as connection:
        connection.execute("INSERT INTO chain SELECT ?, kind, run, body, digest FROM chain WHERE id = 3", (place,))
    with pytest.raises(LedgerError, match=f"row {place} "):
        Ledger.open(ledger.path)


@pytest.mark.parametrize("left", range(ROWS))
def test_a_cut_end_is_seen_by_its_head_and_by_who_had_read_it(ledger: Ledger, left: int) -> None:
    head = ledger.head
    with raw(ledger.path) as connection:
        connection.execute("DELETE FROM chain WHERE id > ?", (left,))
    with pytest.raises(
        LedgerError, match=f"cut, or is an older copy: it ends at row {left}" if left else "without a first row"
    ):
        Ledger.open(ledger.path, head=head)
    with pytest.raises(LedgerError, match=f"cut: row {ROWS}, read before, is gone"):
        ledger.charge("a", "", 1, {})
    if left:
        assert len(Ledger.open(ledger.path).rows()) == left  # without a head it goes unnoticed


def rechained(ledger: Ledger, row: int, **changes: Any) -> None:
    """Change a row and seal it and all later rows again, as an attacker who knows the format does."""
    last: Row | None = None
    rows = ledger.rows()
    with raw(ledger.path) as connection:
        for old in rows:
            kind, body = changes.get("kind", old.kind), {**old.body, **changes.get("body", {})}
            last = ledger_file.sealed(
                last, *((kind, old.run, body) if old.id == row else (old.kind, old.run, old.body))
            )
            connection.execute(
                "UPDATE chain SET kind = ?, body = ?, digest = ? WHERE id = ?",
                (last.kind, ledger_file.canonical(last.body), last.digest, last.id),
            )


def test_a_chain_written_anew_is_seen_by_the_head_of_any_later_row(ledger: Ledger) -> None:
    rows, uuid = ledger.rows(), ledger.head.ledger
    rechained(ledger, 3, body={"releases": 9})
    assert Ledger.open(ledger.path).charged("a") == {"": 10}  # without a head it is a valid ledger
    for row in rows:
        head = Head(uuid, row.id, row.digest)
        if row.id < 3:
            Ledger.open(ledger.path, head=head)
            continue
        with pytest.raises(LedgerError, match=f"rewritten: row {row.id} is not the row that was written"):
            Ledger.open(ledger.path, head=head)
    with pytest.raises(LedgerError, match=f"row {ROWS} has changed"):
        ledger.charge("a", "", 1, {})


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (1, {"body": {"format": 3}}),
        (1, {"body": {"epsilon": -1.0}}),
        (1, {"body": {"composition": "rdp"}}),
        (1, {"kind": "charge"}),
        (2, {"kind": "refund"}),
        (2, {"body": {"cost": {"epsilon": -3.0, "delta": 0.0, "rdp": None}}}),
        (2, {"body": {"data": 7}}),
        (3, {"body": {"releases": -1}}),
        (3, {"body": {"who": None}}),
        (4, {"kind": "open"}),
        (6, {"kind": "close"}),  # of a run that has charged
        (7, {"kind": "close"}),  # of a run that has reserved nothing
    ],
)
def test_what_no_ledger_writes_is_refused_though_the_chain_holds(ledger: Ledger, row: int, changes: Any) -> None:
    rechained(ledger, row, **changes)
    with pytest.raises(LedgerError, match=f"row {row} has content that no ledger writes"):
        Ledger.open(ledger.path)


def test_another_ledger_in_its_place_is_foreign(ledger: Ledger, tmp_path: Path) -> None:
    other = filled(tmp_path / "other.db")
    with pytest.raises(LedgerError, match=r"ledger\.db is a different ledger"):
        Ledger.open(ledger.path, head=other.head)
    other.path.replace(ledger.path)
    with pytest.raises(LedgerError, match="different ledger"):
        Ledger.open(ledger.path, head=ledger.head)
    with pytest.raises(LedgerError, match=f"row {ROWS} has changed"):
        ledger.spent()


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TRIGGER never_deleted",
        "CREATE TRIGGER quiet BEFORE INSERT ON chain BEGIN SELECT RAISE(IGNORE); END",
        "CREATE TABLE other (x)",
        "ALTER TABLE chain ADD COLUMN more TEXT",
    ],
)
def test_a_changed_schema_is_refused(ledger: Ledger, statement: str) -> None:
    with closing(sqlite3.connect(ledger.path)) as connection:
        connection.execute(statement)
        connection.commit()
    for use in (lambda: Ledger.open(ledger.path), lambda: ledger.charge("a", "", 1, {})):
        with pytest.raises(LedgerError, match="table or triggers were changed"):
            use()


@pytest.mark.parametrize("statement", ["DELETE FROM chain WHERE id = 6", "UPDATE chain SET run = 'b' WHERE id = 6"])
def test_the_triggers_keep_honest_hands_off(ledger: Ledger, statement: str) -> None:
    with closing(sqlite3.connect(ledger.path)) as connection, pytest.raises(sqlite3.IntegrityError, match="never"):
        connection.execute(statement)


def test_a_file_cut_short_anywhere_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    content = ledger.path.read_bytes()
    copy = tmp_path / "copy.db"
    for size in (*range(0, len(content), 1024), 1, 16, 99, 100, len(content) - 1):
        copy.write_bytes(content[:size])
        with pytest.raises(LedgerError, match=r"copy\.db"):
            Ledger.open(copy, head=ledger.head)


damages = st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=3)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages)
@example([(3820, 128)])  # in a name that SQLite's error message quotes
def test_a_damaged_byte_is_refused_or_changes_nothing(ledger: Ledger, damage: list[tuple[int, int]]) -> None:
    content = bytearray(ledger.path.read_bytes())
    for place, flip in damage:
        content[place % len(content)] ^= flip
    copy = ledger.path.with_name("copy.db")
    copy.write_bytes(content)
    try:
        rows = Ledger.open(copy, head=ledger.head).rows()
    except LedgerError:
        return
    assert rows == ledger.rows()
