"""The runs of `private_silos.py`, and the configuration of each."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

SILOS, EACH, ROUNDS, DELTA = (5, 10, 20), 1000, 4, 1e-5
EPSILONS, HEADS = (math.inf, 8.0, 3.0, 1.0), ("trained", "described", "frozen")
LORA = {"rank": 8, "target_modules": ["query", "value"]}
METHODS: dict[str, dict[str, Any]] = {
    "head alone": {"name": "fedft"},
    "bitfit": {"name": "bitfit"},
    **{
        name: {"name": name} | LORA
        for name in ("fedlora", "ffa_lora", "rolora", "fra_lora", "fra_then_ffa", "fedsvd", "fedask", "fedpower")
    },
    "federa, A frozen": {"name": "federa", "rule": "ffa_lora"} | LORA,
}
SEARCHED = 8.0  # the epsilon of the search


class Cell(NamedTuple):
    """One run. seed: of silos, adapters and head; -1 in the search, which uses other texts."""

    data: str
    head: str
    method: str
    epsilon: float
    rate: float
    seed: int
    silos: int = 10


def rates(silos: int) -> tuple[float, ...]:
    """The learning rates tried. With ten silos the higher one was mostly the better, so later searches start there."""
    return (0.005, 0.02) if silos == 10 else (0.02, 0.05, 0.1)


def settings(cell: Cell) -> dict[str, Any]:
    method = dict(METHODS[cell.method])
    if cell.head != "frozen" and cell.method != "head alone":
        method["modules_to_save"] = ["classifier"]
    tables: dict[str, Any] = {
        "federation": {"cohort": cell.silos, "rounds": ROUNDS, "seed": max(0, cell.seed)},
        "method": method,
        "training": {"lr": cell.rate, "batch_size": 256},
        "evaluation": {"every": ROUNDS, "audit_fraction": 0.0},
    }
    if math.isfinite(cell.epsilon):
        tables["privacy"] = {"unit": "example", "epsilon": cell.epsilon, "delta": DELTA, "clip_norm": 1.0}
        tables["evaluation"]["dummies"] = 0
    return tables
