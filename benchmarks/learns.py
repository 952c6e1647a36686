"""Does every method learn, and at which learning rate?

    python benchmarks/learns.py DATA [--steps 200] [--methods NAME ...] [--only NAME ...] [--part 0/2] [--again]
    python benchmarks/learns.py DATA --steps 200 --only sst2 --finer                         rates between
    python benchmarks/learns.py DATA --steps 200 --only sst2 --repeats 2                     fresh seeds, at the rates found
    python benchmarks/learns.py DATA --only sst2 --methods c2a --rates 0.01 --steps 200      one cell of the tables
    python benchmarks/learns.py DATA --steps 200 --only "sst2, mean"                         the head reads the mean over tokens
    python benchmarks/learns.py DATA --steps 200 --methods c2a --set method.bottleneck=64    another size, searched by itself
    python benchmarks/learns.py --docs docs                                                  the tables, from stored runs

DATA contains a folder for each data set, with train.jsonl.gz and test.jsonl.gz of `text` and `label`. One client has all of
2,000 texts of at most 32 tokens, and trains a head and the method's part of all-MiniLM-L6-v2 (the `bench` extra) for 10 rounds
of 8 steps of 16 texts; with --steps 200, 3,200 texts and 10 rounds of 20 steps; with 1000, 16,000 texts and rounds of 100.
PEFT's method of the same kind, or else training of all weights, makes as many steps of as many texts.

Rates are searched in steps of about three, until neighbours on both sides are no better; the default rates come from the 80
steps. --finer tries rates between the best one of a data set and its neighbours. --repeats trains with further seeds at the
rate that seed 0 chose on each data set. Every finished run is a line of learns.jsonl beside this file and is not run again
(unless with --again); --docs fills the tables of learning_rates.md from it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from learns_tasks import FORMER, LATER, MEAN, PEERS, SAME, SEARCHED, TEXTS, commonest, cut, defaults, ours, peer
from runs_file import fill, keep, lines

from secure_fed.methods import METHODS

GRID = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
FIRST = {"fedft": 3e-4, "full training": 3e-4, "prompt_tuning": 3e-2, "ia3": 1e-2}  # where searches start, else START
START = 3e-3
STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "learning_rates.md"
Run = dict[str, Any]
KEY = ("steps", "falls", "head", "data", "method", "rate", "seed", "set")
Tried = Callable[[str, float, int], float]  # the accuracy on a data set, at a rate, with a seed


def finished(out: Path) -> dict[tuple[Any, ...], Run]:
    """The runs in the file; of repeated runs the last. Early runs lack fields: one rate for all, default sizes."""
    runs = [{"head": 1.0, "set": ""} | run for run in lines(out)]
    return {tuple(run[name] for name in KEY): run for run in runs}


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    import learns_page

    return {"learning rates": learns_page.tables(list(finished(out).values()), of_all, best_on)}


def way(given: argparse.Namespace, method: str) -> tuple[str, float]:
    """The requested schedule of the rate, and the head's rate; a peer has one rate for all."""
    falls, head = defaults(method, given.steps)
    return given.falls or falls, head if given.head is None or method not in METHODS else given.head


def tried(given: argparse.Namespace, method: str, known: dict[tuple[Any, ...], Run]) -> Tried:
    """A function that makes a run only if it is not stored."""

    def accuracy(data: str, rate: float, seed: int) -> float:
        falls, head = way(given, method)
        key = (given.steps, falls, head, data, method, rate, seed, given.set)
        if key not in known and not given.again:
            known.update(finished(given.out))  # another process may have made it
        if key not in known:
            texts = TEXTS[given.steps]
            files = {split: cut(given.data, data, split, given.cache, texts) for split in ("train", "test")}
            started = time.perf_counter()
            pooling = "mean" if data.endswith(MEAN) else "model"
            settings = (files, pooling, rate, seed, given.steps, falls)
            found = ours(method, *settings, head, given.set) if method in METHODS else peer(method, *settings)
            line = dict(zip(KEY, key, strict=True))
            line |= {"accuracy": found, "commonest": commonest(files["test"]), "seconds": time.perf_counter() - started}
            known[key] = line
            kept(given.out, line)
        return float(known[key]["accuracy"])

    return accuracy


