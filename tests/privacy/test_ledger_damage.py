"""A ledger with damaged bytes, wherever they are, is refused or reads the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from privacy.errors import LedgerError
from privacy.ledger import Ledger
from tests.privacy.test_ledger_tampering import filled


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return filled(tmp_path / "ledger.db")


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
