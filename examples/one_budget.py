"""Three runs on the same clients share one privacy budget, which suffices for two of them.

python examples/one_budget.py [FOLDER]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from privacy.errors import BudgetExhausted
from privacy.ledger import Ledger
from secure_fed import Federation, RunConfig, heartbeat

SETTINGS = [
    "data.examples=2000",
    "data.test_examples=200",
    "federation.clients=400",
    "federation.cohort=40",
    "federation.rounds=3",
    "evaluation.every=3",
    "method.name=ffa_lora",
    "privacy.unit=client",
    "privacy.epsilon=4",
    "privacy.data_set=notes of 2026",
]


def main(folder: Path) -> None:
    ledger = folder / "notes.sqlite"
    Ledger.create(ledger, data_set="notes of 2026", epsilon=8.0, delta=2e-5)  # or `secure-fed budget create`
    for number, learning_rate in enumerate(("5e-3", "1e-2", "2e-2"), start=1):
        config = RunConfig.load(overrides=[*SETTINGS, f"privacy.ledger={ledger}", f"training.lr={learning_rate}"])
        try:
            result = Federation(config).run(folder / f"run-{number}").summary
        except BudgetExhausted as error:
            print(f"third run refused: {error}" if number == 3 else f"refused: {error}")
            continue
        spent = f"epsilon {result['epsilon']:.2f}, spent so far {result['epsilon_cumulative']:.2f}"
        print(f"run {number}: accuracy {result['accuracy']:.1%}, {spent}")


if __name__ == "__main__":
    with heartbeat():  # says on a terminal what it is doing
        main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