def kept(out: Path, line: Run) -> None:
    keep(out, line)
    print(
        f"{line['steps']} {line['data']:12} {line['method']:18} {line['rate']:<8g} seed {line['seed']}  {line['accuracy']:.3f}"
        f"  (commonest {line['commonest']:.3f}), {line['seconds']:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def climbed(accuracy: Callable[[float], float], start: float) -> float:
    """The best rate of the grid, searched from `start` until neighbours on both sides are no better."""
    at, seen = GRID.index(start), {}
    while True:
        for near in (at, at - 1, at + 1):
            if 0 <= near < len(GRID) and near not in seen:
                seen[near] = accuracy(GRID[near])
        best = max(seen, key=lambda place: (seen[place], -abs(place - at)))
        if best == at:
            return GRID[at]
        at = best


def of_all(runs: Sequence[Run], method: str) -> float | None:
    """The rate with the best mean over the searched data sets on seed 0, among the rates tried on the most of them; None for a
    method that was not tried.
    """
    found: dict[float, list[float]] = {}
    for run in runs:
        if run["method"] == method and run["seed"] == 0 and run["data"] in SEARCHED:
            found.setdefault(run["rate"], []).append(run["accuracy"])
    if not found:
        return None
    most = max(map(len, found.values()))
    means = {rate: math.fsum(each) / most for rate, each in found.items() if len(each) == most}
    return max(means, key=lambda rate: means[rate])


def best_on(runs: Sequence[Run], data: str, method: str) -> float | None:
    """The method's best rate on that data set with seed 0; among equals, the lowest."""
    found = {
        run["rate"]: run["accuracy"] for run in runs if (run["data"], run["method"], run["seed"]) == (data, method, 0)
    }
    return min(found, key=lambda rate: (-found[rate], rate)) if found else None


def searched(given: argparse.Namespace, methods: Sequence[str]) -> None:
    """Make every search on one data set after the other, so that early results are usable."""
    known = {} if given.again else finished(given.out)
    as_long = [run for run in comparable(known, given) if run["rate"] in GRID]
    others = [run for run in known.values() if run not in as_long and run["rate"] in GRID]
    others.sort(key=lambda run: abs(run["steps"] - given.steps))
    best: dict[str, float] = {}
    for method in methods:
        nearest = [run for run in others if run["method"] == method]
        alike = [run for run in nearest if run["steps"] == nearest[0]["steps"]]
        best[method] = of_all(as_long, method) or of_all(alike, method) or FIRST.get(method, START)
    for data, method in itertools.product(given.only, methods):
        tried(given, method, known)(data, best[method], 0)
    for data, method in itertools.product(given.only, methods):
        accuracy = tried(given, method, known)
        climbed(lambda rate, data=data, accuracy=accuracy: accuracy(data, rate, 0), best[method])  # type: ignore[misc]


def comparable(known: dict[tuple[Any, ...], Run], given: argparse.Namespace) -> list[Run]:
    """The runs with the same number of steps, the same sizes and the same schedule, at least by rounds."""
    found = []
    for run in known.values():
        falls, head = way(given, run["method"])
        alike = run["falls"] in (falls, FORMER if falls == "stable_decay" else falls)
        found += [run] if alike and (run["steps"], run["head"], run["set"]) == (given.steps, head, given.set) else []
    return found


def refined(given: argparse.Namespace, methods: Sequence[str]) -> None:
    """Try, on each data set, the rates half-way between the best one of the grid and its neighbours."""
    known = finished(given.out)
    runs = comparable(known, given)
    on_grid = [run for run in runs if run["rate"] in GRID]
    for data, method in itertools.product(given.only, methods):
        best = best_on(on_grid, data, method)
        if best is not None:
            lower = GRID[max(0, GRID.index(best) - 1)]
            for rate in (2 * best, 2 * lower):  # 1, 2, 3, 6, 10
                tried(given, method, known)(data, round(rate, 9), 0)


def repeated(given: argparse.Namespace, methods: Sequence[str]) -> None:
    """Run further seeds, on which no rate was chosen."""
    known = finished(given.out)
    runs = comparable(known, given)
    for data, method, seed in itertools.product(given.only, methods, range(1, given.repeats + 1)):
        rate = best_on(runs, data, method)
        if rate is not None:
            tried(given, method, known)(data, rate, seed)


def cells(given: argparse.Namespace, methods: Sequence[str]) -> None:
    """Run the given rates alone."""
    known = {} if given.again else finished(given.out)
    for method, data, rate in itertools.product(methods, given.only, given.rates):
        tried(given, method, known)(data, rate, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", choices=[*SEARCHED, *LATER], default=list(SEARCHED))
    parser.add_argument("--steps", type=int, choices=list(TEXTS), default=80)
    parser.add_argument("--head", type=float, help="training.head_factor, if not as is usual for these steps")
    parser.add_argument(
        "--falls", choices=["constant", "linear", "stable_decay"], help="the rate, if not as is usual for these steps"
    )
    parser.add_argument("--repeats", type=int, default=0, help="train with so many further seeds, and search nothing")
    every = [*METHODS, *dict.fromkeys(PEERS.values()), *SAME.values()]
    parser.add_argument("--methods", nargs="*", choices=every, default=every)
    parser.add_argument(
        "--set", default="", help="settings of the method, separated by spaces, in place of its default sizes"
    )
    parser.add_argument("--rates", nargs="+", type=float, help="these alone, in place of the search")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th of the methods, for processes side by side")
    parser.add_argument("--again", action="store_true", help="make runs again that are there")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "learns_cache")
    parser.add_argument("--docs", type=Path, help="fill the tables of learning_rates.md there")
    parser.add_argument("--finer", action="store_true", help="try the rates beside the best one of each data set")
    given = parser.parse_args()
    torch.set_num_threads(1)
    part, parts = map(int, given.part.split("/"))
    if given.data:
        made = cells if given.rates else repeated if given.repeats else refined if given.finer else searched
        made(given, given.methods[part::parts])
    if given.docs:
        fill(given.docs / PAGE, tables(given.out))


if __name__ == "__main__":
    main()
