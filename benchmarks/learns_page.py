"""The tables of `learns.py`: each method's accuracy at its best learning rate beside its peer's, and all rates tried."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from learns_sizes import sizes
from learns_tasks import FORMER, LATER, MEAN, PEERS, SAME, SEARCHED, THIRD, defaults

from secure_fed.methods import METHODS

Run = dict[str, Any]
RateOf = Callable[[Sequence[Run], str], float | None]
BestOn = Callable[[Sequence[Run], str, str], float | None]
CLOSE = 0.02 + 1e-9  # a method at most this far below its peer counts as equally good


@dataclass(frozen=True)
class Reached:
    """The accuracy of a method on a data set.

    seeds: how many further seeds the mean is over; 0 if it is the accuracy on seed 0, by which the rate was chosen.
    former: the rate was constant within a round.
    """

    accuracy: float
    seeds: int
    former: bool

    def __sub__(self, other: Reached) -> float:
        return self.accuracy - other.accuracy

    def __str__(self) -> str:
        return _shown(self.accuracy) + ("" if self.seeds else "*") + ("°" if self.former else "")


_BEFORE = (
    "Accuracy at the best rate. Before: one rate for all, falling linearly. Now: the head's rate by default, and a rate that "
    "falls over the last third of the rounds (the runs marked ° below). 200 steps, seed 0."
)
_ELSEWHERE = (
    "Other implementations of the same methods, trained as the peers are, at one rate that falls linearly: AdapterHub's "
    "(`adapters`, in an environment of its own) with bottlenecks of the same size, and biases trained in a plain loop."
)
_SIZES = (
    "A method with another rank, bottleneck or scaling, each at the best of its own rates, beside the same method with the "
    "default sizes. 200 steps. The rates are chosen on seed 0; further seeds are those that both have."
)
_STEPWISE = {THIRD: "the last third", "stable_decay": "the last fifth"}
_STEPS = (
    "Before, the rate fell between rounds, over the last third of ten rounds of 20 steps, and was constant within a round. "
    "Now it falls at every step, over the last fifth. Both columns have the same seeds, without seed 0, by which the rate was "
    "chosen; 200 steps."
)


def tables(runs: Sequence[Run], rate_of: RateOf, best_on: BestOn) -> str:
    """The tables in Markdown. rate_of: a method's best rate over data sets, by these runs. best_on: its best rate on one."""
    resized = [run for run in runs if run["steps"] == 200 and run["falls"] == "stable_decay"]
    runs = [run for run in runs if not run["set"]]
    one_rate = [run for run in runs if run["head"] == 1]
    parts = [
        f"## Before and now\n\n{_BEFORE}\n\n",
        _heads(runs),
        "\n\n## A rate that falls within a round\n\n",
        _within(runs),
    ]
    parts += [f"\n\n## Other sizes\n\n{_SIZES}\n\n", sizes(resized, best_on)]
    parts += ["\n\n## A constant rate beside one that falls\n\n", _falling(one_rate), "\n"]
    runs = [run for run in runs if (_now(run["falls"]), run["head"]) == defaults(run["method"], run["steps"])]
    for steps in sorted({run["steps"] for run in runs}, reverse=True):
        own = [run for run in runs if run["steps"] == steps]
        datas = [data for data in (*SEARCHED, *LATER) if any(run["data"] == data for run in own)]
        parts += [f"\n## {steps} steps: accuracy beside the peer\n\n", _beside(own, datas, rate_of, best_on)]
        parts += [f"\n\n## {steps} steps: every rate that was tried\n\nPer cent, seed 0.\n"]
        for data in datas:
            of_data = [run for run in own if run["data"] == data]
            usual = f"Always predicting the commonest label: {_shown(of_data[0]['commonest'])}."
            parts += [f"\n### {data}, {steps} steps\n\n{usual}\n\n{_tried(of_data)}\n"]
    return "".join(parts).rstrip("\n")


def _heads(runs: Sequence[Run]) -> str:
    """The best accuracy over rates: with one rate for all that falls linearly, and with the defaults; methods with both."""
    known = [data for data in (*SEARCHED, *LATER) if not data.endswith(MEAN)]  # data sets with earlier runs
    datas = [data for data in known if any(run["data"] == data and run["falls"] == FORMER for run in runs)]
    lines = []
    for method in METHODS:
        ways = ("linear", 1.0), (FORMER, defaults(method, 200)[1])
        cells = [_pair_of(*(_best(runs, data, method, *way) for way in ways)) for data in datas]
        if any(cells):
            lines.append([f"`{method}`", *cells])
    head = ["method", *(f"{data}: before, now" for data in datas)]
    return "\n".join([_line(head), _line(["---"] * len(head)), *map(_line, lines)])


def _best(runs: Sequence[Run], data: str, method: str, falls: str, head: float) -> float | None:
    """The best accuracy over the rates that were tried, with 200 steps, on seed 0."""
    at = (200, falls, head, data, method, 0)
    names = ("steps", "falls", "head", "data", "method", "seed")
    return max((run["accuracy"] for run in runs if tuple(run[name] for name in names) == at), default=None)


def _now(falls: str) -> str:
    """The name of a schedule today: `FORMER` marks earlier runs of "stable_decay", whose rate fell between rounds only."""
    return "stable_decay" if falls == FORMER else falls


