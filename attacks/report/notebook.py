"""An audit with a notebook display: its headline, how to read it, and the AUC of every attack that was made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attacks.report.audited import Audit
from attacks.report.headline import headline, reading, untried
from attacks.report.reading import read
from attacks.report.verdict import recorded
from attacks.report.wording import at_least, promised
from secure_fed.report.formatting import number as shown
from secure_fed.report.notebook import table


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
