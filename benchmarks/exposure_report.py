"""The table and the picture of exposure.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from attacks.extraction.exposure import BY_CHANCE, chance

Run = dict[str, Any]


def named(target: float | None) -> str:
    return "without privacy" if target is None else f"epsilon {target:g}"


def targets(runs: Sequence[Run]) -> list[float | None]:
    """The levels of privacy in order: without privacy first, then from the largest epsilon down."""
    return sorted({run["target"] for run in runs}, key=lambda one: float("-inf") if one is None else -one)


def of(exposures: Sequence[float], repeats: Sequence[int], canaries: int, repeat: int) -> list[float]:
    """The exposures of the canaries that occur `repeat` times at their client."""
    return [one for index, one in enumerate(exposures) if repeats[index // canaries] == repeat]


def deviation(found: Sequence[float]) -> float:
    """The standard deviation over seeds; 0 for one seed."""
    return statistics.stdev(found) if len(found) > 1 else 0.0


def spread(values: Iterable[float], digits: int = 2) -> str:
    found = list(values)
    return f"{statistics.mean(found):.{digits}f} ± {deviation(found):.{digits}f}"


def table(runs: Sequence[Run], repeats: Sequence[int], canaries: int) -> str:
    """Mean exposures in the final model, and their standard deviation over seeds; a row for each level of privacy."""
    kinds = sorted(set(repeats))
    heads = [*(f"planted {one} x" for one in kinds), "all", "p-value", "perplexity"]
    rows = ["| | seeds | " + " | ".join(heads) + " |", "|---|---:|" + "---:|" * len(heads)]
    for target in targets(runs):
        lasts = [run["rounds"][-1] for run in runs if run["target"] == target]
        cells = [
            spread(statistics.mean(of(one["exposures"], repeats, canaries, kind)) for one in lasts) for kind in kinds
        ]
        cells += [spread(statistics.mean(one["exposures"]) for one in lasts)]
        cells += [f"{chance([bits for one in lasts for bits in one['exposures']]):.2g}"]
        cells += [spread((one["perplexity"] for one in lasts), 1)]
        rows.append(f"| {named(target)} | {len(lasts)} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def drawn(runs: Sequence[Run], repeats: Sequence[int], canaries: int) -> Any:
    """The figure: mean exposure by round, and in the final model by client."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (by_round, by_client) = pyplot.subplots(1, 2, figsize=(9.2, 3.4), sharey=True)
    for target in targets(runs):
        some = [run for run in runs if run["target"] == target]
        rounds = [one["round"] for one in some[0]["rounds"]]
        means = [[statistics.mean(one["exposures"]) for one in run["rounds"]] for run in some]
        middle = [statistics.mean(column) for column in zip(*means, strict=True)]
        bars = [deviation(column) for column in zip(*means, strict=True)]
        by_round.errorbar(rounds, middle, bars, label=named(target), marker="o", capsize=3)
        lasts = [run["rounds"][-1]["exposures"] for run in some]
        own = [
            [statistics.mean(last[client * canaries : (client + 1) * canaries]) for last in lasts]
            for client in range(len(repeats))
        ]
        by_client.errorbar(
            range(len(repeats)), list(map(statistics.mean, own)), list(map(deviation, own)), fmt="o", capsize=3
        )
    by_round.set(xlabel="round", ylabel="mean exposure, bits", title="of all canaries")
    by_client.set(xlabel="client (copies of each of its canaries)", title="in the final model")
    by_client.set_xticks(range(len(repeats)), [f"{client + 1} ({one})" for client, one in enumerate(repeats)])
    for panel in (by_round, by_client):
        panel.axhline(BY_CHANCE, color="grey", linestyle="--", linewidth=1)
        panel.grid(alpha=0.3)
    by_round.legend()
    figure.tight_layout()
    return figure
