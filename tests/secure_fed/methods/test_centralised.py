"""Every method reaches, in a federation, the accuracy of its own centralised training within a stated margin.

Centralised means one client with all examples and the same number of optimiser steps, whose batch is as large as the batches
of all clients together. The built-in model learns the task in seconds: two classes of lists of findings.
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

# Percentage points of accuracy by which the federation may end below centralised training (200 test examples, two classes).
# One example in eight is hard, and a run may or may not have learned it by the end.
# Two methods do not learn the task in so few steps, even centralised: they are in the benchmark.
MARGIN = {name: 15.0 for name in METHODS if name not in ("prefix_tuning", "p_tuning")}


def rows(count: int, seed: int) -> str:
    """JSON Lines of lists of four words: three findings of the class and one that both classes share."""
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
    """The accuracy in per cent after the last round; all clients take part in every round."""
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
