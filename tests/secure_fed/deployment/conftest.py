"""One process runs all parties here, so the base model is loaded once and copied. No run is probed, and no report is drawn."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from secure_fed.deployment import coordinator, problem
from secure_fed.learning.models.loading import load
from secure_fed.runs import run


@pytest.fixture(autouse=True)
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(config: Any, task: Any, labels: Any, seed: int) -> Any:
        return copy.deepcopy(_loaded(config, task, tuple(labels), seed))

    monkeypatch.setattr(problem, "load", loaded)
    for module in (
        coordinator,
        run,
    ):  # with four members all noise is hopeless, and to find how many would do takes seconds
        monkeypatch.setattr(module, "probe", lambda assembly: None)
    monkeypatch.setattr(coordinator, "write_report", lambda run_dir: Path(run_dir) / "report.html")


@cache
def _loaded(config: Any, task: Any, labels: tuple[str, ...], seed: int) -> Any:
    return load(config, task, labels, seed)
