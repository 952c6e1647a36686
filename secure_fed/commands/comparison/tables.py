"""The rows of a comparison for people and programs: table, notes, the cost of all runs in words, numbers, and a drawing."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from secure_fed.commands.comparison.rows import Charge, Difference, Row, Spread, Total, best_only, differences, totals
from secure_fed.config import RunConfig
from secure_fed.learning.tasks.headline import spoken
from secure_fed.report.formatting import at_most, byte_unit, counted, duration, number, percent, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOTHING = "-"
_SPREADS = ("accuracy", "membership_auc")
_NOTES = (
    "Each seed makes its own notes, and nobody has notes in the runs of two seeds: only runs with the same seed add up."
)
_CLIENTS = (
    "Clients that secure-fed draws are other clients with another seed or division. The rows of one lie with many clients of "
    "another, so no epsilon holds against observers of runs of several: name clients in the data (data.client), or compare "
    "with one seed."
)
_DASHES = ("-", "--", "-.", ":")
_SPECIAL = r"[\\|`*_\[\]<>#$~]"  # signs that Markdown reads
_COLOURS = 10  # of matplotlib's cycle
_MOST_MARKERS = 30


def heads(rows: Sequence[Row]) -> list[str]:
    """The names of the columns; `cells` returns a row's texts in the same order."""
    targets = {row.target for row in rows}
    target = f"rounds to {percent(targets.pop())}" if len(targets) == 1 and None not in targets else "rounds to target"
    sent = ["up a round", "down a round", "up", "down"]
    own = [spoken(name) for name in measured(rows)]
    private = ["epsilon of one run", "epsilon of all seeds together"]
    scores = _in_order(rows, ["accuracy", "commonest label"], own)
    return ["configuration", "method", *scores, *sent, target, "time", *private, "membership AUC"]


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """The cells of one row, with a cell for each metric of any row (`measured`)."""
    common = NOTHING if row.commonest is None else percent(row.commonest)
    return [
        row.name,
        row.method,
        *_in_order(
            rows, [_spread(row.accuracy, percent), common], [_spread(row.metrics.get(name)) for name in measured(rows)]
        ),
        *(size(count) for count in (row.bytes_up_round, row.bytes_down_round, row.bytes_up, row.bytes_down)),
        _reached(row),
        duration(row.seconds),
        _private(row.epsilon_one_run, row.delta_one_run),
        _private(row.epsilon_all_seeds, row.delta_all_seeds),
        _spread(row.membership_auc),
    ]


def measured(rows: Sequence[Row]) -> list[str]:
    """The main metrics of the rows' tasks, beside accuracy."""
    return list(dict.fromkeys(name for row in rows for name in row.metrics))


def _in_order(rows: Sequence[Row], accuracy: list[str], own: list[str]) -> list[str]:
    """Accuracy first, unless all rows have a task whose own metric is more informative."""
    return own + accuracy if all(row.own_first for row in rows) else accuracy + own


def _private(epsilon: float | None, delta: float | None) -> str:
    return NOTHING if epsilon is None else f"{at_most(epsilon)} (delta {delta:g})"


def _spread(found: Spread | None, written: Callable[[float], str] = number) -> str:
    if found is None:
        return NOTHING
    return written(found.mean) + ("" if found.deviation is None else f" ± {written(found.deviation)}")


def _reached(row: Row) -> str:
    if row.target is None:
        return NOTHING
    those = f"{row.reached} of {len(row.seeds)} reached it"
    return those if row.rounds_to_target is None else f"{row.rounds_to_target:g} ({those})"


def markdown(rows: Sequence[Row]) -> str:
    """A table in Markdown, with an explanation of its numbers below it."""
    named = heads(rows)
    aligned = ["---", "---", *["---:"] * (len(named) - 2)]
    plain = ([re.sub(_SPECIAL, r"\\\g<0>", cell) for cell in cells(row, rows)] for row in rows)
    lines = [_line(named), _line(aligned), *map(_line, plain)]
    return "\n".join(["# Comparison", "", *lines, "", *(f"- {note}" for note in notes(rows)), ""])


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def notes(rows: Sequence[Row]) -> list[str]:
    """The remarks that explain the numbers."""
    seeds = rows[0].seeds
    named = f"{counted(len(seeds), 'seed')} ({', '.join(map(str, seeds))})"
    spoken = [f"Means over {named}; ± is the sample standard deviation." if len(seeds) > 1 else f"Of one {named[2:]}."]
    spoken += map(_difference, differences(rows))
    spoken.append(
        "Bytes are summed over all clients of a round, or over the whole run; time is the time of the whole run."
    )
    if aims := {row.headline for row in rows if row.target is not None}:
        of = "" if aims == {"accuracy"} else " F1" if aims == {"f1"} else " (F1 of entities and answers, else accuracy)"
        spoken.append(f"Rounds to the target{of}: the mean over the runs that reached it, by evaluated rounds.")
    held_out = {origin for row in rows for origin in row.held_out}
    if held_out and (len(seeds) > 1 or len(held_out) > 1 or not all(row.held_out for row in rows)):
        spoken.append("These accuracies are not all of the same test rows, since runs held theirs out: set data.test.")
    charges = [charge for row in rows for charge in row.charges]
    spoken += cost_notes(charges, [row.name for row in rows if row.epsilon_one_run is None])
    spoken += [f"{row.name}: {row.no_better}" for row in rows if row.no_better]
    spoken += [f"{row.name}: no membership figure: {row.no_membership}." for row in rows if row.no_membership]
    spoken += [f"{row.name}: {row.early} of {len(row.seeds)} runs ended early." for row in rows if row.early]
    return spoken


