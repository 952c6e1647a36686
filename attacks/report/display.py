"""An audit on a terminal of 80 columns (the verdict, then the table of attacks and vantage points), and in a notebook."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from attacks.evidence.attempts import measured
from attacks.evidence.verdict import mark
from attacks.record import Audit, Cell, content
from attacks.report.phrases import MARKS, NAMES, at_least, ends, estimates, promised, sides, units
from attacks.report.sentences import headline, headline_in_capitals, how_to_read, untried
from secure_fed.report.formatting import number as shown
from secure_fed.report.formatting import percent
from secure_fed.report.markup import notebook_table
from secure_fed.report.terminal import PlainConsole


def show(audit: Audit) -> None:
    """Print an audit."""
    console = PlainConsole()
    console.print(f"verdict: {headline_in_capitals(audit)}", style="bold")
    console.print(audit.verdict.text)
    possible = [attack for attack in audit.attacks if not audit.applies_nowhere(attack.name)]
    impossible = [attack.title for attack in audit.attacks if audit.applies_nowhere(attack.name)]
    rows = [(attack.title, [audit.cell(attack.name, at.name) for at in audit.vantages]) for attack in possible]
    if rows:
        vantages = [Column(vantage.title, ratio=3) for vantage in audit.vantages]
        matrix = Table(Column("attack", ratio=4), *vantages, box=SIMPLE_HEAD, expand=True)
        for title, cells in rows:
            matrix.add_row(title, *(_cell(audit, cell) for cell in cells))
        console.print(matrix)
    partly = any(cell is not None and not cell.applicable for _, cells in rows for cell in cells)
    console.print(
        "AUC with its 95 % interval." + (" n/a: not applicable; the report gives the reason." if partly else "")
    )
    if impossible:
        console.print(f"Not applicable in this run (the report gives the reasons): {'; '.join(impossible)}.")
    console.print(" ".join(filter(None, (how_to_read(audit), untried(audit)))))
    console.print(_numbers(audit))


def _cell(audit: Audit, cell: Cell | None) -> str:
    if cell is None:
        return "not tried"
    if not cell.applicable:
        return "n/a"
    word, _ = MARKS[mark(cell, audit)]
    if cell.auc is None:
        own = [f"{name} {value}" for name, value in measured(cell)[:2]] or ["no number"]
        return "\n".join([*own, *([word] if word else [])])
    between = "" if cell.auc_interval is None else f" ({_short(cell.auc_interval[0])}-{_short(cell.auc_interval[1])})"
    return f"{_short(cell.auc)}{between}" + (f"\n{word}" if word else "")


def _short(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")


def _numbers(audit: Audit) -> Table:
    table = Table(show_header=False)
    table.add_row("accuracy", percent(audit.accuracy))
    table.add_row(f"{units(audit)} {', '.join(sides(audit))}", f"{shown(audit.members)}, {shown(audit.non_members)}")
    table.add_row("epsilon accounted", promised(audit))
    for one in estimates(audit):
        table.add_row(f"estimated, {NAMES.get(one.name, one.name)}", at_least(one.epsilon))
    table.add_row("epsilon, lower bound", at_least(audit.lower))
    without = {True: "at chance", False: "NOT AT CHANCE: AUCs are void", None: "not checked"}
    table.add_row(
        "by the texts alone", "dummy units have no texts" if audit.dummies else without[audit.baseline.at_chance]
    )
    return table


class Audited(dict[str, Any]):
    """The content of audit.json, and the audit as `record`. A notebook shows its headline, how to read it, and every AUC."""

    def __init__(self, record: Audit) -> None:
        super().__init__(content(record))
        self.record = record

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The text version that a notebook keeps beside the table: the headline."""
        printer.text(headline(self.record))

    def _repr_html_(self) -> str:
        audit, rows = self.record, []
        for cell in audit.results:
            name = f"AUC of {audit.attack_title(cell.attack)}, {audit.vantage_title(cell.vantage).lower()}"
            rows.append((name, f"{shown(cell.auc)}{ends(cell.auc_interval)}"))
        rows += [("epsilon accounted", promised(audit)), ("epsilon, lower bound", at_least(audit.lower))]
        lead = " ".join(filter(None, (how_to_read(audit), untried(audit))))
        return notebook_table(headline(audit), rows, lead)
