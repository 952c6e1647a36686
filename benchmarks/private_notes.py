"""What methods learn under client-level privacy where an encoder's features alone are not enough: the federation of the demo.

    python benchmarks/private_notes.py [--methods NAME ...] [--epsilons 8] [--noises independent] [--seeds 2] [--search]
    one cell: python benchmarks/private_notes.py --methods ffa_lora --epsilons 8 --noises independent --seeds 1
    python benchmarks/private_notes.py --docs docs                                     the tables, from what is stored

The built-in notes and model: 5,000 clients of five notes, each once, 250 in each of 20 rounds; a step of AdamW at a client; no
masks and no phantoms, which change no accuracy. The server adds the noise, independent or correlated over rounds. The clip norm
is the demo's, 3.1, for all: one step is 2.7 (the head alone) to 4.2 long (FedPower), which follows from the rate and the
number of trained numbers. Every contribution being about as long as the clip norm, what is left to choose is the length of the
server's steps. `length` 1.6 is the demo's: momentum 0.5 and a rate of 1.6, or 3.2 without momentum for methods that refuse it.
--search halves it as long as that is better, on a division of the clients and notes that the table does not use (seed 100); the
table takes the best one, and 1.6 where nothing was tried. The search is charged to no epsilon.

Every finished run is one line of --out, and what is there is not made again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import runs_file
import torch
from promises import notes, of_notes

from secure_fed import RunConfig

METHODS: dict[str, dict[str, Any]] = {
    "head": {"name": "head"},
    "bitfit": {"name": "bitfit"},
    **{name: {"name": name} for name in ("fedlora", "ffa_lora", "rolora")},
    "fra_lora, tangent": {"name": "fra_lora", "denoise": "tangent"},
    "fra_lora, none": {"name": "fra_lora", "denoise": "none"},
    "fra_lora, shrink": {"name": "fra_lora", "denoise": "shrink"},
    "fra_lora, shrink means": {"name": "fra_lora", "denoise": "shrink", "denoise_over": "mean"},
    "fra_lora, truncate": {"name": "fra_lora", "denoise": "truncate"},
    "fra_then_ffa, tangent": {"name": "fra_then_ffa", "denoise": "tangent"},
    "fra_then_ffa, shrink": {"name": "fra_then_ffa", "denoise": "shrink"},
    **{name: {"name": name} for name in ("fedsvd", "fedask", "fedpower")},
    "federa, A frozen": {"name": "federa", "rule": "ffa_lora"},
    "federa, FRA tangent": {"name": "federa", "rule": "fra_lora", "denoise": "tangent"},
}
WITHOUT_MOMENTUM = ("rolora", "fedsvd", "fedask", "fedpower")
EPSILONS, NOISES, LENGTHS, CLIP_NORM = (8.0, 3.0, 1.0), ("independent", "correlated"), (1.6, 0.8, 0.4, 0.2), 3.1
SEARCHED_ON = 100  # a seed that no cell of the table has


class Cell(NamedTuple):
    method: str
    epsilon: float
    noise: str
    length: float
    seed: int


Found = Mapping[Cell, float]


def config(cell: Cell) -> RunConfig:
    tables = of_notes(cell.seed, 20).to_dict()
    tables["federation"] |= {"sampling": "schedule", "server_momentum": 0.5, "server_lr": cell.length}
    if cell.method in WITHOUT_MOMENTUM:
        del tables["federation"]["server_momentum"]
        tables["federation"] |= {"server_optimizer": "mean", "server_lr": 2 * cell.length}
    correlation = "banded" if cell.noise == "correlated" else "none"
    tables["privacy"] = {"unit": "client", "epsilon": cell.epsilon, "noise": "central", "correlation": correlation}
    tables["privacy"] |= {"clip_norm": CLIP_NORM}
    return RunConfig.from_dict(tables | {"method": METHODS[cell.method]})


def made(cell: Cell) -> tuple[float, float]:
    """The accuracy of the run, and that of the commonest label."""
    summary = notes(config(cell)).run().summary
    return summary["accuracy"], summary["commonest"]["share"]


def length(found: Found, method: str, epsilon: float, noise: str) -> float:
    """The best one of the lengths that were tried, and the demo's where none was."""
    return max(LENGTHS, key=lambda each: found.get(Cell(method, epsilon, noise, each, SEARCHED_ON), 0.0))


def searched(accuracy: runs_file.Runs[Cell], method: str, epsilon: float, noise: str) -> None:
    """Shorter and shorter steps, as long as that is better."""
    best = 0.0
    for each in LENGTHS:
        found = accuracy(Cell(method, epsilon, noise, each, SEARCHED_ON))
        if found <= best:
            return
        best = found


def seeds(found: Found, method: str, epsilon: float, noise: str) -> list[float]:
    """The accuracies of a cell of the table."""
    at = (method, epsilon, noise, length(found, method, epsilon, noise))
    return [value for cell, value in found.items() if cell[:4] == at and cell.seed != SEARCHED_ON]


def table(found: Found) -> str:
    """Mean accuracy and its standard deviation over seeds."""
    columns = list(itertools.product(EPSILONS, NOISES))
    rows = [[_name(method), *(_shown(seeds(found, method, *column)) for column in columns)] for method in METHODS]
    return _lines(["method", *(f"epsilon {epsilon:g}, {noise}" for epsilon, noise in columns)], rows)


def searches(found: Found) -> str:
    """What the search saw."""
    columns = [(*each, tried) for each in itertools.product(EPSILONS, NOISES) for tried in LENGTHS]
    cells = {(m, c): found.get(Cell(m, *c, SEARCHED_ON)) for m in METHODS for c in columns}
    columns = [column for column in columns if any(cells[method, column] for method in METHODS)]
    rows = [[_name(m), *(f"{100 * v:.1f}" if (v := cells[m, c]) else "" for c in columns)] for m in METHODS]
    return _lines(["method", *(f"epsilon {e:g}, {noise}, {tried}" for e, noise, tried in columns)], rows)


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    kept = [row for row in rows if any(row[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *kept))


def _name(method: str) -> str:
    return method if " " in method else f"`{method}`"


def _shown(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f}{spread} ({len(values)})"


def wanted(given: argparse.Namespace) -> Iterator[tuple[str, float, str, int]]:
    """Method, epsilon, noise and seed of every cell that was asked for; seed by seed."""
    for seed, epsilon, noise, method in itertools.product(
        range(given.seeds), given.epsilons, given.noises, given.methods
    ):
        if noise == "independent" or method not in WITHOUT_MOMENTUM:
            yield method, epsilon, noise, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, choices=EPSILONS, default=[8.0])
    parser.add_argument("--noises", nargs="+", choices=NOISES, default=["independent"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--search", action="store_true", help="try the lengths of the server's steps first")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    parser.add_argument("--docs", type=Path, help="write the tables into private_utility.md there, and run nothing")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    accuracy = runs_file.Runs(Cell, given.out, made, again=False)
    for method, epsilon, noise, seed in () if given.docs else wanted(given):
        if given.search:
            searched(accuracy, method, epsilon, noise)
        at = length(runs_file.accuracies(Cell, given.out), method, epsilon, noise)
        accuracy(Cell(method, epsilon, noise, at, seed))
    found = runs_file.accuracies(Cell, given.out)
    print(table(found))
    if given.docs:
        runs_file.put(given.docs / "private_utility.md", "notes", table(found))
        runs_file.put(given.docs / "private_utility.md", "notes, searched", searches(found))


if __name__ == "__main__":
    main()
