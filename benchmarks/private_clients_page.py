"""The tables of `private_clients.py`: by method and epsilon, by size of federation, by head, by cohort and noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import runs_file
from private_clients_cells import (
    CLIPS,
    EPSILONS,
    HEADS,
    LOCAL,
    METHODS,
    OPEN,
    ROUNDS,
    SEARCHED,
    SIZES,
    STEEP,
    WAYS,
    Cell,
)
from private_silos_page import named, paired, shown, table

Found = Mapping[Cell, float]


def page(out: Path) -> str:
    common, found = runs_file.lines(out)[0]["commonest"], runs_file.accuracies(Cell, out)
    parts = {
        "By epsilon": _by_epsilon(found),
        "By size": _by_size(found),
        "By head": _by_head(found),
        "By cohort and noise": _by_way(found),
        "By local steps": _by_steps(found),
        "The search, on other texts": _search(found),
    }
    shown = "".join(f"\n### {title}\n\n{rows}\n" for title, rows in parts.items() if rows.count("\n") > 1)
    return f"\nThe commonest label has {100 * common:.1f} % of the test texts.\n{shown}"


def _seeds(
    found: Found, size: str, head: str, way: str, method: str, epsilon: float, steps: int = 1
) -> dict[int, float]:
    """The accuracies by seed, at the clip norm found by the search."""
    tried = {0.0: 0.0} if way == OPEN else _tried(found, head, method)
    best = max(tried, key=lambda clip: tried[clip], default=None)
    return {
        cell.seed: value
        for cell, value in found.items()
        if cell[:6] == (size, head, way, method, epsilon, best) and cell[6] >= 0 and cell[7:] == (1, STEEP)
    }


def _tried(found: Found, head: str, method: str) -> dict[float, float]:
    """The search's accuracy by clip norm."""
    tried = {clip: found.get(Cell("small", head, "schedule", method, SEARCHED, clip, -1)) for clip in CLIPS[head]}
    return {clip: value for clip, value in tried.items() if value is not None}


def _by_epsilon(found: Found) -> str:
    def of(method: str, epsilon: float) -> dict[int, float]:
        return _seeds(found, "small", "trained", "schedule", method, epsilon)

    lines = [["method", *(f"epsilon {epsilon:g}" for epsilon in EPSILONS), "8 less inf", "over the head at 8", "at 1"]]
    for method in METHODS:
        by_epsilon = [of(method, epsilon) for epsilon in EPSILONS]
        if any(by_epsilon):
            over = ["" if method == "head alone" else paired(of(method, e), of("head alone", e)) for e in (8.0, 1.0)]
            lost = paired(of(method, 8.0), of(method, math.inf))
            lines.append([named(method), *(shown(each.values()) for each in by_epsilon), lost, *over])
    return table(lines)


def _by_size(found: Found) -> str:
    sizes = {size: f"{size}: {clients // ROUNDS:,} of {clients:,}" for size, (clients, _) in SIZES.items()}
    kinds = list(itertools.product(sizes, (math.inf, 8.0, 1.0)))
    kinds = [(size, e) for size, e in kinds if any((c.size, c.epsilon) == (size, e) and c.seed >= 0 for c in found)]
    lines = [["method", *(f"{sizes[size]}, epsilon {epsilon:g}" for size, epsilon in kinds)]]
    for method in METHODS:
        own = [_seeds(found, size, "trained", "schedule", method, epsilon) for size, epsilon in kinds]
        if any(own):
            lines.append([named(method), *(shown(one.values()) for one in own)])
    return table(lines)


def _kinds(kinds: Sequence[str], runs_of: Callable[[str, str, float], dict[int, float]]) -> str:
    """A column for each kind at epsilon 8 and 1; rows are the methods that ran with more than the first kind."""
    lines = [["method", *(f"epsilon {epsilon:g}, {kind}" for epsilon in (8.0, 1.0) for kind in kinds)]]
    for method in METHODS:
        own = [[runs_of(method, kind, epsilon) for kind in kinds] for epsilon in (8.0, 1.0)]
        if any(any(one[1:]) for one in own):
            lines.append([named(method), *(shown(one.values()) for one in itertools.chain(*own))])
    return table(lines)


def _by_head(found: Found) -> str:
    return _kinds(HEADS, lambda method, head, e: _seeds(found, "small", head, "schedule", method, e))


def _by_way(found: Found) -> str:
    return _kinds(list(WAYS), lambda method, way, e: _seeds(found, "small", "trained", way, method, e))


def _by_steps(found: Found) -> str:
    """The small federation at epsilon 8, public order and independent noise: one local step and three, each at the clip norm
    and the rate that are best in the search; with the accuracy there, and over seeds.
    """
    counts = sorted({steps for steps, _ in LOCAL})
    heads = [(f"{n} step{'s' * (n > 1)}: rate, clip norm", "in the search", "over seeds") for n in counts]
    lines = [["method", *itertools.chain(*heads), "several less one"]]
    for method in METHODS:
        chosen = [_searched(found, method, count) for count in counts]
        if all(cell is not None for cell in chosen):
            seeds = [_at(found, cell) for cell in chosen if cell is not None]
            cells = [
                (f"{cell.rate:g}, {cell.clip:g}", shown([found[cell]]), shown(each.values()))
                for cell, each in zip(chosen, seeds, strict=True)
                if cell is not None
            ]
            lines.append([named(method), *itertools.chain(*cells), paired(seeds[-1], seeds[0])])
    return table(lines)


def _searched(found: Found, method: str, steps: int) -> Cell | None:
    """The best cell of the search over clip norms and rates with that many local steps; None unless all of them ran."""
    usual = Cell("small", "trained", "schedule", method, SEARCHED, 0.0, -1, steps)
    rates = [rate for count, rate in LOCAL if count == steps]
    tried = [usual._replace(clip=clip, rate=rate) for clip, rate in itertools.product(CLIPS["trained"], rates)]
    return max(tried, key=lambda cell: found[cell]) if all(cell in found for cell in tried) else None


def _at(found: Found, cell: Cell) -> dict[int, float]:
    """The accuracies by seed with the settings of that cell."""
    return {one.seed: value for one, value in found.items() if one.seed >= 0 and one._replace(seed=-1) == cell}


def _search(found: Found) -> str:
    kinds = [(head, clip) for head in HEADS for clip in CLIPS[head]]
    lines = [["method", *(f"{head}, {clip:g}" for head, clip in kinds)]]
    for method in METHODS:
        own = [_tried(found, head, method).get(clip) for head, clip in kinds]
        if any(own):
            lines.append([named(method), *(shown([] if one is None else [one]) for one in own)])
    return table(lines)
