"""The accuracy of default configurations under privacy on real text, by the input of the classifier's head.

    python benchmarks/recipes.py DATA [--where clients] [--methods head] [--poolings mean] [--epsilons 8] [--seeds 2]
    one cell: python benchmarks/recipes.py DATA --where clients --methods head --poolings mean --epsilons 8 --seeds 1
    python benchmarks/recipes.py --docs docs                                           the table, from stored runs

DATA contains the folders sst2 and trec (which `public_sets.py` makes), with train.jsonl.gz and test.jsonl.gz of `text` and
`label`. The encoder is all-MiniLM-L6-v2 (the `bench` extra), which was trained for the mean over its tokens. Only the following
is set, beside the names of files and columns, a length of at most 32 tokens (24 of questions), and the GPU if there is one; the
run itself chooses rates, batches, steps, clip norm and the server's steps, and nothing is searched:

    clients    2,000 clients of three texts, cohorts of 100, 20 rounds, privacy for each client
    silos      10 silos of 1,000 texts, 5 rounds, privacy for each text
    longer     the same silos, 20 rounds
    whole      10 silos of 6,700 texts, nearly all of SST-2's, 5 rounds
    many       20,000 clients of three texts, cohorts of 1,000, 20 rounds, privacy for each client
    questions  5 silos of 1,000 questions of TREC, 20 rounds, privacy for each question

At epsilon inf contributions are clipped as under privacy, and the noise multiplier is 0.001, too small to affect any accuracy.
A seed decides the division of the texts among clients, and the order. Every finished run is a line of recipes.jsonl beside this
file and is not run again. --docs writes the table into docs/recipes.md.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from claims import encoder
from last_layer import SCALES
from runs_file import Runs, accuracies, fill

from secure_fed import Federation, RunConfig

METHODS: dict[str, dict[str, Any]] = {
    "head": {"name": "head"},
    "federa, A frozen": {"name": "federa", "rule": "ffa_lora"},
    **{name: {"name": name} for name in ("fedlora", "ffa_lora", "fra_lora", "bitfit")},
}


class Where(NamedTuple):
    """A federation. texts: of each client. length: the most tokens of a text."""

    clients: int
    texts: int
    unit: str
    federation: dict[str, Any]
    data: str = "sst2"
    length: int = 32


WHERE = {
    "clients": Where(2_000, 3, "client", {"rounds": 20, "cohort": 100}),
    "silos": Where(10, 1_000, "example", {"rounds": 5}),
    "longer": Where(10, 1_000, "example", {"rounds": 20}),
    "whole": Where(10, 6_700, "example", {"rounds": 5}),
    "many": Where(20_000, 3, "client", {"rounds": 20, "cohort": 1_000}),
    "questions": Where(5, 1_000, "example", {"rounds": 20}, "trec", 24),
}
POOLINGS, EPSILONS, NONE = ("mean", "described", "fixed", "model"), (math.inf, 8.0, 3.0, 1.0), 0.001
STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "recipes.md"
READS = {
    "mean": "the mean over tokens",
    "described": "the mean, starting from descriptions",
    "fixed": "the mean, fixed by descriptions",
    "model": "the first token",
}


class Cell(NamedTuple):
    where: str
    method: str
    pooling: str
    epsilon: float
    seed: int


def config(cell: Cell, files: dict[str, str]) -> RunConfig:
    """All settings that are not defaults."""
    here = WHERE[cell.where]
    classes = SCALES[here.data].classes if cell.pooling in ("described", "fixed") else ()
    head = {
        "pooling": "model" if cell.pooling == "model" else "mean",
        "descriptions": [f"{number}={text}" for number, text in enumerate(classes)],
        "train_head": cell.pooling != "fixed",
    }
    budget = {"noise_multiplier": NONE} if math.isinf(cell.epsilon) else {"epsilon": cell.epsilon}
    return RunConfig.from_dict(
        {
            "model": {"name": str(encoder()), "device": "auto", "max_length": here.length} | head,
            "data": files | {"client": "client"},
            "federation": here.federation | {"seed": cell.seed},
            "method": METHODS[cell.method],
            "privacy": {"unit": here.unit} | budget,
            "evaluation": {"every": here.federation["rounds"]},
        }
    )


def files(data: Path, cache: Path, where: str, seed: int) -> dict[str, str]:
    """The first texts of a permutation, each with its client; and all test texts."""
    here, found = WHERE[where], {}
    cache.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        with gzip.open(data / here.data / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        if split == "train":
            order = np.random.default_rng(seed).permutation(len(rows))[: here.clients * here.texts]
            rows = [rows[int(i)] | {"client": f"client {at // here.texts}"} for at, i in enumerate(order)]
        place = cache / f"{where}-{seed}-{split}.jsonl"
        kept = ({name: row[name] for name in ("text", "label", "client") if name in row} for row in rows)
        place.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        found[split] = str(place)
    return found


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    found = accuracies(Cell, out)
    made_in = [where for where in WHERE if any(cell.where == where for cell in found)]
    return {"recipes": "\n\n".join(f"{where}:\n\n{table(found, where)}" for where in made_in)}


def table(found: dict[Cell, float], where: str) -> str:
    """Mean accuracy and its standard deviation over seeds."""
    head = ["method", "the head reads", *(f"epsilon {epsilon:g}" for epsilon in EPSILONS)]
    rows = []
    for method, pooling in itertools.product(METHODS, POOLINGS):
        cells = [
            [value for cell, value in found.items() if cell[:4] == (where, method, pooling, epsilon)]
            for epsilon in EPSILONS
        ]
        if any(cells):
            name = f"`{method}`" if "," not in method else method
            rows.append([name, READS[pooling], *map(_shown, cells)])
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _shown(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f}{spread} ({len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--where", nargs="+", choices=list(WHERE), default=list(WHERE))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--poolings", nargs="+", choices=POOLINGS, default=list(POOLINGS))
    parser.add_argument("--epsilons", nargs="+", type=float, choices=EPSILONS, default=[8.0, 1.0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="make runs again that are there")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "recipes_cache")
    parser.add_argument("--docs", type=Path, help="write the table there")
    given = parser.parse_args()
    torch.set_num_threads(1)

    def made(cell: Cell) -> tuple[float, float]:
        told = config(cell, files(given.data, given.cache, cell.where, cell.seed))
        summary = Federation(told).run().summary
        return summary["accuracy"], summary["commonest"]["share"]

    if given.data:
        run = Runs(Cell, given.out, made, again=given.again)
        for cell in itertools.starmap(
            Cell,
            itertools.product(given.where, given.methods, given.poolings, given.epsilons, range(given.seeds)),
        ):
            run(cell)
    if given.docs:
        fill(given.docs / PAGE, tables(given.out))


if __name__ == "__main__":
    main()
