"""Tables on a terminal. Names are printed as they are, never as markup."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from privacy.statement import OBSERVERS
from secure_fed.learning.tasks.headline import Commonest, leads
from secure_fed.report.for_the_record import releases
from secure_fed.report.formatting import at_most, percent, size, time
from secure_fed.report.guarantee import most_auc, two_units
from secure_fed.report.measured import (
    FOR_THE_OWNER,
    allowed,
    auc,
    dummy_nouns,
    meaning,
    measured_model,
    of_dummies,
    of_rows,
    rates,
)
from secure_fed.runs import guarantee

_ROOM = {"sent": 100, "paper": 120}  # the width of a terminal from which on these columns are shown
NARROW: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}  # of a table
FACTS: dict[str, Any] = {"show_header": False, "title_style": "bold"}  # of a table of names and their values
_ANY = "any"
_UNITS = 3  # client, example, person
_NUMBERS = ("trainable", "up a\nround", "lr", "of head")
_RIGHT: dict[str, Any] = {"justify": "right", "no_wrap": True}
_EXPLAINED = {
    "sent": "the changes of these tensors; from clients to the server if nothing else is said",
    "exact": "yes if the mean of the updates is the update of the mean model",
    "lr": "the learning rate in this model where training.lr is not set",
    "of head": "the learning rate of the head's last layer; in private runs it equals lr",
    "protects": "the units that differential privacy can protect; any: client, example and person",
}
_VOID = ("NOT PRIVATE", "noise or secret choices were seeded or injected: the guarantee below is void")
_SUMS = {
    "nowhere": "without noise",
    "sum": "before it adds noise",
    "shares": "with the clients' noise",
    "contribution": "with the clients' noise",
    "gradients": "made by noised training",
}


class PlainConsole(Console):
    """A console that prints names as they are, and stops printing when its reader has closed the pipe."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(file=sys.stderr if stderr else sys.stdout, markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> None:
        self.quiet = True


def table_of(rows: Iterable[Iterable[str]], *columns: Column | str, **look: Any) -> Table:
    """A table with these rows. look: as of `Table`."""
    table = Table(*columns, **look)
    for row in rows:
        table.add_row(*row)
    return table


def show_result(summary: Mapping[str, Any]) -> None:
    """The result of a run as a table."""
    PlainConsole().print(table_of(rows(summary), title=title(summary), **FACTS))


def title(summary: Mapping[str, Any]) -> str:
    """The method, the model and the data of a run."""
    return f"{summary['method']}: {summary['model']} on {summary['data']}"


def rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The names and values of a run's result, in the order in which they are read."""
    own = [(name, value) for name, value in summary["metrics"].items() if isinstance(value, float)]
    expected, best = " expected" if _hides_cohort(summary) else "", summary.get("best_round")
    return [
        *_measured(summary, [(name.replace("_", " "), f"{value:.4g}") for name, value in own]),
        *_membership(summary),
        ("rounds", f"{summary['rounds']}, each with {_those_in(summary, expected)}"),
        *(
            [("best evaluation", f"round {best}; the model kept is that of the end")]
            if best not in (None, summary["rounds"])
            else []
        ),
        *([("ended early", str(summary["ended_early"]))] if summary["ended_early"] else []),
        ("trained parameters", f"{summary['trainable']:,}"),
        ("sent", f"{size(summary['bytes_up'])} up, {size(summary['bytes_down'])} down{expected}"),
        *_privacy(summary),
        *_masks(summary),
        *([("time", f"{summary['seconds']:.1f} s")] if summary["seconds"] is not None else []),
    ]


