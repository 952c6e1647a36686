"""What a masked round costs a simulation, training apart: against an older checkout, and as clients grow in number.

    git worktree add /tmp/before c2198f3
    OMP_NUM_THREADS=1 python benchmarks/secure_sum.py [--before /tmp/before] [--repeats 3] [--large]

A federation whose clients answer at once (`secure_sum_round.py`) plays masked rounds through the engine, in a process of its
own for each checkout. The checkouts take turns, and the least of each is printed: CPU seconds of the process, all threads
together, and seconds. X25519 is what all agreements of a session take at least, once for each pair of keys: it is timed in the
same run, and no simulation that plays the real protocol goes below it.
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
    share: float = 0.05  # of the clients that may be corrupt, and that may vanish

    @property
    def arguments(self) -> list[str]:
        return [str(self.clients), str(self.numbers), self.kind, str(self.share), str(self.share)]


ROUNDS = [Case(250, 25_000), Case(250, 25_000, "active")]
LARGE = [Case(1000, 8), Case(1000, 8, share=0.1), Case(1000, 25_000, share=0.1)]
GROWTH = [Case(clients, 8) for clients in (125, 250, 500)]


def played(checkout: Path, case: Case, rounds: int) -> dict[str, float]:
    script = HERE / "benchmarks" / "secure_sum_round.py"
    done = subprocess.run(
        [sys.executable, str(script), *case.arguments, str(rounds)],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def agreement() -> float:
    """CPU seconds of one, the least of many."""
    key, public = X25519PrivateKey.generate(), X25519PrivateKey.generate().public_key()
    found = []
    for _ in range(50):
        started = time.process_time()
        for _ in range(40):
            key.exchange(public)
        found.append((time.process_time() - started) / 40)
    return min(found)


def least(checkouts: dict[str, Path], case: Case, repeats: int, rounds: int) -> dict[str, dict[str, float]]:
    """By checkout; they take turns."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(repeats):
        for name, checkout in checkouts.items():
            found = played(checkout, case, rounds)
            best[name] = {what: min(value, best.get(name, found)[what]) for what, value in found.items()}
    return best


def row(checkouts: dict[str, Path], case: Case, repeats: int) -> None:
    found = least(checkouts, case, repeats, 1 if case.clients > 500 else 2)
    now = found["now"]
    pairs = case.clients * now["k"] / 2
    floor = 2 * pairs * agreement()
    print(f"{case.clients:8,}{case.numbers:9,} {case.kind:8}{now['k']:5.0f}{now['t']:5.0f}{floor:9.2f}", end="")
    print(f"{now['cpu']:9.2f}{now['wall']:9.2f}{1e3 * now['cpu'] / case.clients:12.2f}", end="")
    if "before" in found:
        before = found["before"]
        print(f"{before['cpu']:9.2f}{before['wall']:9.2f}{before['cpu'] / now['cpu']:8.2f}", end="")
        print(f"{before['wall'] / now['wall']:8.2f}", end="")
    print(flush=True)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--before", type=Path, help="an older checkout to compare with")
    asked.add_argument("--repeats", type=int, default=3)
    asked.add_argument("--large", action="store_true", help="also sessions of 1,000 clients: minutes each")
    chosen = asked.parse_args()
    checkouts = {"now": HERE} | ({"before": chosen.before.resolve()} if chosen.before else {})
    print(machine("numpy", "cryptography"))
    print(f"{'clients':>8}{'numbers':>9} {'kind':8}{'k':>5}{'t':>5}{'X25519 s':>9}{'CPU s':>9}{'s':>9}", end="")
    print(f"{'ms/client':>12}" + (f"{'before':>9}{'before s':>9}{'CPU x':>8}{'s x':>8}" if chosen.before else ""))
    for case in [*ROUNDS, *GROWTH, *(LARGE if chosen.large else [])]:
        row(checkouts, case, chosen.repeats if case.clients <= 500 else 1)


if __name__ == "__main__":
    main()
