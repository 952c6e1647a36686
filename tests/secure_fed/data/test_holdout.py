"""Rows held out for testing: with privacy, by whole units; each person or example is held out independently of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from secure_fed.config import DataConfig
from secure_fed.errors import DataError
from secure_fed.learning import tasks
from secure_fed.learning.data import sources

ROWS = [
    {"text": f"text {row % 50}", "label": "xy"[row % 2], "site": f"site {row % 6}", "who": f"person {row % 23}"}
    for row in range(120)
]
UNITS = {"client": "site", "group": "who", "example": "text"}


def split(tmp_path: Path, unit: str, rows: list[dict[str, Any]], fraction: float = 0.3) -> tuple[list[str], list[str]]:
    """The names of the privacy units in the training rows and in the test rows."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = DataConfig(train=str(tmp_path / "rows.jsonl"), client="site", test_fraction=fraction)
    source = sources.load(data, tasks.build(data), seed=0, group="who", unit=unit)
    assert source.tested == {"client": "held out by client", "group": "held out by person"}.get(
        unit, f"held out by {unit}" if unit != "none" else "held out by row"
    )
    column = {"client": "client", "group": "group"}.get(unit, "text")
    train, test = (sorted(set(getattr(part, column))) for part in (source.train, source.test))
    return train, test


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_on_one_side_with_all_its_rows(tmp_path: Path, unit: str) -> None:
    train, test = split(tmp_path, unit, ROWS)
    assert train
    assert test
    assert not set(train) & set(test)
    assert sorted(train + test) == sorted({row[UNITS[unit]] for row in ROWS})


@pytest.mark.parametrize("unit", ["group", "example"])
def test_one_unit_less_moves_no_other(tmp_path: Path, unit: str) -> None:
    """Otherwise removing one unit would change which others train, and the accounting for one unit would be wrong."""
    train, test = split(tmp_path, unit, ROWS)
    for gone in [*train[:3], *test[:3]]:
        fewer = [row for row in ROWS if row[UNITS[unit]] != gone]
        assert split(tmp_path, unit, fewer) == ([u for u in train if u != gone], [u for u in test if u != gone])


def test_a_single_client_cannot_be_held_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there are 1 clients.*data\.test"):
        split(tmp_path, "client", [{**row, "site": "only"} for row in ROWS])


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_a_share_that_leaves_one_side_empty_is_refused(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(DataError, match=r"hold out no test rows, or all rows of a client.*data\.test"):
        split(tmp_path, "example", ROWS, fraction)
