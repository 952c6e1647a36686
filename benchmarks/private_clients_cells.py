"""The runs of `private_clients.py`, and the configuration of each."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from private_silos_cells import LORA

TEXTS, ROUNDS, DELTA, SEARCHED = 66_000, 20, 1e-5, 8.0
NONE = 0.001  # the noise multiplier at epsilon inf, the smallest allowed
SIZES = {"small": (2_000, 3), "middle": (20_000, 3), "large": (60_000, 1)}  # clients, and texts of each client
EPSILONS, HEADS = (math.inf, 8.0, 3.0, 1.0), ("trained", "warm", "frozen")
_USUAL = (0.1, 0.3, 1.0)
CLIPS = {
    "trained": _USUAL,
    "warm": _USUAL,
    "frozen": (0.01, 0.03, *_USUAL, 3.0),
}  # without the head's part, steps differ more
FRA = {"name": "fra_lora"} | LORA
METHODS: dict[str, dict[str, Any]] = {
    "head alone": {"name": "fedft"},
    "bitfit": {"name": "bitfit"},
    **{name: {"name": name} | LORA for name in ("fedlora", "ffa_lora", "rolora")},
    **{f"fra_then_ffa, {how}": {"name": "fra_then_ffa", "denoise": how} | LORA for how in ("tangent", "shrink")},
    **{f"fra_lora, {how}": FRA | {"denoise": how} for how in ("tangent", "none", "shrink")},
    "fra_lora, sketch": FRA | {"transport_form": "sketch", "denoise": "shrink"},
    **{name: {"name": name} | LORA for name in ("fedsvd", "fedask", "fedpower")},
    "federa, A frozen": {"name": "federa", "rule": "ffa_lora"} | LORA,
}
MEANS = ("rolora", "fra_lora, sketch", "fedsvd", "fedask", "fedpower")  # their rounds use changing bases
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "schedule": {},
    "correlated": {"privacy": {"correlation": "banded"}},
    "random": {"federation": {"sampling": "poisson"}},
    "left open": {"privacy": {"correlation": "banded"}},
}
OPEN = "left open"  # the way in which the run itself chooses steps and clip norm
STEEP = 1.0  # the rate of the local step, at which nearly every contribution is longer than the clip norm
LOCAL = ((1, STEEP), (1, 0.1), (1, 0.03), (3, STEEP), (3, 0.1), (3, 0.03))  # local steps and their rate, where searched


class Cell(NamedTuple):
    """One run. seed: of clients, their order, adapters and head; -1 in the search, which uses other texts."""

    size: str
    head: str
    way: str
    method: str
    epsilon: float
    clip: float
    seed: int
    steps: int = 1  # local steps, each on all texts of the client
    rate: float = STEEP  # of the local steps


def settings(cell: Cell) -> dict[str, Any]:
    clients, each = SIZES[cell.size]
    method = dict(METHODS[cell.method])
    if (cell.way, cell.method) == (OPEN, "head alone"):
        method = {
            "name": "head",
            "modules_to_save": ["classifier"],
        }  # the rate for a head, not for all weights
    if cell.head != "frozen" and cell.method != "head alone":
        method["modules_to_save"] = ["classifier"]
    tables: dict[str, dict[str, Any]] = {
        "federation": {
            "cohort": clients // ROUNDS,
            "rounds": ROUNDS,
            "seed": max(0, cell.seed),
            "sampling": "schedule",
            "server_optimizer": "mean" if cell.method in MEANS else "momentum",
        },
        "method": method,
        "training": {"lr": cell.rate, "steps": cell.steps, "batch_size": each, "optimizer": "sgd"},
        "evaluation": {"every": ROUNDS, "dummies": 0},
        "privacy": {"unit": "client", "delta": DELTA, "clip_norm": cell.clip, "correlation": "none"},
    }
    if tables["federation"]["server_optimizer"] == "momentum":
        tables["federation"]["server_momentum"] = 0.7
    if math.isfinite(cell.epsilon):
        tables["privacy"]["epsilon"] = cell.epsilon
    else:
        tables["privacy"]["noise_multiplier"] = NONE
    for table, own in WAYS[cell.way].items():
        tables[table] |= own
    if cell.way == OPEN:
        for name in ("server_optimizer", "server_momentum"):
            tables["federation"].pop(name, None)
        del tables["training"], tables["privacy"]["clip_norm"]
    return tables
