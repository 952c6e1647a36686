"""Every attack on ordinary examples of one small run without protection: the findings by adversary.

    python benchmarks/audit_attacks.py [--examples 1600] [--clients 8] [--rounds 12] [--references 8] [--out DIR]

The default method and training, on fewer notes; half of them are audited, so that a quarter is held out. Updates are recorded.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from attacks.adversary.case import Settings, opened
from attacks.audit import audited
from attacks.command import written
from secure_fed import Federation, RunConfig


def configured(examples: int, clients: int, rounds: int, seed: int) -> RunConfig:
    return RunConfig.from_dict(
        {
            "data": {"examples": examples, "test_examples": 1000},
            "federation": {"clients": clients, "cohort": clients, "rounds": rounds, "seed": seed},
            "evaluation": {"every": rounds, "audit_fraction": 0.5, "record": "updates"},
        }
    )


def line(cell: Any, title: str, vantage: str) -> str:
    """One finding in the table."""
    low, high = cell.auc_interval
    tail = cell.tail(0.01)
    caught = "refused" if tail is None else f"{tail.tpr:.1%} at {tail.fpr:.1%}"
    area = f"{cell.auc:.3f} ({low:.3f} to {high:.3f})"
    return f"| {vantage} | {title} | {area} | {caught} | {cell.epsilon_lower or 0:.2f} | {cell.seconds:.0f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("examples", 1600), ("clients", 8), ("rounds", 12), ("references", 8), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=None, help="folder for the run (default: a temporary one)")
    chosen = parser.parse_args()
    out = chosen.out or Path(tempfile.mkdtemp()) / "run"
    result = Federation(configured(chosen.examples, chosen.clients, chosen.rounds, chosen.seed)).run(out)
    audit = audited(opened(out), settings=Settings(references=chosen.references))
    told, page = written(audit.record, out, ())
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; accuracy {result.summary['accuracy']:.1%}, "
    )
    print(f"{told.members} members, {told.non_members} held out\n")
    print(
        "| adversary | attack | AUC (interval) | members caught | epsilon at least | time |\n|---|---|---|---|---|---|"
    )
    for cell in told.results:
        print(line(cell, told.attack_title(cell.attack), told.vantage_title(cell.vantage)))
    print(f"\n{told.verdict.text}\n{page}")


if __name__ == "__main__":
    main()
