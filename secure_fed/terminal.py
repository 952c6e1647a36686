"""What a person reads on a terminal: names are printed as they are, never as markup."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from secure_fed.report.words import at_most, size

_WIDE = 120


class PlainConsole(Console):
    """Prints names of clients, models and files as they are, and goes on in silence when nobody reads it any more."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(file=sys.stderr if stderr else sys.stdout, markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> None:
        self.quiet = True


def show_result(summary: Mapping[str, Any]) -> None:
    """The result of a run as a table."""
    title = f"{summary['method']}: {summary['model']} on {summary['data']}"
    table = Table(show_header=False, title=title, title_style="bold")
    table.add_row("accuracy", _percent(summary["accuracy"]))
    table.add_row("macro-F1", _percent(summary["macro_f1"]))
    expected = " expected" if _hides_cohort(summary) else ""
    table.add_row(
        "rounds", f"{summary['rounds']}, each with {summary['cohort']} of {summary['clients']} clients{expected}"
    )
    if summary["ended_early"]:
        table.add_row("ended early", str(summary["ended_early"]))
    table.add_row("trained parameters", f"{summary['trainable']:,}")
    table.add_row("sent", f"{size(summary['bytes_up'])} up, {size(summary['bytes_down'])} down{expected}")
    for row in _privacy(summary):
        table.add_row(*row)
    table.add_row("time", f"{summary['seconds']:.1f} s")
    PlainConsole().print(table)


def show_methods(model: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """The catalogue of methods, counted for one model; the papers where there is room for them."""
    console = PlainConsole()
    wide = console.width >= _WIDE
    names = ("travels", "mean exact", "trainable", "up a round", "privacy units", *(("paper",) if wide else ()))
    table = Table(Column("method", no_wrap=True), *names, title=f"for {model}")
    for row in rows:
        exact, up = "yes" if row["mean_exact"] else "no", size(row["bytes_up"])
        counted = (row["name"], row["travels"], exact, f"{row['trainable']:,}", up)
        units = ", ".join(unit for unit in row["units"] if unit != "none") or "none"
        table.add_row(*counted, units, *((row["paper"],) if wide else ()))
    console.print(table)


def _privacy(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What protects whom, in rows that fit a narrow terminal."""
    terms = summary["privacy"]
    if terms is None:
        return [("privacy", str(summary["privacy_statement"]))]
    epsilon, seen = (at_most(summary[name]) for name in ("epsilon", "epsilon_participants"))
    void = [] if terms["private"] else [("NOT PRIVATE", "noise or coins were seeded or injected: what follows is void")]
    return [
        *void,
        ("privacy", f"epsilon {epsilon} at delta {summary['delta']:g}"),
        ("  protects", terms["unit"]),
        ("  against participants", f"epsilon {seen}"),
        ("  noise", f"{terms['noise']}; multiplier {summary['noise_multiplier']:.4g}"),
        ("  releases", f"{summary['releases']:,} of {terms['planned_releases']:,} planned"),
        ("  spent in its ledger", f"epsilon {at_most(summary['epsilon_cumulative'])}{_of_budget(terms)}"),
    ]


def _of_budget(terms: Mapping[str, Any]) -> str:
    return "" if terms["budget_epsilon"] is None else f" of {at_most(terms['budget_epsilon'])}"


def _hides_cohort(summary: Mapping[str, Any]) -> bool:
    """Whether sizes are expected ones: where the noise is on the sum, and no client accounts for itself."""
    return summary["privacy"] is not None and summary["privacy"]["participations"] is None


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"
