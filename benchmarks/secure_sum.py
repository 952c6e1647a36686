"""The cost of a masked round in a simulation, without training: with pairwise keys computed once for both clients, and with
clients that share nothing; with all cores; compared with an older checkout; and for growing numbers of clients.

    git worktree add /tmp/before c2198f3
    OMP_NUM_THREADS=1 python benchmarks/secure_sum.py [--before /tmp/before] [--repeats 3] [--large]

A federation whose clients reply at once (`secure_sum_round.py`) runs masked rounds through the engine, each way in its own
process. The ways alternate, and the least of each is printed: CPU seconds of the process, and seconds. Each way has one core,
because two threads on one processor core increase each other's CPU seconds. The way "cores" has all cores and distributes the
clients over processes: its ratio is of seconds, the others' of CPU seconds. X25519 is the least time of all agreements of a
session, one for each pair of keys: it is timed in the same run, and is a lower limit for any simulation of the real protocol.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from timing import machine

HERE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    clients: int
    numbers: int
    kind: str = "passive"
    share: float = 0.05  # of corrupt clients, and of dropped clients

    @property
    def arguments(self) -> list[str]:
        return [str(self.clients), str(self.numbers), self.kind, str(self.share), str(self.share)]


ROUNDS = [Case(250, 25_000), Case(250, 25_000, "active")]
LARGE = [Case(1000, 64), Case(1000, 64, share=0.1), Case(1000, 25_000, share=0.1)]
GROWTH = [Case(clients, 64) for clients in (125, 250, 500)]


@dataclass(frozen=True)
class Way:
    """A checkout, and whether its clients share nothing (`apart`)."""

    name: str
    checkout: Path = HERE
    apart: bool = False
    pinned: bool = True

    def play(self, case: Case, rounds: int) -> dict[str, float]:
        script = HERE / "benchmarks" / "secure_sum_round.py"
        pin = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if self.pinned else []
        done = subprocess.run(
            [*pin, sys.executable, str(script), *case.arguments, str(rounds), *(["apart"] if self.apart else [])],
            env={**os.environ, "PYTHONPATH": str(self.checkout)},
            check=True,
            capture_output=True,
            text=True,
        )
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def agreement() -> float:
    """CPU seconds of one agreement, the least of many."""
    key, public = X25519PrivateKey.generate(), X25519PrivateKey.generate().public_key()
    found = []
    for _ in range(50):
        started = time.process_time()
        for _ in range(40):
            key.exchange(public)
        found.append((time.process_time() - started) / 40)
    return min(found)


def least(ways: list[Way], case: Case, repeats: int) -> dict[str, dict[str, float]]:
    """The least figures by way; ways alternate."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(repeats):
        for way in ways:
            found = way.play(case, 1 if case.clients > 500 else 2)
            best[way.name] = {what: min(value, best.get(way.name, found)[what]) for what, value in found.items()}
    return best


def row(ways: list[Way], case: Case, repeats: int) -> None:
    found = least(ways, case, repeats)
    now = found["now"]
    floor = case.clients * now["k"] * agreement()
    print(f"{case.clients:8,}{case.numbers:9,} {case.kind:8}{now['k']:5.0f}{now['t']:5.0f}{floor:9.2f}", end="")
    print(f"{1e3 * now['cpu'] / case.clients:10.2f}{now['cpu']:9.2f}{now['wall']:9.2f}", end="")
    for way in ways[1:]:
        other = found[way.name]
        what = "cpu" if way.pinned else "wall"  # child processes' CPU time is not counted
        print(f"{other['cpu']:9.2f}{other['wall']:9.2f}{other[what] / now[what]:7.2f}", end="")
    print(flush=True)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--before", type=Path, help="an older checkout to compare with")
    asked.add_argument("--repeats", type=int, default=3)
    asked.add_argument("--large", action="store_true", help="also sessions of 1,000 clients: minutes each")
    chosen = asked.parse_args()
    ways = [Way("now"), Way("apart", apart=True), Way("cores", pinned=False)]
    ways += [Way("before", chosen.before.resolve())] if chosen.before else []
    print(machine("numpy", "cryptography"))
    print(
        f"{'clients':>8}{'numbers':>9} {'kind':8}{'k':>5}{'t':>5}{'X25519':>9}{'ms each':>10}{'CPU s':>9}{'s':>9}",
        end="",
    )
    print("".join(f"{way.name:>9}{'s':>9}{'ratio':>7}" for way in ways[1:]))
    for case in [*ROUNDS, *GROWTH, *(LARGE if chosen.large else [])]:
        row(ways, case, chosen.repeats if case.clients <= 500 else 1)


if __name__ == "__main__":
    main()
