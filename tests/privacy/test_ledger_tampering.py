"""Every change of a ledger's file is noticed: by the chain of digests, or else by a head kept elsewhere.

A ledger with damaged bytes, wherever they are, is refused or reads the same. The newest head, kept outside the ledger, shows
that an older copy was put back, and nothing else raises an alarm.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from dataclasses import field as made
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from privacy import ledger_file
from privacy.errors import LedgerError
from privacy.filters import Cost
from privacy.ledger import Ledger
from privacy.ledger_file import Head, Heads, Row
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
        connection.execute("PRAGMA synchronous=OFF")
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


@pytest.mark.parametrize("row", [1, 2, 3, ROWS])
def test_a_change_of_any_field_of_a_row_of_any_kind_is_seen(ledger: Ledger, row: int, tmp_path: Path) -> None:
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
        with pytest.raises(LedgerError, match=r"row -?\d+ " if field == "id" else f"row {row} "):
            Ledger.open(copy)


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


MOVED: list[tuple[str, int]] = [  # statements, and the first row at which the chain breaks
    *((f"DELETE FROM chain WHERE id = {row}", row + 1) for row in range(1, ROWS)),
    (
        "DELETE FROM chain WHERE id = 3"
        + "".join(f"; UPDATE chain SET id = id - 1 WHERE id = {row}" for row in range(4, 9)),
        3,
    ),
    ("; ".join(f"UPDATE chain SET id = {new} WHERE id = {old}" for old, new in ((3, 99), (6, 3), (99, 6))), 3),
    *(
        (f"INSERT INTO chain SELECT {place}, kind, run, body, digest FROM chain WHERE id = 3", place)
        for place in (-1, 0, ROWS + 1, ROWS + 2)
    ),
]


@pytest.mark.parametrize(("statements", "row"), MOVED)
def test_a_row_taken_out_put_in_or_moved_is_seen(ledger: Ledger, statements: str, row: int) -> None:
    with raw(ledger.path) as connection:
        for statement in statements.split("; "):
            connection.execute(statement)
    with pytest.raises(LedgerError, match=f"row {row} "):
        Ledger.open(ledger.path)


@pytest.mark.parametrize("left", range(ROWS))
def test_a_cut_end_is_seen_by_its_head_and_by_who_had_read_it(ledger: Ledger, left: int) -> None:
    head = ledger.head
    with raw(ledger.path) as connection:
        connection.execute("DELETE FROM chain WHERE id > ?", (left,))
    with pytest.raises(LedgerError, match=f"ends at row {left}" if left else "without a first row"):
        Ledger.open(ledger.path, head=head)
    with pytest.raises(LedgerError, match=f"cut: row {ROWS}, read before"):
        ledger.charge("a", "", 1, {})
    if left:
        with closing(sqlite3.connect(ledger.path)) as connection, pytest.raises(sqlite3.IntegrityError, match="never"):
            connection.execute("DELETE FROM chain WHERE id = 1")  # the triggers keep honest hands off
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
        with pytest.raises(LedgerError, match=f"rewritten: row {row.id} "):
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
    with pytest.raises(LedgerError, match=f"row {row} has content"):
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


SCHEMAS = ["DROP TRIGGER never_deleted", "CREATE TABLE other (x)", "ALTER TABLE chain ADD COLUMN more TEXT"]
SCHEMAS += ["CREATE TRIGGER quiet BEFORE INSERT ON chain BEGIN SELECT RAISE(IGNORE); END"]


@pytest.mark.parametrize("statement", SCHEMAS)
def test_a_changed_schema_is_refused(ledger: Ledger, statement: str) -> None:
    with closing(sqlite3.connect(ledger.path)) as connection:
        connection.execute(statement)
        connection.commit()
    for use in (lambda: Ledger.open(ledger.path), lambda: ledger.charge("a", "", 1, {})):
        with pytest.raises(LedgerError, match="triggers"):
            use()


def test_a_file_cut_short_anywhere_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    content = ledger.path.read_bytes()
    copy = tmp_path / "copy.db"
    for size in (*range(0, len(content), 1024), 1, 16, 99, 100, len(content) - 1):
        copy.write_bytes(content[:size])
        with pytest.raises(LedgerError, match=r"copy\.db"):
            Ledger.open(copy, head=ledger.head)


damages = st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=3)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.fixture
def heads(tmp_path: Path) -> Heads:
    return Heads(tmp_path / "state" / "secure-fed" / "ledgers.sqlite")


@pytest.fixture
def noted(tmp_path: Path, heads: Heads) -> Ledger:
    """A ledger whose newest head `heads` notes."""
    made = Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=8.0, delta=0.0, heads=heads)
    made.reserve("a", Cost(3.0, 0.0), data_digest="d", unit=UNIT, terms={})
    return made


def charge(ledger: Ledger) -> None:
    ledger.charge("a", "", 1, {})


def test_an_older_copy_put_back_is_noticed_by_who_never_saw_the_ledger(noted: Ledger, heads: Heads) -> None:
    older = noted.path.read_bytes()
    charge(noted)
    noted.path.write_bytes(older)
    with pytest.raises(LedgerError, match=r"ends at row 2, and row 3 was written, as .*ledgers\.sqlite notes"):
        Ledger.open(noted.path, heads=heads)
    assert Ledger.open(noted.path).charged("a") == {}  # without the file of heads it goes unnoticed


def test_a_moved_ledger_is_the_same_and_a_copy_that_went_on_is_not(noted: Ledger, heads: Heads, tmp_path: Path) -> None:
    copy = Path(shutil.copy(noted.path, tmp_path / "copy.db"))
    moved = noted.path.rename(tmp_path / "moved.db")
    charge(Ledger.open(moved, heads=heads))
    before = copy.read_bytes()
    with pytest.raises(LedgerError, match=r"copy\.db has been cut"):
        Ledger.open(copy, heads=heads)
    charge(Ledger.open(copy))
    with pytest.raises(LedgerError, match=r"copy\.db has been rewritten: row 3"):
        Ledger.open(copy, heads=heads)
    copy.write_bytes(before)
    assert Ledger.open(moved, heads=heads).charged("a") == {"": 1}


@dataclass(frozen=True)
class Meanwhile(Heads):
    """Calls one function of `happens`, if any is left, just before the file of heads is read; with `late`, just after."""

    happens: list[Callable[[], None]] = made(default_factory=list)
    late: bool = False

    def newest(self, ledger: str) -> Head | None:
        found = super().newest(ledger) if self.late else None
        if self.happens:
            self.happens.pop()()
        return found if self.late else super().newest(ledger)


def test_copies_charged_at_the_same_instant_do_not_both_go_on(noted: Ledger, heads: Heads, tmp_path: Path) -> None:
    """The ledger's head is noted between the copy's check and its commit, so the copy's charge fails: it releases nothing."""
    happens: list[Callable[[], None]] = []
    copy = Ledger.open(shutil.copy(noted.path, tmp_path / "copy.db"), heads=Meanwhile(heads.path, happens, late=True))
    happens.append(lambda: charge(noted))
    with pytest.raises(LedgerError, match=r"copy\.db has been rewritten: row 3"):
        charge(copy)
    assert heads.newest(noted.head.ledger) == noted.head
    charge(noted)


