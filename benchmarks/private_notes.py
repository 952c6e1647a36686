"""What methods learn under client-level privacy on a task that needs more than an encoder's features: the demo's federation.

    python benchmarks/private_notes.py [--methods NAME ...] [--epsilons 8] [--noises independent] [--seeds 2] [--search]
    python benchmarks/private_notes.py --clients 20000 [...]                           a cohort of 1,000 instead of 250
    python benchmarks/private_notes.py --open [...]                                    with all steps left open
    one cell: python benchmarks/private_notes.py --methods ffa_lora --epsilons 8 --noises independent --seeds 1
    python benchmarks/private_notes.py --docs docs                                     the tables, from stored runs

The built-in notes and model: 5,000 clients (or --clients) of five notes take part once each, a twentieth of them in each of 20
rounds; a client makes one step of AdamW; no masks and no dummies, which change no accuracy. The server adds the noise,
independent or correlated over rounds. The clip norm is 3.1 for all: one step moves the trained numbers by at most 2.7 (the head
alone) to 3.5 (FedLoRA), the rate times the root of their count. Since every contribution is about as long as the clip norm,
only the length of the server's steps remains to be chosen. `length` 1.6 means momentum 0.5 and a rate of 1.6, or a rate of 3.2
without momentum for methods that refuse it. --search halves the length as long as that is better, on a division of the clients
and notes that the table does not use (seed 100); the table uses the best length, or 1.6 if none was searched. The search is
charged to no epsilon. With --open the run itself chooses the rate, the clip norm, momentum and the server's steps, as when only
epsilon and a method's name are set.

A run is tested twice: with the model of the last round, and with the mean of the models of the last five rounds, which is the
final model under `federation.average_last = 5`. Both are lines of --out, and stored runs are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import runs_file
import torch
from promises import notes, of_notes

from secure_fed import RunConfig
from secure_fed.methods.method import Method, State
from secure_fed.rounds.server_optimizer import Tail
from secure_fed.runs.evaluation import evaluated
from secure_fed.tensors.tensors import Tensors

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
STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "private_utility.md"
OPEN = 0.0  # stands for a length that the settings leave open
SEARCHED_ON = 100  # a seed outside the tables
LAST, ROUNDS, CLIENTS, EACH, DELTA = 5, 20, 5_000, 5, 1e-5
SIZES = (2_000, CLIENTS, 20_000, 100_000)


class At(NamedTuple):
    """A column and a row of the tables."""

    method: str
    epsilon: float
    noise: str
    clients: int = CLIENTS


class Cell(NamedTuple):
    method: str
    epsilon: float
    noise: str
    length: float
    seed: int
    averaged: int
    clients: int = CLIENTS


Found = Mapping[Cell, float]


def delta_of(clients: int) -> float:
    """1e-5, or 1e-6 where 1e-5 would permit publishing one of the clients."""
    return DELTA if clients < 1 / DELTA else DELTA / 10


def config(cell: Cell) -> RunConfig:
    tables = of_notes(cell.seed, ROUNDS).to_dict()
    tables["data"]["examples"] = EACH * cell.clients
    tables["federation"] |= {
        "clients": cell.clients,
        "cohort": cell.clients // ROUNDS,
        "sampling": "schedule",
        "server_momentum": 0.5,
        "server_lr": cell.length,
    }
    if cell.method in WITHOUT_MOMENTUM:
        del tables["federation"]["server_momentum"]
        tables["federation"] |= {"server_optimizer": "mean", "server_lr": 2 * cell.length}
    correlation = "banded" if cell.noise == "correlated" else "none"
    tables["privacy"] = {"unit": "client", "epsilon": cell.epsilon, "noise": "central", "correlation": correlation}
    tables["privacy"] |= {"clip_norm": CLIP_NORM, "delta": delta_of(cell.clients)}
    if cell.length == OPEN:
        for name in ("server_optimizer", "server_momentum", "server_lr"):
            tables["federation"].pop(name, None)
        del tables["training"], tables["privacy"]["clip_norm"]
    return RunConfig.from_dict(tables | {"method": METHODS[cell.method]})


class Averaging:
    """Records the final state that a run would have if it averaged the models of its last rounds."""

    def __init__(self, method: Method) -> None:
        self._method, self._tail, self._memory = method, Tail(ROUNDS, LAST), Tensors()
        self.state: State | None = None

    def on_round_end(self, record: object, state: State) -> None:
        self.state = self._tail.taken_in(self._method, self._memory, state)
        self._memory = self.state.memory


def run(out: Path, cell: Cell) -> float:
    """The accuracy of the averaged model; the run is made if --out has no line for it."""
    found = runs_file.accuracies(Cell, out)
    averaged = cell._replace(averaged=LAST)
    if averaged not in found:
        started, federation = time.perf_counter(), notes(config(cell))
        averaging = Averaging(federation.assembly.method)
        federation.callbacks.append(averaging)
        summary = federation.run().summary
        assert averaging.state is not None
        found |= {
            cell._replace(averaged=1): summary["accuracy"],
            averaged: evaluated(federation.assembly, averaging.state)["accuracy"],
        }
        more = {"seconds": time.perf_counter() - started, "commonest": summary["commonest"]["share"]}
        for each in (cell._replace(averaged=1), averaged):
            runs_file.keep(out, each._asdict() | {"epsilon": str(each.epsilon), "accuracy": found[each]} | more)
            print(*each, f"{100 * found[each]:.1f}, {more['seconds']:.0f} s", flush=True)
    return found[averaged]


def _cell(at: At, length: float, seed: int, averaged: int = LAST) -> Cell:
    return Cell(at.method, at.epsilon, at.noise, length, seed, averaged, at.clients)


def length(found: Found, at: At) -> float:
    """The best of the searched lengths, or 1.6 if none was searched."""
    return max(LENGTHS, key=lambda each: found.get(_cell(at, each, SEARCHED_ON), 0.0))


def searched(out: Path, at: At) -> None:
    """Try shorter and shorter steps, as long as that is better."""
    best = 0.0
    for each in LENGTHS:
        found = run(out, _cell(at, each, SEARCHED_ON))
        if found <= best:
            return
        best = found


def seeds(found: Found, at: At, averaged: int, of: float | None = None) -> list[float]:
    """The accuracies of a cell of the table over seeds, with steps of length `of`, or of the best length."""
    sought = _cell(at, length(found, at) if of is None else of, 0, averaged)
    return [value for each, value in found.items() if each._replace(seed=0) == sought and each.seed != SEARCHED_ON]


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    found = runs_file.accuracies(Cell, out)
    made = {"notes": table(found, LAST), "notes, last": table(found, 1), "notes, searched": searches(found)}
    return made | {"notes, cohorts": cohorts(found), "notes, open": left_open(found)}


def table(found: Found, averaged: int) -> str:
    """Mean accuracy and its standard deviation over seeds."""
    columns = list(itertools.product(EPSILONS, NOISES))
    rows = [
        [_name(method), *(_shown(seeds(found, At(method, *column), averaged)) for column in columns)]
        for method in METHODS
    ]
    return _lines(["method", *(f"epsilon {epsilon:g}, {noise}" for epsilon, noise in columns)], rows)


def cohorts(found: Found) -> str:
    """The same for the last models, by epsilon, noise and cohort size, if there are runs of more than one size."""
    columns = list(itertools.product(EPSILONS, NOISES, SIZES))
    cells = {(m, c): seeds(found, At(m, *c), 1) for m in METHODS for c in columns}
    others = {c[:2] for (_, c), held in cells.items() if held and c[2] != CLIENTS}
    columns = [c for c in columns if c[:2] in others and any(cells[m, c] for m in METHODS)]
    methods = [m for m in METHODS if any(cells[m, c] for c in columns if c[2] != CLIENTS)]
    rows = [[_name(m), *(_shown(cells[m, c]) for c in columns)] for m in methods]
    return _lines(["method", *(f"epsilon {e:g}, {noise}, {size // ROUNDS:,}" for e, noise, size in columns)], rows)


def left_open(found: Found) -> str:
    """The same for runs with open steps, with the mean of the last five models, as an open `average_last` takes it."""
    columns = list(itertools.product(EPSILONS, NOISES, SIZES))
    cells = {(m, c): _shown(seeds(found, At(m, *c), LAST, OPEN)) for m in METHODS for c in columns}
    columns = [column for column in columns if any(cells[method, column] for method in METHODS)]
    rows = [[_name(m), *(cells[m, c] for c in columns)] for m in METHODS]
    return _lines(["method", *(f"epsilon {e:g}, {noise}, {size // ROUNDS:,}" for e, noise, size in columns)], rows)


def searches(found: Found) -> str:
    """The search's results: the averaged model's accuracy."""
    columns = [(*each, tried) for each in itertools.product(EPSILONS, NOISES, SIZES) for tried in LENGTHS]
    cells = {(m, c): found.get(_cell(At(m, *c[:3]), c[3], SEARCHED_ON)) for m in METHODS for c in columns}
    columns = [column for column in columns if any(cells[method, column] for method in METHODS)]
    rows = [[_name(m), *(f"{100 * v:.1f}" if (v := cells[m, c]) else "" for c in columns)] for m in METHODS]
    return _lines(["method", *(f"{n // ROUNDS:,}: epsilon {e:g}, {noise}, {at}" for e, noise, n, at in columns)], rows)


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


def wanted(given: argparse.Namespace) -> Iterator[tuple[At, int]]:
    """Every requested cell with its seed, seed by seed."""
    for seed, epsilon, noise, method in itertools.product(
        range(given.seeds), given.epsilons, given.noises, given.methods
    ):
        if noise == "independent" or method not in WITHOUT_MOMENTUM:
            yield At(method, epsilon, noise, given.clients), seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, choices=EPSILONS, default=[8.0])
    parser.add_argument("--noises", nargs="+", choices=NOISES, default=["independent"])
    parser.add_argument("--clients", type=int, choices=SIZES, default=CLIENTS)
    parser.add_argument("--seeds", type=int, default=2)
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--search", action="store_true", help="try the lengths of the server's steps first")
    steps.add_argument("--open", action="store_true", help="leave the steps of clients and server open")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--docs", type=Path, help="write the tables into private_utility.md there, and run nothing")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    for at, seed in () if given.docs else wanted(given):
        if given.search:
            searched(given.out, at)
        best = OPEN if given.open else length(runs_file.accuracies(Cell, given.out), at)
        run(given.out, _cell(at, best, seed))
    made = tables(given.out)
    print("\n\n".join(made.values()))
    if given.docs:
        runs_file.fill(given.docs / PAGE, made)


if __name__ == "__main__":
    main()
