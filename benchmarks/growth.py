"""How a round grows with clients, cohort, numbers and ranks, against the documented cost.

    OMP_NUM_THREADS=1 python benchmarks/growth.py [--quick] [--plot docs/performance.png]

    clients    registered clients, of which 10 train a step on one note each: a round's cost does not depend on their number
    cohort     clients that train a step on 8 notes each: a round costs a client's training times the cohort
    numbers    sent by each of 10 clients, from 16 tensors: the server's work is proportional to them
    ranks      of FRA's products from 10 clients: the server's work is proportional to cohort x rank x m n

Medians over rounds of processor seconds, one thread. The line in a plot is the documented cost, with the best-fitting fixed
part and factor. docs/secure_aggregation.md shows how the cost of a secure sum grows.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from growth_fit import Panel, Point, plot
from round_overhead import CLIENTS, make, with_replies_ready
from timing import machine

from secure_fed import Federation, RunConfig
from secure_fed.learning.problem import Problem, configured

ROUNDS = 5
LAYERS = 4  # each with a query and a value, so with four factors


def a_round(federation: Federation) -> float:
    """Median processor seconds of a round after the first, in all threads."""
    ends: list[float] = []

    class Clock:
        def on_round_end(self, record: Any, state: Any) -> None:
            ends.append(time.process_time())

    federation.callbacks.append(Clock())
    federation.run()
    return statistics.median(np.diff(ends).tolist())


def trained(problem: Problem, clients: int, cohort: int, notes: int) -> float:
    """Seconds of a round of the built-in model; clients share notes, so that there are enough."""
    own: list[list[Any]] = [list(examples)[:notes] for examples in problem.train]
    settings = {
        ("federation", "rounds"): ROUNDS,
        ("federation", "cohort"): cohort,
        ("federation", "sampling"): "fixed",
        ("method", "name"): "fedlora",
        ("evaluation", "every"): ROUNDS,
        ("evaluation", "audit_fraction"): 0.0,
    }
    return a_round(
        Federation(
            RunConfig().replace(settings),
            model=copy.deepcopy(problem.model),
            train=(own * (clients // len(own) + 1))[:clients],
            test=list(problem.test)[:1],
        )
    )


def notes() -> Problem:
    """Clients of eight notes each."""
    settings = {("data", "examples"): 800, ("federation", "clients"): 100, ("data", "partition"): "iid"}
    return configured(RunConfig().replace(settings))


def panels(quick: bool) -> list[Panel]:
    clients, cohorts = ((100, 1000, 10_000), (4, 8, 16)) if quick else ((100, 1000, 10_000, 100_000), (4, 16, 64, 256))
    ranks, widths = ((2, 4, 8), (128, 256)) if quick else ((2, 4, 8, 16, 32, 64), (256, 512, 1024))
    problem = notes()
    registered = [Point(1, trained(problem, n, CLIENTS, 1), "10 of them train", n) for n in clients]
    cohort = [Point(n, trained(problem, max(100, n), n, 8), "trains") for n in cohorts]
    numbers = [
        Point(LAYERS * 4 * rank * width, server("fedlora", rank, width, CLIENTS), f"width {width}")
        for width in (*widths[:-1], 2 * widths[-1])
        for rank in ranks
    ]
    merged = [
        Point(CLIENTS * LAYERS * 2 * rank * width**2, server("fra_lora", rank, width, CLIENTS), f"m = n = {width}")
        for width in widths
        for rank in ranks
    ]
    return [
        Panel("A round", "registered clients", registered),
        Panel("A round", "cohort", cohort),
        Panel("The server's part, LoRA", "numbers from each of 10 clients", numbers),
        Panel("The server's part, FRA", "cohort x rank x m n", merged),
    ]


def server(method: str, rank: int, width: int, clients: int) -> float:
    """Seconds of a round with prepared replies."""
    return a_round(with_replies_ready(make(method, LAYERS, ROUNDS, rank=rank, width=width, clients=clients)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("torch", "numpy") + "; one thread")
    found = panels(given.quick)
    for panel in found:
        print(panel)
        for point in panel.points:
            print(f"        {point.series:20}{point.place:16,.0f}{1e3 * point.seconds:12.2f} ms")
    if given.plot:
        plot(found, given.plot)
        print(f"    drawn in {given.plot.name}")


if __name__ == "__main__":
    main()
