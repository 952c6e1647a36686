"""`secure-fed budget`: plans the cost of privacy, and keeps the ledgers that it is charged to.

plan     the guarantee of each way to add noise; noise for a target epsilon, or epsilon for a noise multiplier, and its effect
create   a ledger for a data set
same     a statement that two names of units in a ledger are of one unit
show     the spent budget by run, and the remaining budget
close    the end of a run that made no release, which gives its reservation back
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from secure_fed.commands import ledgers as ledger_commands
from secure_fed.commands import plan


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """The actions of `secure-fed budget`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, run: Callable[[argparse.Namespace], None], does: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=does, description=does)
        made.set_defaults(run=run)
        return made

    plan.add_to(action("plan", plan.run, "the noise that a target epsilon needs, or the epsilon of a given noise"))
    made = action("create", ledger_commands.create, "a new ledger for a data set")
    _add_ledger(made)
    made.add_argument("--data-set", required=True, metavar="NAME", help="data set whose privacy the ledger tracks")
    made.add_argument("--epsilon", required=True, type=float, help="budget of all runs together")
    made.add_argument("--delta", required=True, type=float, help="delta of all runs together")
    made.add_argument(
        "--composition", choices=("basic", "rdp"), default="basic", help="how runs add up (default: basic)"
    )
    same = action("same", ledger_commands.same, "declare that two unit names mean one unit, so that their costs add up")
    _add_ledger(same)
    same.add_argument(
        "units", nargs=2, metavar="NAME", help="privacy.unit_name; the ledger must contain one of the two"
    )
    shown = action("show", ledger_commands.show, "the spent part of a ledger, the runs that spent it, and the rest")
    _add_ledger(shown)
    shown.add_argument("--json", action="store_true", help="print one JSON object")
    closing = "close a run that made no release, for good, and give its reservation back"
    closed = action("close", ledger_commands.close, closing)
    _add_ledger(closed)
    closed.add_argument("name", metavar="RUN", help="its name in the ledger, which `secure-fed budget show` prints")


def _add_ledger(made: argparse.ArgumentParser) -> None:
    made.add_argument("ledger", type=Path, metavar="LEDGER")
    made.add_argument(
        "--heads", default="", metavar="FILE", help="as privacy.ledger_heads (default: in the user's folder)"
    )