def _measured(summary: Mapping[str, Any], own: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The metrics, with accuracy first unless a task's own metrics say more, and beside it the share of the commonest label."""
    accuracy, common = summary["accuracy"], Commonest.of_result(summary)
    rows = []
    if accuracy is not None or not summary["metrics"]:
        beside = f"; share of the commonest label: {_percent(common.share)}" if common and accuracy is not None else ""
        rows = [("accuracy", _percent(accuracy) + beside)]
    rows += [("macro-F1", _percent(summary["macro_f1"]))] if summary["macro_f1"] is not None else []
    rows = own + rows if leads(summary["task"]) else rows + own
    if summary["personal"] and rows:
        rows.append(("  measured", measured_model(True, summary["unit"])))
    if found := summary.get("noise_alone"):
        rows.append(("  noise alone", guarantee.noise_in_short(found, summary["loss"])))
        rows += [("  HOPELESS", guarantee.hopeless_noise(found))] if found["hopeless"] else []
    return rows + ([("  no learning", why)] if (why := summary.get("no_learning")) else [])


def show_methods(
    model: str, classes: int | None, rows: Sequence[Mapping[str, Any]], task: str = "classification"
) -> None:
    """The catalogue of methods with sizes for one model and task; tensors and papers where there is room.

    The columns of the head's rate and of the protected units are left out if they say the same of every method.
    """
    console = PlainConsole()
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "sent": lambda row: str(row["travels"]),
        "exact": lambda row: "yes" if row["mean_exact"] else "no",
        "trainable": lambda row: "-" if row["trainable"] is None else f"{row['trainable']:,}",
        "up a\nround": lambda row: "-" if row["trainable"] is None else size(row["bytes_up"]),
        "lr": lambda row: f"{row['lr']:g}",
        "of head": lambda row: f"{row['lr'] * row['head_factor']:g}",
        "protects": _protected,
        "paper": lambda row: str(row["paper"]),
    }
    if all(row["head_factor"] == 1 for row in rows):
        del columns["of head"]
    if all(_protected(row) == _ANY for row in rows):
        del columns["protects"]
    for name, least in _ROOM.items():
        if console.width < least:
            del columns[name]
    what = f"with a head for {classes} classes" if classes else f"as {task} trains it"
    console.print(f"for {model}, {what}", style="italic")
    heads = (Column(name, **_RIGHT if name in _NUMBERS else {}) for name in columns)
    cells = ((row["name"], *(shown(row) for shown in columns.values())) for row in rows)
    console.print(table_of(cells, Column("method", no_wrap=True), *heads, **NARROW))
    for name in columns:
        if name in _EXPLAINED:
            console.print(f"{name}: {_EXPLAINED[name]}")
    for row in rows:
        if row["trainable"] is None:
            console.print(f"{row['name']}: {row['not_applicable']}")


