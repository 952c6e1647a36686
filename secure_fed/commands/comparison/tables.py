"""The rows of a comparison as a table for people, and as numbers for programs."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from secure_fed.commands.comparison import cost_notes
from secure_fed.commands.comparison.rows import Row, Spread
from secure_fed.learning.tasks.headline import spoken
from secure_fed.report.formatting import at_most, counted, duration, number, percent, size

NOTHING = "-"


def measured(rows: Sequence[Row]) -> list[str]:
    """The main metrics of the rows' tasks, beside accuracy."""
    return list(dict.fromkeys(name for row in rows for name in row.metrics))


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
        *_in_order(rows, [_percents(row.accuracy), common], [_plain(row.metrics.get(name)) for name in measured(rows)]),
        *(size(count) for count in (row.bytes_up_round, row.bytes_down_round, row.bytes_up, row.bytes_down)),
        _reached(row),
        duration(row.seconds),
        _private(row.epsilon_one_run, row.delta_one_run),
        _private(row.epsilon_all_seeds, row.delta_all_seeds),
        _plain(row.membership_auc),
    ]


def markdown(rows: Sequence[Row]) -> str:
    """A table in Markdown, with an explanation of its numbers below it."""
    named = heads(rows)
    aligned = ["---", "---", *["---:"] * (len(named) - 2)]
    lines = [
        _line(named),
        _line(aligned),
        *(_line([_escaped(cell) for cell in cells(row, rows)]) for row in rows),
    ]
    return "\n".join(["# Comparison", "", *lines, "", *(f"- {note}" for note in notes(rows)), ""])


def notes(rows: Sequence[Row]) -> list[str]:
    """The remarks that explain the numbers."""
    seeds = rows[0].seeds
    named = f"{counted(len(seeds), 'seed')} ({', '.join(map(str, seeds))})"
    spoken = [f"Means over {named}; ± is the sample standard deviation." if len(seeds) > 1 else f"Of one {named[2:]}."]
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
    spoken += cost_notes.after(charges, [row.name for row in rows if row.epsilon_one_run is None])
    spoken += [f"{row.name}: {row.no_better}" for row in rows if row.no_better]
    spoken += [f"{row.name}: no membership figure: {row.no_membership}." for row in rows if row.no_membership]
    spoken += [f"{row.name}: {row.early} of {len(row.seeds)} runs ended early." for row in rows if row.early]
    return spoken


def _in_order(rows: Sequence[Row], accuracy: list[str], own: list[str]) -> list[str]:
    """Accuracy first, unless all rows have a task whose own metric is more informative."""
    return own + accuracy if all(row.own_first for row in rows) else accuracy + own


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
        elif field.name not in ("curve", "charges", "own_first", "no_better", "held_out", "no_membership"):
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


_SPREADS = ("accuracy", "membership_auc")


def _private(epsilon: float | None, delta: float | None) -> str:
    return NOTHING if epsilon is None else f"{at_most(epsilon)} (delta {delta:g})"


def _percents(found: Spread | None) -> str:
    if found is None:
        return NOTHING
    return percent(found.mean) if found.deviation is None else f"{100 * found.mean:.1f} ± {percent(found.deviation)}"


def _plain(found: Spread | None) -> str:
    if found is None:
        return NOTHING
    return number(found.mean) if found.deviation is None else f"{number(found.mean)} ± {number(found.deviation)}"


def _reached(row: Row) -> str:
    if row.target is None:
        return NOTHING
    those = f"{row.reached} of {len(row.seeds)} reached it"
    return those if row.rounds_to_target is None else f"{row.rounds_to_target:g} ({those})"


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _escaped(text: str) -> str:
    """The text with Markdown's special characters escaped."""
    return "".join(f"\\{sign}" if sign in "\\|`*_[]<>#$~" else sign for sign in text)
