"""Which learning rates suit SVD adaptation and FedARA, by the number of local steps that a run has?

    python benchmarks/short_rates.py DATA [--only trec sst2] [--methods fedara svd_adaptation] [--rounds 15] [--rates ...]
    python benchmarks/short_rates.py --docs docs                                       the table, from stored runs

DATA contains a folder for each data set, with train.jsonl.gz and test.jsonl.gz of `text` and `label`. Four clients, which
all take part in every round, train all-MiniLM-L6-v2 (the `bench` extra) in `rounds` rounds of four steps of 16 texts, without
privacy. A text has at most 32 tokens. Every finished run is a line of short_rates.jsonl beside this file and is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from claims import configured, cut, encoder
from runs_file import Runs, accuracies, fill

from secure_fed import Federation

STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "learning_rates.md"
CLIENTS, STEPS, TEXTS, TESTED = 4, 4, 5000, 500


class Cell(NamedTuple):
    data: str
    method: str
    rounds: int
    rate: float
    seed: int = 0


class Trained:
    """The accuracy of a cell's run. data: the folder of data sets."""

    def __init__(self, data: Path) -> None:
        self._data, self._cache = data, Path(tempfile.gettempdir()) / "short_rates_cache"

    def __call__(self, cell: Cell) -> tuple[float, float]:
        """The accuracy, and the share of the commonest label."""
        most = {"train": TEXTS, "test": TESTED}
        files = {
            f"data.{split}": str(
                cut(self._data / cell.data / f"{split}.jsonl.gz", self._cache / f"{cell.data}-{split}.jsonl", rows, 0)
            )
            for split, rows in most.items()
        }
        settings = {
            "model.name": str(encoder()),
            "model.pooling": "model",
            "model.max_length": 32,
            **files,
            "method.name": cell.method,
            "federation.clients": CLIENTS,
            "federation.cohort": CLIENTS,
            "federation.rounds": cell.rounds,
            "federation.seed": cell.seed,
            "training.steps": STEPS,
            "training.lr": cell.rate,
            "evaluation.every": cell.rounds,
            "evaluation.audit_fraction": 0.0,
        }
        summary = Federation(configured(settings)).run().summary
        return summary["accuracy"], summary["commonest"]["share"]


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    return {"short rates": table(accuracies(Cell, out))}


def table(found: Mapping[Cell, float]) -> str:
    """Accuracies in per cent: a row for each data set, method and length, a column for each rate."""
    rates = sorted({cell.rate for cell in found})
    rows = sorted({(cell.data, cell.method, cell.rounds) for cell in found}, key=lambda row: (row[1], row[2], row[0]))
    lines = [["data", "method", "local steps", *(f"{rate:g}" for rate in rates)], ["---"] * (len(rates) + 3)]
    for data, method, rounds in rows:
        cells = [found.get(Cell(data, method, rounds, rate)) for rate in rates]
        shown = ["" if cell is None else f"{100 * cell:.1f}" for cell in cells]
        lines.append([data, f"`{method}`", str(STEPS * rounds), *shown])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--only", nargs="*", default=["trec", "sst2"])
    parser.add_argument("--methods", nargs="*", default=["svd_adaptation", "fedara"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.0033, 0.01, 0.015, 0.03])
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--docs", type=Path, help="write the table into learning_rates.md there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.data:
        accuracy = Runs(Cell, given.out, Trained(given.data), again=False)
        for rate, data, method in itertools.product(given.rates, given.only, given.methods):
            accuracy(Cell(data, method, given.rounds, rate))
    made = tables(given.out)
    print(*made.values())
    if given.docs:
        fill(given.docs / PAGE, made)


if __name__ == "__main__":
    main()
