"""What a person reads on a terminal: names are printed as they are, never as markup."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from secure_fed.report.words import size

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
    table.add_row("rounds", f"{summary['rounds']}, each with {summary['cohort']} of {summary['clients']} clients")
    table.add_row("trained parameters", f"{summary['trainable']:,}")
    table.add_row("sent", f"{size(summary['bytes_up'])} up, {size(summary['bytes_down'])} down")
    table.add_row("privacy", summary["privacy_statement"])
    table.add_row("time", f"{summary['seconds']:.1f} s")
    PlainConsole().print(table)


def show_methods(model: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """The catalogue of methods, counted for one model; the papers where there is room for them."""
    console = PlainConsole()
    wide = console.width >= _WIDE
    names = ("travels", "mean exact", "trainable", "up a round", *(("paper",) if wide else ()))
    table = Table(Column("method", no_wrap=True), *names, title=f"for {model}")
    for row in rows:
        exact, up = "yes" if row["mean_exact"] else "no", size(row["bytes_up"])
        counted = (row["name"], row["travels"], exact, f"{row['trainable']:,}", up)
        table.add_row(*counted, *((row["paper"],) if wide else ()))
    console.print(table)


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"
