"""How much accuracy does federation cost a method?   python benchmarks/federated_against_centralised.py [METHOD ...] [--json]

Every method trains on the same `builtin/notes` twice: with clients that divide the notes at random (IID) and all take part in
every round, and with one client that has all notes. Both take the same number of optimiser steps, and the single client takes
as many examples in a step as the others together. The difference is the cost of averaging; with one run of each, a few points
of it are chance. Exit status 1 if a method ends more than MARGIN below its own training in one place. --examples, --clients,
--rounds and --steps change the size.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from secure_fed import Federation, RunConfig
from secure_fed.methods import METHODS, card

BATCH, MARGIN = 16, 0.2
# For methods far from the usual rate: all weights need less, virtual tokens more.
RATES = {"fedft": 5e-4, "prompt_tuning": 2e-2, "prefix_tuning": 1e-2, "p_tuning": 1e-2}


def accuracy(name: str, chosen: argparse.Namespace, clients: int) -> float:
    """The accuracy on the test notes, after the last round."""
    settings: dict[str, dict[str, Any]] = {
        "data": {"examples": chosen.examples, "test_examples": 500, "partition": "iid"},
        "federation": {"clients": clients, "cohort": clients, "rounds": chosen.rounds, "seed": chosen.seed},
        "method": {"name": name},
        "training": {"steps": chosen.steps, "batch_size": BATCH * chosen.clients // clients},
        "evaluation": {"every": chosen.rounds, "audit_fraction": 0.0},
    }
    settings["training"]["lr"] = RATES.get(name, chosen.lr)
    if name == "fedara":
        settings["method"] |= {"warmup_rounds": chosen.rounds // 5, "final_rounds": chosen.rounds // 3}
    return float(Federation(RunConfig.from_dict(settings)).run().summary["accuracy"])


def compared(name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """A row of the table."""
    started = time.perf_counter()
    apart, together = accuracy(name, chosen, chosen.clients), accuracy(name, chosen, 1)
    return {
        "method": name,
        "mean_exact": card(name).mean_exact,
        "federated": apart,
        "centralised": together,
        "seconds": time.perf_counter() - started,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="default: all")
    parser.add_argument("--examples", type=int, default=1500)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    chosen, rows = arguments(), []
    for name in chosen.methods or METHODS:
        row = compared(name, chosen)
        rows.append(row)
        exact = "exact" if row["mean_exact"] else "not exact"
        line = f"{name:<18}{exact:<11}{row['centralised']:>7.1%} in one place{row['federated']:>8.1%} federated"
        print(f"{line}{row['seconds']:>8.0f} s", file=sys.stderr if chosen.json else sys.stdout, flush=True)
    if chosen.json:
        print(json.dumps({"settings": vars(chosen), "rows": rows}))
    if below := [row["method"] for row in rows if row["federated"] < row["centralised"] - MARGIN]:
        sys.exit(f"more than {100 * MARGIN:.0f} points below: {', '.join(below)}")


if __name__ == "__main__":
    main()
