"""Train a small run, attack it from four vantage points with reference adapters, and write the report: about a minute.

python examples/audit_a_run.py [FOLDER]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from attacks.adversary.case import Settings, opened
from attacks.audit import audited
from attacks.report.page import write
from secure_fed import Federation, RunConfig, heartbeat

SETTINGS = [
    "federation.seed=1",  # with 0 the audit happens to divide texts whose words tell them apart
    "data.examples=300",
    "data.test_examples=200",
    "federation.clients=5",
    "federation.rounds=4",
    "evaluation.every=4",
    "evaluation.audit_fraction=0.5",
    "evaluation.record=updates",
    "method.name=fedlora",
    "training.optimizer=sgd",
    "training.lr=0.5",
    "training.lr_schedule=constant",
]


def main(folder: Path) -> None:
    result = Federation(RunConfig.load(overrides=SETTINGS)).run(folder / "run").summary
    print(f"accuracy {result['accuracy']:.1%}, membership AUC {result['membership']['auc']:.3f} by the loss alone")
    audit = audited(opened(folder / "run"), settings=Settings(references=4))
    for cell in audit["cells"]:
        if cell["applicable"] and cell["auc"] is not None:
            low, high = cell["auc_interval"]
            print(f"{cell['attack']:>15} by {cell['vantage']:<14} AUC {cell['auc']:.3f} ({low:.3f} to {high:.3f})")
    print(audit["verdict"]["text"])
    print(f"report: {write(audit.record, folder / 'audit.html')}")


if __name__ == "__main__":
    with heartbeat():  # says on a terminal what it is doing
        main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
