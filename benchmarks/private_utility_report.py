"""What `private_utility.py` found, as Markdown tables and a plot.

python benchmarks/private_utility_report.py runs.jsonl [--docs docs]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

EPSILONS = (math.inf, 8.0, 3.0, 1.0)
ABLATIONS = ("FRA truncated, lr 1", "FRA shrunk, lr 1", "FRA as it is")
PAIRS = (
    ("FRA shrunk", "FRA truncated"),
    ("FRA shrunk", "FRA as it is"),
    ("FRA shrunk, lr 1", "FRA truncated, lr 1"),
    ("FFA", "FRA shrunk"),
    ("FedLoRA", "FFA"),
)
ORDER = ("FedLoRA", "FFA", "FRA truncated", "FRA shrunk", *ABLATIONS)
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def figures(runs: Iterable[dict[str, Any]], data: str, label: str, epsilon: float, field: str) -> dict[int, float]:
    """One figure of a method, by seed. Without noise all that denoising could be told apart by is gone: FRA is one."""
    same = "FRA shrunk" if math.isinf(epsilon) and label in ("FRA truncated", "FRA shrunk") else label
    wanted = (data, same, str(epsilon))
    return {
        one["seed"]: one[field]
        for one in runs
        if (one["data"], one["label"], one["epsilon"]) == wanted and field in one
    }


def labels(runs: Iterable[dict[str, Any]]) -> list[str]:
    found = {one["label"] for one in runs}
    return [label for label in ORDER if label in found]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, in per cent."""
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f}{deviation}" if values else ""


def table(first: str, found: dict[str, list[str]]) -> list[str]:
    head = [f"| {first} | " + " | ".join(f"epsilon {epsilon:g}" for epsilon in EPSILONS) + " |", "|---|" + "---:|" * 4]
    return head + [f"| {name} | " + " | ".join(cells) + " |" for name, cells in found.items()]


def report(runs: list[dict[str, Any]]) -> str:
    """The tables of every data set in Markdown."""
    lines = []
    for data in dict.fromkeys(one["data"] for one in runs):

        def row(label: str, field: str = "accuracy", data: str = data) -> list[dict[int, float]]:
            return [figures(runs, data, label, epsilon, field) for epsilon in EPSILONS]

        accuracy = {label: [spread(list(cell.values())) for cell in row(label)] for label in labels(runs)}
        gains = {
            f"{better} minus {other}": [
                spread([kept[seed] - cell[seed] for seed in cell if seed in kept]) if epsilon < math.inf else ""
                for epsilon, kept, cell in zip(EPSILONS, row(better), row(other), strict=True)
            ]
            for better, other in PAIRS
        }
        known = {
            "noise multiplier": ("FRA shrunk", "noise_multiplier"),
            "FRA shrunk: directions of a mean above the noise": ("FRA shrunk", "survive"),
            "FRA shrunk: greatest singular value / largest of noise": ("FRA shrunk", "over_edge"),
            "FRA shrunk, lr 1: the same": ("FRA shrunk, lr 1", "over_edge"),
        }
        of_noise = {
            name: [f"{statistics.mean(cell.values()):.2f}" if cell else "" for cell in row(*what)]
            for name, what in known.items()
        }
        seeds = len({one["seed"] for one in runs if one["data"] == data})
        before = next(one["before"] for one in runs if one["data"] == data)
        lines += [f"### {data}: test accuracy in per cent, mean and standard deviation over {seeds} seeds", ""]
        lines += [f"Before training: {100 * before:.1f}.", ""]
        lines += [*table("method", accuracy), "", *table("paired by seed", gains), "", *table("noise", of_noise), ""]
    return "\n".join(lines)


def plot(runs: list[dict[str, Any]], place: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "private_utility"
    from matplotlib import pyplot

    names = list(dict.fromkeys(one["data"] for one in runs))
    figure, axes = pyplot.subplots(1, len(names), figsize=(5.2 * len(names), 4), squeeze=False)
    for axis, data in zip(axes[0], names, strict=True):
        for index, label in enumerate(label for label in labels(runs) if label not in ABLATIONS):
            cells = [list(figures(runs, data, label, epsilon, "accuracy").values()) for epsilon in EPSILONS]
            for at, name in (
                ([0], label),
                ([k for k in range(1, len(cells)) if cells[k]], ""),
            ):  # no line from inf to 8
                means = [100 * statistics.mean(cells[k] or [math.nan]) for k in at]
                errors = [100 * statistics.stdev(cells[k]) if len(cells[k]) > 1 else 0 for k in at]
                places = [k + 0.05 * (index - 2) for k in at]
                axis.errorbar(places, means, errors, marker="o", capsize=3, color=f"C{index}", label=name)
        axis.set(title=data, xlabel="epsilon (delta 1e-5, client level)", ylabel="test accuracy, %")
        axis.set_xticks(range(len(EPSILONS)), ["inf", "8", "3", "1"])
        axis.grid(alpha=0.3)
    axes[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(place, metadata={"Date": None})


def present(runs: list[dict[str, Any]], docs: Path | None) -> None:
    """Print the tables; with `docs` also write them into private_utility.md there, between its marks, and draw the plot."""
    tables = report(runs)
    print(tables)
    if docs is None:
        return
    plot(runs, docs / "private_utility.svg")
    page = docs / "private_utility.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN) if page.exists() else ("", "", END)
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--docs", type=Path)
    given = parser.parse_args()
    present([json.loads(line) for line in given.runs.read_text(encoding="utf-8").splitlines()], given.docs)


if __name__ == "__main__":
    main()