@pytest.mark.parametrize("late", [False, True])
def test_what_others_write_meanwhile_is_no_alarm(noted: Ledger, heads: Heads, late: bool) -> None:
    """The file of heads is read before the ledger, so the ledger has every noted row. An older head replaces no newer one."""
    happens: list[Callable[[], None]] = []
    other = Ledger.open(noted.path, heads=Meanwhile(heads.path, happens, late))
    for use in (other.spent, lambda: charge(other)):
        happens.append(lambda: charge(noted))
        use()
    assert other.charged("a") == noted.charged("a") == {"": 3}
    assert heads.newest(noted.head.ledger) == other.head


def test_a_kill_between_the_ledger_and_the_note_is_no_alarm(
    noted: Ledger, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def die(name: str) -> None:
        if name == "committed":
            raise KilledError

    before = noted.head
    with monkeypatch.context() as patch:
        patch.setattr(ledger_file, "crash_point", die)
        with pytest.raises(KilledError):
            charge(noted)
    assert heads.newest(before.ledger) == before
    again = Ledger.open(noted.path, heads=heads)
    assert again.charged("a") == {"": 1}, "it stays charged"
    charge(again)
    assert heads.newest(before.ledger) == again.head


def test_the_file_is_its_owners_and_names_nothing_else_of_a_ledger(noted: Ledger, heads: Heads) -> None:
    assert stat.S_IMODE(heads.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(heads.path.parent.stat().st_mode) == 0o700
    content = heads.path.read_bytes()
    assert noted.head.digest.encode() in content
    assert noted.rows()[0].body["key"].encode() not in content


@pytest.mark.parametrize("make", ["a file for a folder", "no database", "another database"])
def test_what_cannot_keep_heads_is_refused_before_anything_is_charged(noted: Ledger, tmp_path: Path, make: str) -> None:
    path = tmp_path / "heads.sqlite"
    if make == "a file for a folder":
        path.write_text("x")
        path = path / "heads.sqlite"
    else:
        path.write_bytes(b"no database\n" * 500 if make == "no database" else noted.path.read_bytes())
    before = noted.path.read_bytes()
    with pytest.raises(LedgerError, match=r"heads\.sqlite"):
        charge(Ledger.open(noted.path, heads=Heads(path)))
    assert noted.path.read_bytes() == before
