"""What a person reads on a terminal: names are printed as they are, never as markup."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from secure_fed.report.words import size


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
    table.add_row("rounds", f"{summary['rounds']}, each with {summary['cohort']} of {summary['clients']} clients")
    table.add_row("trained parameters", f"{summary['trainable']:,}")
    table.add_row("sent", f"{size(summary['bytes_up'])} up, {size(summary['bytes_down'])} down")
    table.add_row("privacy", summary["privacy_statement"])
    table.add_row("time", f"{summary['seconds']:.1f} s")
    PlainConsole().print(table)


def show_methods(model: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """The catalogue of methods, counted for one model."""
    name = Column("method", no_wrap=True)
    table = Table(name, "travels", "mean exact", "trainable", "up a round", "paper", title=f"for {model}")
    for row in rows:
        exact, up = "yes" if row["mean_exact"] else "no", size(row["bytes_up"])
        table.add_row(row["name"], row["travels"], exact, f"{row['trainable']:,}", up, row["paper"])
    PlainConsole().print(table)


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"
