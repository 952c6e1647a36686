"""`secure-fed budget`: plans the cost of privacy, and keeps the ledgers that it is charged to.

plan     the guarantee of each way to add noise; noise for a target epsilon, or epsilon for a noise multiplier, and its effect
create   a ledger for a data set
same     a statement that two names of units in a ledger are of one unit
show     the spent budget by run, and the remaining budget
close    the end of a run that made no release, which gives its reservation back
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fed.commands import budget_plan

if TYPE_CHECKING:
    from privacy.ledger import Ledger


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """The actions of `secure-fed budget`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, run: Callable[[argparse.Namespace], None], does: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=does, description=does)
        made.set_defaults(run=run)
        return made

    def on_ledger(name: str, run: Callable[[argparse.Namespace], None], does: str) -> argparse.ArgumentParser:
        made = action(name, run, does)
        made.add_argument("ledger", type=Path, metavar="LEDGER")
        heads = "as privacy.ledger_heads (default: in the user's folder)"
        made.add_argument("--heads", default="", metavar="FILE", help=heads)
        return made

    planning = "the noise that a target epsilon needs, or the epsilon of a given noise"
    budget_plan.add_to(action("plan", budget_plan.run, planning))
    made = on_ledger("create", create, "a new ledger for a data set")
    made.add_argument("--data-set", required=True, metavar="NAME", help="data set whose privacy the ledger tracks")
    made.add_argument("--epsilon", required=True, type=float, help="budget of all runs together")
    made.add_argument("--delta", required=True, type=float, help="delta of all runs together")
    composition = "how runs add up (default: basic)"
    made.add_argument("--composition", choices=("basic", "rdp"), default="basic", help=composition)
    uniting = on_ledger("same", same, "declare that two unit names mean one unit, so that their costs add up")
    named = "privacy.unit_name; the ledger must contain one of the two"
    uniting.add_argument("units", nargs=2, metavar="NAME", help=named)
    showing = on_ledger("show", show, "the spent part of a ledger, the runs that spent it, and the rest")
    showing.add_argument("--json", action="store_true", help="print one JSON object")
    closing = on_ledger("close", close, "close a run that made no release, for good, and give its reservation back")
    closing.add_argument("name", metavar="RUN", help="its name in the ledger, which `secure-fed budget show` prints")


def create(chosen: argparse.Namespace) -> None:
    """Create a ledger and print its path."""
    from privacy.ledger import Ledger

    made = Ledger.create(
        chosen.ledger,
        data_set=chosen.data_set,
        epsilon=chosen.epsilon,
        delta=chosen.delta,
        composition=chosen.composition,
    )
    print(f"{chosen.ledger}: {made.data_set}, epsilon {chosen.epsilon:g}, delta {chosen.delta:g}, {made.composition}")


def same(chosen: argparse.Namespace) -> None:
    """Record in the ledger that two names are of one unit."""
    one, other = chosen.units
    _opened(chosen).declare_same(one, other)
    print(f"{chosen.ledger}: {one} and {other} are one unit, as you say; costs of runs on either add up")


def show(chosen: argparse.Namespace) -> None:
    """Print the state of a ledger, after verifying every row."""
    facts = _facts(_opened(chosen))
    if chosen.json:
        print(json.dumps(facts))
        return
    from secure_fed.report.terminal import PlainConsole, table_of

    console, parts = PlainConsole(), ("epsilon", "delta")
    title = f"data set {facts['data_set']} ({facts['composition']})"
    amounts = ((name, *(_number(facts[name][part]) for part in parts)) for name in ("limit", "spent", "left"))
    console.print(table_of(amounts, "", *parts, title=title, title_style="bold"))
    if not facts["runs"]:
        console.print("no run has reserved anything")
        return
    whose = ["unit"] if len(facts["units"]) > 1 else []
    runs = []
    for run in facts["runs"]:
        cost = ("given back", "") if run["closed"] else [_number(run[part]) for part in parts]
        runs.append((run["run"], *cost, f"{run['releases']:,}", *(run[one] for one in whose), str(run["time"] or "")))
    console.print(table_of(runs, "run", *parts, "releases", *whose, "since"))
    console.print(_RELEASES)
    units = ((unit["name"], unit["kind"], unit["neighbours"], unit["members"][:12]) for unit in facts["units"])
    console.print(table_of(units, "unit", "is", "neighbours", "keyed digest"))
    for statement in facts["same"]:
        one, other = statement["units"]
        console.print(f"declared one unit: {one} and {other} ({statement['time']})", markup=False)


def close(chosen: argparse.Namespace) -> None:
    """Close a run that made no release, and print what is given back."""
    from secure_fed.runs.budget import give_back

    cost = give_back(_opened(chosen), chosen.name)
    if cost is None:
        print(f"{chosen.ledger}: run {chosen.name} was closed before, and its reservation was given back then")
        return
    print(
        f"{chosen.ledger}: run {chosen.name} is closed for good, and epsilon {_number(cost.epsilon)} and delta "
        f"{_number(cost.delta)} are given back"
    )


def _opened(chosen: argparse.Namespace) -> Ledger:
    from privacy.ledger import Ledger
    from secure_fed.runs.budget import heads_at

    return Ledger.open(chosen.ledger, heads=heads_at(chosen.heads))


_RELEASES = (
    "Releases: the noised sums that the run has paid for; where each client pays for its own noised steps or updates, those "
    "of the client with the most."
)


def _facts(ledger: Ledger) -> dict[str, Any]:
    """The state of a ledger. A reserved cost counts as spent: a run may release that much at any time.

    A closed run has made no release; it has the cost that it had reserved, and the time at which it was closed.
    """
    rows = ledger.rows()
    runs: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.kind == "reserve":
            charged = ledger.charged(row.run)
            runs[row.run] = {
                "run": row.run,
                **{part: row.body["cost"][part] for part in ("epsilon", "delta")},
                "releases": max(charged.values(), default=0),  # as `result.json` counts them
                "by": charged,
                "unit": row.body["unit"]["name"],
                "time": runs[row.run]["time"] if row.run in runs else row.body.get("time"),
                "closed": None,
            }
        elif row.kind == "close":
            runs[row.run]["closed"] = row.body["time"]
    spent, limit = ledger.spent(), {"epsilon": ledger.epsilon, "delta": ledger.delta}
    taken = {"epsilon": spent.epsilon, "delta": spent.delta}
    left = {part: None if most is None else max(0.0, most - taken[part]) for part, most in limit.items()}
    return {
        "data_set": ledger.data_set,
        "composition": ledger.composition,
        "limit": limit,
        "spent": taken,
        "left": left,
        "units": [unit.to_dict() for unit, _ in ledger.units.used.values()],
        "same": [{"units": row.body["units"], "time": row.body["time"]} for row in rows if row.kind == "same"],
        "runs": list(runs.values()),
    }


def _number(value: float | None) -> str:
    return "no limit" if value is None else f"{value:.4g}" if math.isfinite(value) else "infinite"
