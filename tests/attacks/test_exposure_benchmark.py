"""The table of benchmarks/exposure.py, and at night a short run of it."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from secure_fed.learning.data import notes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(target: float | None, seed: int, bits: float) -> dict[str, Any]:
    """Two clients of two canaries: one copy of each at the first, four at the second."""
    rounds = [{"round": 0, "perplexity": None, "exposures": [1.0] * 4}]
    rounds.append({"round": 3, "perplexity": 50.0, "exposures": [bits, bits, bits + 1, bits + 3]})
    return {"target": target, "seed": seed, "rounds": rounds}


def test_the_table_has_a_row_for_each_level_of_privacy() -> None:
    report = runpy.run_path(str(BENCHMARKS / "exposure_report.py"))
    runs = [run(8.0, 0, 1.0), run(None, 0, 3.0), run(1.0, 0, 0.5), run(None, 1, 4.0)]
    lines = report["table"](runs, (1, 4), 2).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["without privacy", "epsilon 8", "epsilon 1"]
    cells = [cell.strip() for cell in lines[2].split("|")[2:-1]]
    assert cells[:4] == ["2", "3.50 ± 0.71", "5.50 ± 0.71", "4.50 ± 0.71"]
    assert float(cells[4]) < 1e-3 < float(lines[4].split("|")[6])
    assert len(report["drawn"](runs, (1, 4), 2).axes) == 2


@pytest.mark.nightly
def test_a_short_run_is_whole_and_is_not_made_again(tmp_path: Path) -> None:
    texts = notes.generate(3000, seed=0, split="train").text
    rows = [{"text": " ".join(texts[at : at + 3]), "book": at % 4} for at in range(0, 3000, 3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "runs.jsonl"
    command = [sys.executable, str(BENCHMARKS / "exposure.py"), str(tmp_path), *("--quick", "--seeds", "1", "--out")]
    for _ in range(2):
        done = subprocess.run([*command, str(out)], capture_output=True, text=True, timeout=900, env={**os.environ})
        assert done.returncode == 0, done.stderr
        assert "| epsilon 1 | 1 |" in done.stdout
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert [run["target"] for run in runs] == [None, 8.0, 1.0]
    assert [run["epsilon"] is None for run in runs] == [True, False, False]
    assert all(0.9 * run["target"] < run["epsilon"] <= run["target"] for run in runs[1:])
    assert all([len(one["exposures"]) for one in run["rounds"]] == [16, 16] for run in runs)
