"""Does the planner's noise length predict a method's final accuracy? A comparison with the runs of private_notes.jsonl.

    python benchmarks/planner_methods.py [--docs docs]

`secure-fed budget plan --model` prints, for each method, the length of the noise on the final model relative to the longest
distance that its numbers can move. Here it is listed beside the method's final accuracy on the notes, for every stored epsilon,
kind of noise and number of clients. Pairs of cells are counted in two groups: one method under different noise, and different
methods under the same noise. A pair agrees if the shorter noise has the higher accuracy. --docs writes the tables into
private_utility.md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import private_notes
import runs_file
from promises import notes

from privacy.forecast import Possible, Setting, in_turn
from privacy.plan import Target
from secure_fed.rounds.open_settings import reached


class Seen(NamedTuple):
    """A cell: method, epsilon, kind of noise, clients, the count of noised numbers, the noise length, the accuracy."""

    method: str
    epsilon: float
    noise: str
    clients: int
    numbers: int
    length: float
    accuracy: float
    seeds: int


def cells(out: Path) -> Iterator[Seen]:
    """The cells of all methods with one pass a round: others divide a round's noise among passes, uncorrelated."""
    found = runs_file.accuracies(private_notes.Cell, out)
    for name in private_notes.METHODS:
        built = notes(private_notes.config(private_notes.Cell(name, 8.0, "independent", 1.6, 0, 1))).assembly
        if len(built.method.plan(built.initial).passes) > 1:
            continue
        numbers = reached(built.method, built.initial)
        for at in itertools.starmap(
            private_notes.At,
            itertools.product([name], private_notes.EPSILONS, private_notes.NOISES, private_notes.SIZES),
        ):
            if values := private_notes.seeds(found, at, 1):
                yield Seen(*at, numbers, length(at, numbers), statistics.mean(values), len(values))


def length(at: private_notes.At, numbers: int) -> float:
    """The planner's noise length for clients in turn, with noise added by the server."""
    delta = private_notes.delta_of(at.clients)
    setting = Setting(at.clients, at.clients // private_notes.ROUNDS, private_notes.ROUNDS, delta, dim=numbers)
    ways = in_turn(setting, Target(at.epsilon, None, delta, stop_early=True), Possible(momentum=0.5))
    correlation = {"independent": "none", "correlated": "banded"}[at.noise]
    way = next(each for each in ways if (each.noise, each.correlation) == ("central", correlation))
    return way.share(setting) or 0.0


def agreeing(pairs: list[tuple[Seen, Seen]]) -> str:
    """The number of pairs with the higher accuracy at the shorter noise, among pairs of different lengths."""
    judged = [(a, b) for a, b in pairs if a.length != b.length]
    right = sum((a.length < b.length) == (a.accuracy > b.accuracy) for a, b in judged)
    return f"{right} of {len(judged)}"


def table(seen: list[Seen]) -> str:
    lines = [
        "| noise, of the longest way | method | cohort | epsilon | noise | accuracy (seeds) |",
        "|---:|---|---:|---:|---|---:|",
    ]
    for one in sorted(seen, key=lambda one: one.length):
        cohort, accuracy = one.clients // private_notes.ROUNDS, f"{100 * one.accuracy:.1f} ({one.seeds})"
        lines.append(f"| {one.length:.2f} | {one.method} | {cohort:,} | {one.epsilon:g} | {one.noise} | {accuracy} |")
    pairs = list(itertools.combinations(seen, 2))
    same = [(a, b) for a, b in pairs if a.method == b.method]
    beside = [(a, b) for a, b in pairs if (a.epsilon, a.noise, a.clients) == (b.epsilon, b.noise, b.clients)]
    said = (
        f"The shorter noise has the higher accuracy in {agreeing(same)} pairs of cells of one method, and in "
        f"{agreeing(beside)} pairs of methods under the same noise."
    )
    return "\n".join([*lines, "", said])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("private_notes.jsonl"))
    parser.add_argument("--docs", type=Path)
    given = parser.parse_args()
    shown = table(list(cells(given.out)))
    print(shown)
    if given.docs:
        runs_file.fill(given.docs / "private_utility.md", {"planner, methods": shown})


if __name__ == "__main__":
    main()
