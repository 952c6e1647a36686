"""The table of `learns.py` on sizes: a method with another rank, bottleneck or scaling, beside its default sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Run = dict[str, Any]
BestOn = Callable[[Sequence[Run], str, str], float | None]


def sizes(runs: Sequence[Run], best_on: BestOn) -> str:
    """Rows of one method and one setting on one data set, each at the best of its own rates. runs: of 200 steps."""
    lines = [
        "| data | method | setting | rates tried | best | seed 0 | with the default | further seeds | with the default |"
    ]
    lines.append("| --- " * 9 + "|")
    for data, method, setting in sorted({(run["data"], run["method"], run["set"]) for run in runs if run["set"]}):
        own, usual = (
            [run for run in runs if (run["data"], run["method"], run["set"]) == (data, method, name)]
            for name in (setting, "")
        )
        rate = best_on(own, data, method)
        cells = [f"{len({run['rate'] for run in own})}", f"{rate:g}", *_beside(own, usual, data, method, best_on)]
        lines.append(f"| {data} | `{method}` | {setting.replace('method.', '')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _beside(own: Sequence[Run], usual: Sequence[Run], data: str, method: str, best_on: BestOn) -> list[str]:
    """On seed 0, by which both rates were chosen, and the mean over the further seeds that both have."""
    found = [_by_seed(each, best_on(each, data, method)) for each in (own, usual)]
    first = [f"{100 * each[0]:.1f}" for each in found]
    both = sorted(found[0].keys() & found[1].keys() - {0})
    later = (
        [f"{100 * statistics.mean(each[seed] for seed in both):.1f} ({len(both)})" for each in found]
        if both
        else ["", ""]
    )
    return [*first, *later]


def _by_seed(runs: Sequence[Run], rate: float | None) -> dict[int, float]:
    return {run["seed"]: run["accuracy"] for run in runs if run["rate"] == rate}
