"""benchmarks/language_model_gpu.py: at night every row of it on a tiny model, on this processor."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "language_model_gpu.py"

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names of the script."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        return runpy.run_path(str(SCRIPT))
    finally:
        sys.path.remove(str(SCRIPT.parent))


def test_every_row_trains_a_tiny_model(script: dict[str, Any]) -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny"]
    own = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for row in script["ROWS"]:
        (line,) = (line for line in lines if line.startswith(f"{row!s:44}"))
        first, step, over_plain, tokens, _ = map(float, line[44:].split()[:5])
        assert min(first, step, over_plain, tokens) > 0
    (ratio,) = (line for line in lines if "private over plain" in line and "time of a step" in line)
    assert float(ratio.split("  ")[-2]) > 0
