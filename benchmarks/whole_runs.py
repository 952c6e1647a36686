"""Whole simulated runs: ours, Flower's simulation, pfl's, and a plain loop over Transformers, PEFT and Opacus.

    python benchmarks/whole_runs.py [--only tiny ...] [--repeats 2] [--data FOLDER] [--peers FOLDER]

All start from the same model, token ids, clients, cohort size and local optimiser, train the same tensors by LoRA, and evaluate
the same test set after every round; each draws cohorts in its own way. Every run is a separate process, timed from its start,
including Python, imports and the model. All may use every core, as their documentation recommends.

    start    seconds until the first round begins
    first    the first round, in which Flower's actors load the model
    round    median of the others
    whole    from the start of the process to the end of its last round

`one adapter` has no clients: as many texts in a round train one adapter with plain torch, in passes of similar lengths.

Ways alternate; the turn with the shortest whole run is shown for each. Peers are installed once by pip into their own
environments below --peers. --data: a folder with train.jsonl.gz and test.jsonl.gz of texts and labels, for MiniLM; without it,
MiniLM gets built-in notes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import environments
from peers.prepare import TINY, prepare
from timing import Limit, at_least, ended, machine, show

HERE = Path(__file__).parent
CORES = os.cpu_count() or 1
LIMITS = {"Flower": 5.0, "pfl": 1.5}
FLOOR = "one adapter"  # no clients: one adapter with as many texts a round (`peers/one_adapter.py`)
MOST = 300  # seconds of a run


@dataclass(frozen=True)
class Task:
    """A training task. All clients have equally many examples, so that every round is the same work."""

    about: str
    clients: int
    each: int
    cohort: int
    model: str = "tiny"
    lr: float = 5e-3
    noise: float = 0.0
    rounds: int = 5
    batch: int = 8

    def settings(self, rounds: int) -> dict[str, Any]:
        own = {"cohort": self.cohort, "lr": self.lr, "noise": self.noise, "rounds": rounds}
        return own | {"batch": self.batch, "rank": 8, "alpha": 16, "clip": 1.0}


TASKS = {
    "tiny": Task(
        "built-in model and notes, 10 of 100 clients a round, 5 steps of 8 notes each", 100, 40, 10, rounds=10
    ),
    "demo": Task("the same, 250 of 5,000 clients a round, one step of 5 notes each", 5000, 5, 250, batch=5),
    "minilm": Task("MiniLM-L6, 10 of 100 clients a round, 2 steps of 8 texts each", 100, 16, 10, "minilm", 1e-3),
    "private": Task("as the first, private by example: DP-SGD on every client", 100, 40, 10, noise=0.5),
}


@dataclass(frozen=True)
class Way:
    """A script, its interpreter, and its number of processes."""

    script: str
    python: str | Path = sys.executable
    processes: int = 1


@dataclass(frozen=True)
class Run:
    """A run's report: the seconds at which its first round began and every round ended, and its accuracy."""

    ticks: list[float]
    accuracy: float
    trains: int

    @property
    def whole(self) -> float:
        return self.ticks[-1]

    @property
    def rounds(self) -> list[float]:
        return [after - before for before, after in zip(self.ticks, self.ticks[1:], strict=False)]

    @property
    def round(self) -> float:
        return statistics.median(self.rounds[1:] or self.rounds)


def ways(folder: Path, private: bool) -> dict[str, Way]:
    """How to start each way; a peer that cannot be installed is left out with a message."""
    found = {"secure-fed": Way("ours"), "plain loop": Way("loop")} | ({} if private else {FLOOR: Way("one_adapter")})
    for name, peer, processes in () if private else (("Flower", "flower", 1), ("pfl", "pfl", CORES)):
        try:
            found[name] = Way(f"simulated_{peer}", environments.python(peer, folder), processes)
        except (RuntimeError, OSError) as error:
            print(f"{name} is left out: {error}")
    return found


