"""Accuracy, what attacks find, and the lower bound beside the accounted epsilon, over several epsilons.

    python benchmarks/audit_sweep.py [--epsilons 1,4,8] [--out DIR]

One small run for each epsilon, private for examples, and one without privacy, on the same notes with the same coins, trained
until the unprotected one knows many notes by heart. Half of all notes are audited; a quarter is held out. Writes the runs and
an audit.html in which they stand side by side.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from attacks.audit import audited, opened
from attacks.case import Settings
from attacks.command import written
from secure_fed import Federation, RunConfig

SETTINGS = [
    "data.examples=1600",
    "data.test_examples=1000",
    "federation.clients=8",
    "federation.cohort=8",
    "federation.rounds=12",
    "method.name=fedlora",
    "method.rank=16",
    "training.epochs=3",
    "training.lr=5e-3",
    "evaluation.every=12",
    "evaluation.audit_fraction=0.5",
]
ATTACKS = ("loss", "lira", "rmia")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilons", default="1,4,8", help="comma-separated")
    parser.add_argument(
        "--references", type=int, default=8, help="reference adapters of the unprotected run (default 8)"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for the runs (default: a temporary one)")
    chosen = parser.parse_args()
    out = chosen.out or Path(tempfile.mkdtemp())
    folders = []
    for epsilon in (None, *map(float, chosen.epsilons.split(","))):
        private = (
            [] if epsilon is None else ["privacy.unit=example", f"privacy.epsilon={epsilon}", "privacy.clip_norm=0.5"]
        )
        folder = out / ("unprotected" if epsilon is None else f"epsilon-{epsilon:g}")
        Federation(RunConfig.load(overrides=[*SETTINGS, *private])).run(folder)
        # References under privacy take one gradient an example: the loss alone stands for those runs.
        names, references = (ATTACKS, chosen.references) if epsilon is None else (("loss",), 0)
        written(audited(opened(folder), names, Settings(references=references)), folder, ())
        folders.append(folder)
    first, *others = folders
    page, rows = compared(first, others)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores\n")
    print(
        "| epsilon | accuracy | attack | AUC (interval) | members caught at 1 % | epsilon at least |\n|---|---|---|---|---|---|"
    )
    for row in rows:
        low, high = row["auc_interval"]
        caught = f"{row['tpr_at_1']['tpr']:.1%}" if row["tpr_at_1"] else "refused"
        epsilon = "none" if row["epsilon"] is None else f"{row['epsilon']:.2f}"
        area = f"{row['auc']:.3f} ({low:.3f} to {high:.3f})"
        print(
            f"| {epsilon} | {row['accuracy']:.1%} | {row['attack']} | {area} | {caught} | {row['epsilon_lower']:.2f} |"
        )
    print(f"\n{page}")


def compared(first: Path, others: list[Path]) -> tuple[Path, list[dict[str, Any]]]:
    """The page of the first run with the others beside it, and the rows of that table."""
    from attacks.audit import AUDIT
    from secure_fed.run_dir import read_object

    audit = read_object(first, AUDIT)
    page = written(audit, first, others)
    return page, audit["sweep"]


if __name__ == "__main__":
    main()