def show_figures(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> None:
    """The figures of a language model on tasks, with those of its base model where rows have them, and sentences below."""
    console = PlainConsole()
    shown = {"value": "value", "stderr": "stderr"}
    if any("base" in row for row in rows):
        shown |= {"base": "base", "base_stderr": "stderr"}
    cells = []
    for row in rows:
        metric = row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"
        numbers = ("-" if row[name] is None else f"{row[name]:.4f}" for name in shown)
        cells.append((row["task"], metric, *numbers, f"{row['n']:,}"))
    heads = (Column(name, **_RIGHT) for name in (*shown.values(), "n"))
    console.print(table_of(cells, "task", "metric", *heads, **NARROW))
    for note in notes:
        console.print(note)


def _protected(row: Mapping[str, Any]) -> str:
    """The units that differential privacy can protect."""
    units = [unit for unit in row["units"] if unit != "none"]
    return _ANY if len(units) == _UNITS else ", ".join(units) or "none"


def _membership(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The cheapest membership inference attack; no rows for results of versions without it."""
    names = ("membership", "membership of data", "membership of rows")
    found = [_attack(name, summary.get(name.replace(" ", "_")), summary["privacy"]) for name in names]
    return [row for rows in found for row in rows]


def _attack(name: str, found: Mapping[str, Any] | None, terms: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """terms: of the guarantee, which covers no figure of the data: those are for their owner alone."""
    most = most_auc(terms)
    if not found:
        return []
    if found.get("auc") is None:
        return [(name, f"no figure: {found.get('why') or 'no reason given'}")]
    sizes = f"{found['members']:,} members, {found['non_members']:,} held out"
    if of_dummies(found):
        sizes = f"{found['members']:,} {dummy_nouns(found)} that contributed, {found['non_members']:,} that did not"
    if of_rows(found):
        sizes = f"{found['members']:,} rows that trained, {found['non_members']:,} that did not"
    caught = [(f"  found at {100 * target:g} %", rate) for target, rate in rates(found)]
    beside = [("  may mislead", str(found["misleads"]))] if of_rows(found) else []
    whose = [("  for", FOR_THE_OWNER)] if terms and name != "membership" else []
    return [
        (f"{name} AUC", f"{auc(found)}; 0.5 is chance{allowed(found, most)}; {sizes}"),
        *whose,
        ("  meaning", meaning(found, most)),
        *beside,
        *caught,
    ]


def _privacy(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The guarantee, in rows that fit a narrow terminal."""
    terms = summary["privacy"]
    if terms is None:
        return [("privacy", str(summary["privacy_statement"]))]
    limit = "" if terms["budget_epsilon"] is None else f" of {at_most(terms['budget_epsilon'])}"
    epsilon, seen = (at_most(summary[name]) for name in ("epsilon", "epsilon_participants"))
    whose, together = two_units(summary["unit"], terms)
    alone = _alone(summary)
    budget = "spent of its own budget" if alone else "spent in its ledger"
    return [
        *([] if terms["private"] else [_VOID]),
        ("privacy", f"epsilon {epsilon} at delta {summary['delta']:g}"),
        ("  protects", terms["unit"]),
        (f"  {whose}", together),
        *_against(terms, seen),
        ("  noise", f"{terms['noise']}; multiplier {summary['noise_multiplier']:.4g}"),
        ("  releases", releases(summary["releases"], terms)),
        (f"  {budget}", f"epsilon {at_most(summary['epsilon_cumulative'])}{limit}"),
        *([("  other runs", "each costs its own epsilon, and nobody counts it: no ledger is named")] if alone else []),
    ]


def _against(terms: Mapping[str, Any], seen: str) -> list[tuple[str, str]]:
    """The observers that the one epsilon holds against, or the second epsilon."""
    those = terms.get("holds_against", ())
    held = [("  holds against", ", ".join(OBSERVERS[one] for one in those))]
    return held if "participant" in those else [*held, ("  against other clients", f"epsilon {seen}")]


def _masks(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Secure aggregation: what the server learns, and the cost."""
    found = summary["secure_aggregation"]
    if found is None:
        return []
    place = "nowhere" if summary["privacy"] is None else summary["privacy"]["place"]
    lies = "even if it lies about keys or survivors" if found["active"] else "if it follows the protocol"
    few = "" if found["least"] == found["clients"] else f"at least {found['least']} of "
    whose = f"{few or 'all '}{found['clients']} clients"
    if found["coins"]:
        whose = "the clients that are drawn, even a single one"
    rows = [
        ("secure aggregation", f"the server learns only sums over {whose}, {_SUMS[place]}, {lies}"),
        ("  bytes", f"{size(found['bytes_up'])} up, {size(found['bytes_down'])} down, including the model"),
    ]
    if _hides_cohort(summary) or found["client_seconds"] is None:  # the time would reveal the cohort size
        return rows
    spent = f"{time(found['client_seconds'])} of the clients, {time(found['server_seconds'])} of the server"
    return [*rows, ("  time for masks", spent)]


def _alone(summary: Mapping[str, Any]) -> bool:
    """Whether the run was charged to its own ledger, in its directory or in memory."""
    ledger, folder = summary["privacy"]["ledger"], summary["run_dir"]
    return ledger is None or (folder is not None and Path(ledger).absolute().is_relative_to(Path(folder).absolute()))


def _hides_cohort(summary: Mapping[str, Any]) -> bool:
    """Whether sizes are expected ones, because the guarantee requires the cohort to be secret."""
    terms = summary["privacy"]
    return terms is not None and terms["place"] == "sum" and "participant" not in terms.get("holds_against", ())


def _those_in(summary: Mapping[str, Any], expected: str) -> str:
    """The participants of a round."""
    cohort, clients, found = summary["cohort"], f"{summary['clients']} clients", summary.get("membership") or {}
    if of_dummies(found) and found["unit"] == "client" and (dummies := found["members"] + found["non_members"]):
        expected += f", beside {dummies} dummy clients"
    if summary["privacy"] is not None and summary["privacy"]["hidden_cohort"]:
        return f"all {clients}, about {cohort} of whom train{expected}"
    return f"{cohort} of {clients}{expected}"


def _percent(value: float | None) -> str:
    return "not measured" if value is None else percent(value)
