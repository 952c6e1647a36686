"""An audit printed for a terminal of 80 columns: the verdict, then the table of attacks and vantage points."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from attacks.report import significance
from attacks.report.audited import Audit, Cell, read
from attacks.report.verdict import able, headline, in_short, reading, recorded, tried_by_name, uncovered, untried
from attacks.report.wording import NAMES, at_least, estimates, measured, promised, sides, units
from secure_fed.report.formatting import number as shown
from secure_fed.report.formatting import percent
from secure_fed.report.notebook import table
from secure_fed.report.terminal import PlainConsole

_MARKS = {
    "leak": "LEAK",
    "within": "as guaranteed",
    "beyond": "MORE THAN ALLOWED",
    "part": "in part",
    "sign": "weak sign",
    "inverted": "below .5",
    "chance": "",
    "none": "",
}
_LEVELS = {
    "leak": "LEAK, {}",
    "within": "within the guarantee",
    "none_found": "nothing found",
    "violation": "GUARANTEE CONTRADICTED",
    "unsupported": "cannot tell",
    "texts": "LEAK (texts)",
    "part": "nothing of membership found; part of the texts read back",
}


def show(audit: Mapping[str, Any]) -> None:
    """Print a parsed audit.json."""
    parsed = read(audit)
    level, text, _ = recorded(audit)
    console = PlainConsole()
    made = f"{tried_by_name(parsed)}: " if tried_by_name(parsed) else ""
    found = in_short(parsed, level)
    by = able(parsed) if found == "none_found" else ""
    console.print(f"verdict: {made}{_LEVELS[found].format(uncovered(parsed))}{by}", style="bold")
    console.print(text)
    possible, impossible, partly = _applicable(parsed)
    if possible:
        console.print(_matrix(parsed, possible))
    console.print(
        "AUC with its 95 % interval." + (" n/a: not applicable; the report gives the reason." if partly else "")
    )
    if impossible:
        console.print(f"Not applicable in this run (the report gives the reasons): {'; '.join(impossible)}.")
    console.print(" ".join(filter(None, (reading(parsed), untried(parsed)))))
    console.print(_numbers(parsed))


def _applicable(audit: Audit) -> tuple[list[str], list[str], bool]:
    """The names of the attacks with a row, the titles of those that apply nowhere, and whether some cell of a row does not."""
    possible, impossible, partly = [], [], False
    for attack in audit.attacks:
        cells = [audit.cell(attack.name, at.name) for at in audit.vantages]
        nowhere = [cell is not None and not cell.applicable for cell in cells]
        if all(nowhere):
            impossible.append(attack.title)
        else:
            possible.append(attack.name)
            partly |= any(nowhere)
    return possible, impossible, partly


def _matrix(audit: Audit, names: Collection[str]) -> Table:
    vantages = [Column(vantage.title, ratio=3) for vantage in audit.vantages]
    table = Table(Column("attack", ratio=4), *vantages, box=SIMPLE_HEAD, expand=True)
    for attack in (one for one in audit.attacks if one.name in names):
        table.add_row(attack.title, *(_cell(audit, audit.cell(attack.name, at.name)) for at in audit.vantages))
    return table


def _cell(audit: Audit, cell: Cell | None) -> str:
    if cell is None:
        return "not tried"
    if not cell.applicable:
        return "n/a"
    mark = _MARKS[significance.mark(cell, audit)]
    if cell.auc is None:
        own = [f"{name} {value}" for name, value in measured(cell)[:2]] or ["no number"]
        return "\n".join([*own, *([mark] if mark else [])])
    between = "" if cell.interval is None else f" ({_short(cell.interval[0])}-{_short(cell.interval[1])})"
    return f"{_short(cell.auc)}{between}" + (f"\n{mark}" if mark else "")


def _numbers(audit: Audit) -> Table:
    table = Table(show_header=False)
    table.add_row("accuracy", percent(audit.accuracy))
    table.add_row(f"{units(audit)} {', '.join(sides(audit))}", f"{shown(audit.members)}, {shown(audit.non_members)}")
    table.add_row("epsilon accounted", promised(audit))
    for one in estimates(audit):
        table.add_row(f"estimated, {NAMES.get(one.name, one.name)}", at_least(one.epsilon))
    table.add_row("epsilon, lower bound", at_least(next((cell.lower for cell in audit.bounded), None)))
    without = {True: "at chance", False: "NOT AT CHANCE: AUCs are void", None: "not checked"}
    table.add_row(
        "by the texts alone", "phantoms have no texts" if audit.phantoms else without[audit.baseline.at_chance]
    )
    return table


def _short(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")


# from attacks.report.display
# An audit with a notebook display: its headline, how to read it, and the AUC of every attack that was made.


class Audited(dict[str, Any]):
    """The content of `audit.json`."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The text version that a notebook keeps beside the table: the headline."""
        printer.text(headline(read(self), recorded(self)[0]))

    def _repr_html_(self) -> str:
        audit = read(self)
        lead = " ".join(filter(None, (reading(audit), untried(audit))))
        return table(headline(audit, recorded(self)[0]), _rows(audit), lead)


def _rows(audit: Audit) -> Iterator[tuple[str, str]]:
    for cell in audit.results:
        between = "" if cell.interval is None else f" ({shown(cell.interval[0])} to {shown(cell.interval[1])})"
        name = f"AUC of {audit.attack_title(cell.attack)}, {audit.vantage_title(cell.vantage).lower()}"
        yield name, f"{shown(cell.auc)}{between}"
    yield "epsilon accounted", promised(audit)
    yield "epsilon, lower bound", at_least(next((cell.lower for cell in audit.bounded), None))