def surroundings(way: Way) -> dict[str, str]:
    """The environment of a way's processes. pfl's processes divide the cores; the others use all cores by themselves."""
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    own |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parent), "TOKENIZERS_PARALLELISM": "false"}
    if way.processes > 1:
        own |= {
            "OMP_NUM_THREADS": "1",
            "PFL_WORKER_ADDRESSES": ",".join(map("127.0.0.1:{}".format, ports(way.processes))),
        }
    return own | {"BENCHMARK_BEGAN": str(time.time())}


def ports(count: int) -> list[int]:
    """`count` free ports."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    numbers = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return numbers


def run(way: Way, work: Path) -> Run:
    """One whole run. Its report is the last line of the (first) process."""
    own = surroundings(way)
    command = [str(way.python), str(HERE / "peers" / f"{way.script}.py"), str(work)]
    places = [work / f"{rank}.log" for rank in range(way.processes)]
    with ExitStack() as files:
        started = [
            subprocess.Popen(
                command,
                env=own | {"PFL_WORKER_RANK": str(rank)},
                stdout=files.enter_context(place.open("w", encoding="utf-8")),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank, place in enumerate(places)
        ]
        codes = ended(started, MOST)
    printed = [place.read_text(encoding="utf-8").strip().splitlines() for place in places]
    if None in codes:
        raise RuntimeError(f"stopped after {MOST} s")
    if any(codes):
        raise RuntimeError("\n".join(next(lines for lines, code in zip(printed, codes, strict=True) if code)[-20:]))
    return Run(**json.loads(next(line for line in reversed(printed[0]) if line.startswith('{"ticks"'))))


def compare(task: Task, place: Path, given: argparse.Namespace) -> dict[str, Run]:
    """Print and return the shortest run of each way."""
    model = environments.minilm(given.peers) if task.model == "minilm" else HERE.parent / TINY
    data = given.data if task.model == "minilm" else None
    rounds = given.rounds or task.rounds
    prepare(place, model, data, task.clients, task.each, task.settings(rounds))
    print(f"\n{task.about}, {rounds} rounds" + (f" ({data.name})" if data else ""))
    print(f"    {'':12}{'start':>8}{'first':>8}{'round':>8}{'whole':>8}{'/ ours':>8}{'accuracy':>10}{'trains':>9}")
    runs: dict[str, list[Run]] = {}
    chosen = ways(given.peers, bool(task.noise))
    for _ in range(given.repeats):
        for name, way in chosen.items():
            try:
                runs.setdefault(name, []).append(run(way, place))
            except RuntimeError as error:
                print(f"{name} failed: {error}")
    best = {name: min(each, key=lambda one: one.whole) for name, each in runs.items() if each}
    for name, one in best.items():
        times = "".join(f"{seconds:8.2f}" for seconds in (one.ticks[0], one.rounds[0], one.round, one.whole))
        against = one.whole / best["secure-fed"].whole
        print(f"    {name:12}{times}{against:8.2f}{one.accuracy:10.3f}{one.trains:9,}", flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="of every run, 5 or 10 if not given")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--peers", type=Path, default=environments.FOLDER)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # then child processes end too
    os.environ["HF_HUB_OFFLINE"] = "1"
    print(machine("torch", "transformers", "peft", "opacus") + "; " + ", ".join(sum(environments.WANTED.values(), ())))
    limits: list[Limit] = []
    for name in given.only:
        with tempfile.TemporaryDirectory() as place:
            best = compare(TASKS[name], Path(place), given)
        for peer, least in LIMITS.items():
            if peer in best and FLOOR in best:
                print(f"    {peer} over one adapter without clients: {best[peer].whole / best[FLOOR].whole:.2f}")
            if peer in best and name != "private":
                gain = best[peer].whole / best["secure-fed"].whole
                limits.append(at_least(f"whole run, {peer} over secure-fed: {name}", gain, least))
    show(limits)


if __name__ == "__main__":
    main()
