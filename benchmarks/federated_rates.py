"""Does the best learning rate for one client also suit many? Every method in the federation of `secure-fed train`.

    python benchmarks/federated_rates.py [--methods NAME ...] [--seeds 1]
    one cell: secure-fed train --set method.name=fedtt_plus --set training.lr=0.015 --set federation.seed=0
    python benchmarks/federated_rates.py --docs docs                                   the table, from stored runs

The built-in notes and model, 200 clients of which ten train in each of 20 rounds: averaging over clients shortens steps that do
not agree, and a client makes few steps. A method starts at its default rate, which is tripled as long as that is better, or
else divided by three. Every finished run is a line of federated_rates.jsonl beside this file and is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from runs_file import Runs, accuracies, fill

from secure_fed import Federation, RunConfig
from secure_fed.methods import METHODS, card

WIDTH, STEP = 128, 3.0  # of the built-in model; from one rate to the next
STEPS = 140  # local steps: seven batches of a client's 100 notes in each of 20 rounds
STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "methods.md"


class Cell(NamedTuple):
    method: str
    rate: float
    seed: int


def config(cell: Cell) -> RunConfig:
    """The default run except for method, rate and seed; it is tested only at its end, and never attacked."""
    settings = {
        ("method", "name"): cell.method,
        ("training", "lr"): cell.rate,
        ("federation", "seed"): cell.seed,
    }
    rounds = RunConfig().federation.rounds
    return RunConfig().replace({**settings, ("evaluation", "every"): rounds})


def made(cell: Cell) -> tuple[float, float]:
    """The accuracy, and the share of the commonest label."""
    summary = Federation(config(cell)).run().summary
    return summary["accuracy"], summary["commonest"]["share"]


def default(method: str) -> float:
    """The rate that the run chooses."""
    return round(card(method).lr_of(WIDTH, STEPS), 9)


def climbed(method: str, seed: int, accuracy: Runs[Cell]) -> None:
    """From the default rate, try higher rates as long as that is better; if none is, lower ones."""
    first = default(method)
    for step in (STEP, 1 / STEP):
        best, rate = accuracy(Cell(method, round(first, 9), seed)), first * step
        while (found := accuracy(Cell(method, round(rate, 9), seed))) > best:
            best, rate = found, rate * step
        if not math.isclose(rate, first * step):
            return


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    return {"federated rates": table(accuracies(Cell, out))}


def table(found: Mapping[Cell, float]) -> str:
    """Accuracy at each tried rate, the mean over seeds; the default rate is in bold type."""
    rates = sorted({cell.rate for cell in found})
    lines = [["method", *(f"{rate:g}" for rate in rates)], ["---"] * (len(rates) + 1)]
    for method in METHODS:
        cells = {rate: [v for cell, v in found.items() if cell[:2] == (method, rate)] for rate in rates}
        if any(cells.values()):
            shown = {rate: f"{100 * statistics.mean(each):.1f}" if each else "" for rate, each in cells.items()}
            lines.append(
                [f"`{method}`", *(f"**{shown[r]}**" if r == default(method) and shown[r] else shown[r] for r in rates)]
            )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--docs", type=Path, help="write the table into methods.md there, and run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    accuracy = Runs(Cell, given.out, made, again=False)
    for seed, method in () if given.docs else itertools.product(range(given.seeds), given.methods):
        climbed(method, seed, accuracy)
    rows = tables(given.out)
    print(*rows.values())
    if given.docs:
        fill(given.docs / PAGE, rows)


if __name__ == "__main__":
    main()
