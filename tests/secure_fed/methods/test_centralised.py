"""Every method, federated, comes as far as it does in one place: within a stated margin of its own centralised training.

Centralised is one client that holds everything, with the same number of optimiser steps, each on as many examples as all
clients together take. The task is one that the built-in model learns in seconds: which findings a list is made of.
`benchmarks/federated_against_centralised.py` does the same on the built-in notes, where it takes minutes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from secure_fed import Federation, RunConfig
from secure_fed.methods import METHODS

CLIENTS, ROUNDS, STEPS, BATCH, RATE = 3, 8, 5, 12, 1.5e-3
WORDS = {"one": ("fever", "cough", "pain"), "other": ("rash", "swelling", "nausea")}

# Points of accuracy by which the federation may end below, of two hundred test examples in two classes. One example in eight
# is hard; a run may have learned these by the end, or not yet.
# Two methods do not learn this in so few steps, even in one place: the benchmark has them.
MARGIN = {name: 15.0 for name in METHODS if name not in ("prefix_tuning", "p_tuning")}


def rows(count: int, seed: int) -> str:
    """Lists of four findings, three of them of the class's own."""
    draw, lines = random.Random(seed), []
    for _ in range(count):
        label = draw.choice(("one", "other"))
        words = [*draw.choices(WORDS[label], k=3), draw.choice(("headache", "vomiting"))]
        draw.shuffle(words)
        lines.append(json.dumps({"text": " , ".join(words) + " .", "label": label}) + "\n")
    return "".join(lines)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("findings")
    (folder / "train.jsonl").write_text(rows(360, 0), encoding="utf-8")
    (folder / "test.jsonl").write_text(rows(200, 1), encoding="utf-8")
    return folder


def accuracy(name: str, data: Path, clients: int) -> float:
    """In points, after the last round, with everybody in each."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"max_length": 24},
        "data": {"train": str(data / "train.jsonl"), "test": str(data / "test.jsonl"), "partition": "iid"},
        "federation": {"clients": clients, "cohort": clients, "rounds": ROUNDS},
        "method": {"name": name},
        "training": {"steps": STEPS, "batch_size": BATCH * CLIENTS // clients, "lr": RATE},
        "evaluation": {"every": ROUNDS, "audit_fraction": 0.0},
    }
    return 100 * float(Federation(RunConfig.from_dict(settings)).run().summary["accuracy"])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if name == "fedlora" else pytest.mark.weekly) for name in MARGIN],
)
def test_federated_within_a_margin_of_centralised(name: str, data: Path) -> None:
    together, apart = accuracy(name, data, 1), accuracy(name, data, CLIENTS)
    assert together >= 80, "the task is not learned even in one place, so nothing would be compared"
    assert apart >= together - MARGIN[name]
