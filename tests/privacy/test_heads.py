"""The newest head of a ledger, kept outside it: restoring an older copy is noticed, and nothing else raises an alarm."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from privacy import ledger_file
from privacy.errors import LedgerError
from privacy.filters import Cost
from privacy.ledger import Ledger
from privacy.ledger_file import Head, Heads
from tests.privacy.ledger_child import UNIT


@pytest.fixture
def heads(tmp_path: Path) -> Heads:
    return Heads(tmp_path / "state" / "secure-fed" / "ledgers.sqlite")


@pytest.fixture
def ledger(tmp_path: Path, heads: Heads) -> Ledger:
    made = Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=8.0, delta=0.0, heads=heads)
    made.reserve("a", Cost(3.0, 0.0), data_digest="d", unit=UNIT, terms={})
    return made


def charge(ledger: Ledger) -> None:
    ledger.charge("a", "", 1, {})


def test_an_older_copy_put_back_is_noticed_by_who_never_saw_the_ledger(ledger: Ledger, heads: Heads) -> None:
    older = ledger.path.read_bytes()
    charge(ledger)
    ledger.path.write_bytes(older)
    with pytest.raises(
        LedgerError,
        match=r"cut, or is an older copy: it ends at row 2, and row 3 was written, as .*ledgers\.sqlite notes",
    ):
        Ledger.open(ledger.path, heads=heads)
    assert Ledger.open(ledger.path).charged("a") == {}  # without the file of heads it goes unnoticed


def test_a_moved_ledger_is_the_same_and_a_copy_that_went_on_is_not(
    ledger: Ledger, heads: Heads, tmp_path: Path
) -> None:
    copy = Path(shutil.copy(ledger.path, tmp_path / "copy.db"))
    moved = ledger.path.rename(tmp_path / "moved.db")
    charge(Ledger.open(moved, heads=heads))
    before = copy.read_bytes()
    with pytest.raises(LedgerError, match=r"copy\.db has been cut"):
        Ledger.open(copy, heads=heads)
    charge(Ledger.open(copy))
    with pytest.raises(LedgerError, match=r"copy\.db has been rewritten: row 3"):
        Ledger.open(copy, heads=heads)
    copy.write_bytes(before)
    assert Ledger.open(moved, heads=heads).charged("a") == {"": 1}


def test_copies_open_at_once_part_at_the_first_charge(ledger: Ledger, heads: Heads, tmp_path: Path) -> None:
    copy = Ledger.open(shutil.copy(ledger.path, tmp_path / "copy.db"), heads=heads)
    charge(ledger)
    before = copy.path.read_bytes()
    with pytest.raises(LedgerError, match=r"copy\.db has been cut"):
        charge(copy)
    assert copy.path.read_bytes() == before


@dataclass(frozen=True)
class Meanwhile(Heads):
    """Calls one function of `happens`, if any is left, just before the file of heads is read; with `late`, just after."""

    happens: list[Callable[[], None]] = field(default_factory=list)
    late: bool = False

    def newest(self, ledger: str) -> Head | None:
        found = super().newest(ledger) if self.late else None
        if self.happens:
            self.happens.pop()()
        return found if self.late else super().newest(ledger)


def test_copies_charged_at_the_same_instant_do_not_both_go_on(ledger: Ledger, heads: Heads, tmp_path: Path) -> None:
    """The ledger's head is noted between the copy's check and its commit, so the copy's charge fails: it releases nothing."""
    happens: list[Callable[[], None]] = []
    copy = Ledger.open(shutil.copy(ledger.path, tmp_path / "copy.db"), heads=Meanwhile(heads.path, happens, late=True))
    happens.append(lambda: charge(ledger))
    with pytest.raises(LedgerError, match=r"copy\.db has been rewritten: row 3"):
        charge(copy)
    assert heads.newest(ledger.head.ledger) == ledger.head
    charge(ledger)


@pytest.mark.parametrize("late", [False, True])
def test_what_others_write_meanwhile_is_no_alarm(ledger: Ledger, heads: Heads, late: bool) -> None:
    """The file of heads is read before the ledger, so the ledger has every noted row. An older head replaces no newer one."""
    happens: list[Callable[[], None]] = []
    other = Ledger.open(ledger.path, heads=Meanwhile(heads.path, happens, late))
    for use in (other.spent, lambda: charge(other)):
        happens.append(lambda: charge(ledger))
        use()
    assert other.charged("a") == ledger.charged("a") == {"": 3}
    assert heads.newest(ledger.head.ledger) == other.head


def test_a_kill_between_the_ledger_and_the_note_is_no_alarm(
    ledger: Ledger, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def die(name: str) -> None:
        if name == "committed":
            raise KilledError

    noted = ledger.head
    with monkeypatch.context() as patch:
        patch.setattr(ledger_file, "crash_point", die)
        with pytest.raises(KilledError):
            charge(ledger)
    assert heads.newest(noted.ledger) == noted
    again = Ledger.open(ledger.path, heads=heads)
    assert again.charged("a") == {"": 1}, "it stays charged"
    charge(again)
    assert heads.newest(noted.ledger) == again.head


def test_the_file_is_its_owners_and_names_nothing_else_of_a_ledger(ledger: Ledger, heads: Heads) -> None:
    assert stat.S_IMODE(heads.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(heads.path.parent.stat().st_mode) == 0o700
    content = heads.path.read_bytes()
    assert ledger.head.digest.encode() in content
    assert ledger.rows()[0].body["key"].encode() not in content


@pytest.mark.parametrize("make", ["a file for a folder", "no database", "another database"])
def test_what_cannot_keep_heads_is_refused_before_anything_is_charged(
    ledger: Ledger, tmp_path: Path, make: str
) -> None:
    path = tmp_path / "heads.sqlite"
    if make == "a file for a folder":
        path.write_text("x")
        path = path / "heads.sqlite"
    else:
        path.write_bytes(b"no database\n" * 500 if make == "no database" else ledger.path.read_bytes())
    before = ledger.path.read_bytes()
    with pytest.raises(LedgerError, match=r"heads\.sqlite") as refused:
        charge(Ledger.open(ledger.path, heads=Heads(path)))
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert ledger.path.read_bytes() == before