def _difference(found: Difference) -> str:
    """A difference between two configurations, and whether the seeds show one."""
    scale, unit = (100, " points") if found.metric == "accuracy" else (1, "")
    said = f"{found.name} less {found.other}: {spoken(found.metric)} {scale * found.mean:+.3g}{unit}"
    if found.interval is None:
        return f"{said}, from one seed: more seeds would tell whether that is chance."
    low, high = (f"{scale * end:+.3g}" for end in found.interval)
    shown = "which includes 0: these seeds show no difference" if found.interval[0] <= 0 <= found.interval[1] else ""
    return f"{said} (95 % interval {low} to {high}{', ' if shown else ''}{shown}), paired over {found.seeds} seeds."


def numbers(row: Row) -> dict[str, Any]:
    """The row without its curve and its charges, flat: a spread is two numbers."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if field.name in _SPREADS:
            flat |= _flat(field.name, value)
        elif field.name == "metrics":
            for name, spread in row.metrics.items():
                flat |= _flat(name, spread)
        elif field.name not in ("curve", "scores", "charges", "own_first", "no_better", "held_out", "no_membership"):
            flat[field.name] = list(value) if isinstance(value, tuple) else value
    return flat


def _flat(name: str, found: Spread | None) -> dict[str, float | None]:
    mean, deviation = found or (None, None)
    return {f"{name}_mean": mean, f"{name}_std": deviation}


def as_csv(rows: Sequence[Row]) -> str:
    """One line for each configuration; an unknown number is empty, and spaces separate seeds."""
    written = io.StringIO()
    flat = [{**numbers(row), "seeds": " ".join(map(str, row.seeds))} for row in rows]
    names = dict.fromkeys(name for line in flat for name in line)
    writer = csv.DictWriter(written, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return written.getvalue()


def cost_ahead(configs: Mapping[str, RunConfig], runs_each: int) -> list[str]:
    """The most that all private runs together will cost, as far as the settings state it; empty without privacy."""
    private = {name: config.privacy for name, config in configs.items() if config.privacy.unit != "none"}
    stated = [one for one in private.values() if one.epsilon is not None]
    open_ended = [name for name, one in private.items() if one.epsilon is None]
    lines = []
    if stated:
        epsilon = runs_each * math.fsum(one.epsilon or 0.0 for one in stated)
        delta = runs_each * math.fsum(one.delta for one in stated)
        lines.append(
            f"{counted(runs_each * len(stated), 'private run')} will cost at most epsilon {at_most(epsilon)} (delta "
            f"{delta:g}) together, for a unit in all of them"
        )
    if open_ended:
        lines.append(
            f"{', '.join(open_ended)}: a noise multiplier without privacy.epsilon costs what the result will state, in each of "
            f"{counted(runs_each, 'run')}; set privacy.epsilon to limit it"
        )
    return lines


def cost_notes(charges: Sequence[Charge], unprotected: Sequence[str]) -> list[str]:
    """The remarks on the cost of all private runs together. unprotected: configurations without a guarantee."""
    if not charges:
        return []
    alike: dict[Hashable, list[Total]] = {}
    for total in totals(charges):
        alike.setdefault(total.charges[0].promise, []).append(total)
    lines = [line for found in alike.values() for line in _group(found, len(charges))]
    if len(alike) > 1:
        lines.append(
            "Some of the runs protect other units, or count other neighbours, than others. Their epsilons do not add up, so "
            "none is stated against observers of all runs."
        )
    lines.append(_choice(charges))
    if unprotected:
        lines.append(f"No guarantee limits what the models of {', '.join(unprotected)} reveal.")
    return lines


def _group(found: Sequence[Total], runs: int) -> list[str]:
    """The remarks on totals of one promise, each about other units. runs: the number of private runs in all."""
    worst = max(found, key=lambda total: total.epsilon)
    lines = [_sum(worst, whole=len(worst.charges) == runs)] if len(worst.charges) > 1 else []
    if len(found) > 1:
        seeds = {total.charges[0].seed for total in found}
        notes_of_seeds = len(seeds) == len(found) and all(total.apart == "notes" for total in found)
        lines.append(_NOTES if notes_of_seeds else _CLIENTS)
    price = best_only(worst)
    if price is not None and price[0] < worst.epsilon:
        lines.append(
            f"Publishing only the best of a random number of tries, {len(worst.charges)} on average, would cost epsilon "
            f"{at_most(price[0])} (delta {price[1]:g}). This command publishes every run, so it is not that (docs/privacy.md, "
            '"Choosing among several runs").'
        )
    return lines


def _sum(total: Total, *, whole: bool) -> str:
    runs = counted(len(total.charges), "private run")
    which = f"All {runs}" if whole else f"The {runs} about the same units that cost most"
    added = (
        f", where the sum of epsilons is {at_most(total.epsilon_basic)}" if total.epsilon < total.epsilon_basic else ""
    )
    seen = f"; against observers who also see which clients take part, {at_most(total.epsilon_participants)}"
    seen = seen if total.epsilon_participants > total.epsilon else ", or which clients take part"
    return (
        f"{which} together: epsilon {at_most(total.epsilon)} (delta {total.delta:g}{added}) for {total.unit}, against "
        f"observers who see all their models{seen}. "
        "This holds if configurations and seeds were fixed before the first run; runs added in view of results need a ledger."
    )


def _choice(charges: Sequence[Charge]) -> str:
    if all(charge.public_test for charge in charges):
        return (
            "Choosing a row by its accuracy costs nothing on top: it follows from these models and a public test set."
        )
    return (
        "The accuracies are exact figures of rows that were held out of private ones. No epsilon covers these rows, nor a "
        "choice by their accuracy: set data.test to public rows."
    )


def drawn(rows: Sequence[Row]) -> str:
    """The tasks' headline metric over rounds and over bytes, one line for each configuration, as one self-contained SVG.

    Lines are means over seeds, with a band of one standard deviation to either side. A configuration whose runs did not measure
    the metric has no line. Equal rows give equal bytes. (The only importer of matplotlib in the commands.)
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("svg", fonttype="none", hashsalt="comparison")
        figure = Figure(figsize=(10, 4.4 + 0.22 * len(rows)), layout="constrained")
        by_round, by_bytes = figure.subplots(1, 2, sharey=True)
        unit, name = byte_unit(max((point.bytes for row in rows for point in row.curve), default=0))
        for place, row in enumerate(rows):
            _draw(by_round, place, row, [float(point.round) for point in row.curve])
            _draw(by_bytes, place, row, [point.bytes / unit for point in row.curve])
        by_round.set(xlabel="round", ylabel=" or ".join(dict.fromkeys(spoken(row.headline) for row in rows)))
        by_round.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
        by_bytes.set(xlabel=f"sent up and down by all clients, {name}")
        for axes in (by_round, by_bytes):
            axes.grid(axis="y", alpha=0.4)
            axes.spines[["top", "right"]].set_visible(False)
        _name(figure, by_round, rows)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()


def _draw(axes: Axes, place: int, row: Row, across: Sequence[float]) -> None:
    """One line with its band; drawn even if it has no point, so that every configuration has its place in the legend."""
    style = {"color": f"C{place % _COLOURS}", "linestyle": _DASHES[place // _COLOURS % len(_DASHES)]}
    means = [point.score.mean for point in row.curve]
    axes.plot(across, means, marker="o" if len(means) <= _MOST_MARKERS else "", markersize=3, **style)  # type: ignore[arg-type]
    if any(point.score.deviation is not None for point in row.curve):
        widths = [point.score.deviation or 0.0 for point in row.curve]
        low, high = zip(*((mean - width, mean + width) for mean, width in zip(means, widths, strict=True)), strict=True)
        axes.fill_between(across, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _name(figure: Figure, axes: Axes, rows: Sequence[Row]) -> None:
    """Set the names verbatim: matplotlib leaves out names that begin with "_", and reads "$" as mathematics."""
    legend = figure.legend(axes.lines, [str(place) for place in range(len(rows))], loc="outside lower center", ncols=2)
    for text, row in zip(legend.get_texts(), rows, strict=True):
        text.set_parse_math(False)
        text.set_text(row.name)