def _within(runs: Sequence[Run]) -> str:
    """Runs on the same seeds with a rate that falls between rounds only, and with a rate that falls at every step."""
    names = ("data", "method", "rate", "head", "steps", "seed")
    found = {(run["falls"], *(run[name] for name in names)): run["accuracy"] for run in runs if run["seed"]}
    known = {key[1:]: accuracy for key, accuracy in found.items() if key[0] == FORMER}
    pairs: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for (falls, *rest), accuracy in found.items():
        if falls in _STEPWISE and tuple(rest) in known:
            pairs.setdefault((falls, rest[0], rest[1]), []).append((known[tuple(rest)], accuracy))
    lines = [["falls over", "data", "method", "seeds", "by rounds", "step by step"]]
    for (falls, data, method), own in sorted(pairs.items()):
        means = (_shown(statistics.mean(pair[which] for pair in own)) for which in (0, 1))
        lines.append([_STEPWISE[falls], data, f"`{method}`", str(len(own)), *means])
    said = [_STEPS]
    for falls, share in _STEPWISE.items():
        gains = [
            100 * (after - before) for (which, *_), own in pairs.items() if which == falls for before, after in own
        ]
        spread = 1.96 * statistics.stdev(gains) / math.sqrt(len(gains))
        said.append(f"Over {share}, {len(gains)} pairs of runs: {statistics.mean(gains):+.1f} ± {spread:.1f} points.")
    table = "\n".join([_line(lines[0]), _line(["---"] * 6), *map(_line, lines[1:])])
    return " ".join(said) + f"\n\n{table}"


def _pair_of(one: float | None, other: float | None) -> str:
    return f"{_shown(one)}, {_shown(other)}" if one and other else ""


def _falling(runs: Sequence[Run]) -> str:
    """Accuracies with a constant and with a falling rate, of methods run with both at the same rate and number of steps."""
    found = {(r["data"], r["method"], r["rate"], r["steps"], r["falls"]): r["accuracy"] for r in runs if r["seed"] == 0}
    lines = [["data", "method", "rate", "steps", "constant", "falling"]]
    for data, method, rate, steps, falls in found:
        other = found.get((data, method, rate, steps, "linear"))
        if falls == "constant" and other is not None:
            cells = (_shown(found[data, method, rate, steps, falls]), _shown(other))
            lines.append([data, f"`{method}`" if method in METHODS else method, f"{rate:g}", str(steps), *cells])
    return "\n".join([_line(lines[0]), _line(["---"] * 6), *map(_line, lines[1:])])


def _beside(runs: Sequence[Run], datas: Sequence[str], rate_of: RateOf, best_on: BestOn) -> str:
    """Every method on every data set beside its peer, each at its best rate on that data set."""
    methods = [method for method in METHODS if any(run["method"] == method for run in runs)]
    found = {
        (data, name): _reached(runs, data, name, best_on) for data in datas for name in (*methods, *PEERS.values())
    }
    compared = {
        data: {
            method: own - peer
            for method in methods
            if (own := found[data, method]) and (peer := found[data, PEERS[method]])
        }
        for data in datas
    }
    head = ["method", "rate", "peer", *(f"{data}: method, peer" for data in datas), "more than two points below on"]
    rows = []
    for method in methods:
        cells = [_pair(found[data, method], found[data, PEERS[method]]) for data in datas]
        below = [data for data in datas if compared[data].get(method, 0) < -CLOSE]
        rate = rate_of(runs, method)
        rows.append([f"`{method}`", f"{rate:g}" if rate else "", PEERS[method], *cells, "; ".join(below)])
    near = [
        f"{sum(d >= -CLOSE for d in own.values())} of {len(own)} on {data}" for data, own in compared.items() if own
    ]
    table = "\n".join([_line(head), _line(["---"] * len(head)), *map(_line, rows)])
    return (
        f"Methods within two points of the peer, or above it: {'; '.join(near)}."
        f"\n\n{table}{_elsewhere(runs, datas, best_on)}"
    )


def _elsewhere(runs: Sequence[Run], datas: Sequence[str], best_on: BestOn) -> str:
    """Methods that PEFT lacks: our accuracy beside that of AdapterHub's or a plain loop's implementation, where it was run."""
    lines = []
    for data, (method, other) in itertools.product(datas, SAME.items()):
        own, theirs = (_reached(runs, data, name, best_on) for name in (method, other))
        if own and theirs:
            seeds = f"{own.seeds or 1}, {theirs.seeds or 1}"
            lines.append([data, f"`{method}`", other, f"{own}, {theirs}", seeds])
    if not lines:
        return ""
    head = ["data", "method", "other implementation", "ours, theirs", "seeds"]
    return "\n".join(["\n\n" + _ELSEWHERE, "", _line(head), _line(["---"] * 5), *map(_line, lines)])


def _reached(runs: Sequence[Run], data: str, method: str, best_on: BestOn) -> Reached | None:
    """The mean accuracy over the seeds by which the rate was not chosen; the accuracy on seed 0 if there are no others."""
    rate = best_on(runs, data, method)
    of_rate = [run for run in runs if (run["data"], run["method"], run["rate"]) == (data, method, rate)]
    fresh = [run for run in of_rate if run["seed"]]
    found = [run for run in fresh if run["falls"] != FORMER] or fresh or of_rate
    former = any(run["falls"] == FORMER for run in found)
    accuracies = [run["accuracy"] for run in found]
    return Reached(statistics.mean(accuracies), len(found) if fresh else 0, former) if found else None


def _pair(own: Reached | None, peer: Reached | None) -> str:
    return f"{own or ''}, {peer or 'not run'}" if own else ""


def _tried(runs: Sequence[Run]) -> str:
    rates = sorted({run["rate"] for run in runs})
    head = ["method", *(f"{rate:g}" for rate in rates)]
    rows = []
    for method in dict.fromkeys(run["method"] for run in runs):
        found = {run["rate"]: run["accuracy"] for run in runs if run["method"] == method and run["seed"] == 0}
        rows.append([f"`{method}`" if method in METHODS else method, *(_shown(found.get(rate)) for rate in rates)])
    return "\n".join([_line(head), _line(["---"] * len(head)), *map(_line, rows)])


def _shown(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
