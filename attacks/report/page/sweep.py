"""Runs that differ in their privacy, side by side: accuracy, AUC, and epsilon."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attacks.report.audited import Audit
from attacks.report.page import plots
from attacks.report.page.plots import Mark
from attacks.report.values import Row, interval, number, row, words
from attacks.report.wording import at_least
from secure_fed.report.formatting import at_most, listed, percent, rate
from secure_fed.report.formatting import number as shown
from secure_fed.report.page import pictures
from secure_fed.report.page.markup import facts, figure, figures, paragraph, section, subsection, table
from secure_fed.report.page.pictures import Bar

_HEAD = ("run", "epsilon accounted", "accuracy", "AUC", "TPR at 1 % FPR", "at 0.1 %", "epsilon, lower bound")


def sweep(audit: Audit) -> str:
    """A table and two drawings; two runs stand side by side."""
    runs = sorted(audit.sweep, key=lambda run: (number(run.get("epsilon")) is None, number(run.get("epsilon")) or 0.0))
    if not runs:
        return ""
    cells, unprotected = [_cells(run, audit) for run in runs], [number(run.get("epsilon")) is None for run in runs]
    table_of_runs = _side_by_side(cells) if len(runs) == 2 else table(_HEAD, cells)
    return section(
        "With and without privacy" if unprotected == [False, True] else "With more and less privacy",
        paragraph(_unlike(runs)),
        paragraph(_READING),
        table_of_runs,
        figures(*_drawings(runs)),
    )


def _unlike(runs: Sequence[Row]) -> str:
    """The settings other than privacy in which these runs differ, because they may also explain a difference."""
    kinds = {name: {words(row(run.get("of")).get(name)) for run in runs} for name in _KINDS}
    unlike = [title for name, title in _KINDS.items() if len(kinds[name]) > 1]
    if not unlike:
        return "The same training with different privacy, audited alike."
    return (
        f"These runs differ in more than their privacy: in {listed(unlike)}. So their figures say little about the effect of"
        " privacy."
    )


def _side_by_side(runs: Sequence[tuple[str, ...]]) -> str:
    panels = "".join(
        f"<div>{subsection(cells[0], facts(zip(_HEAD[1:], cells[1:], strict=True)))}</div>\n" for cells in runs
    )
    return f'<div class="panels">\n{panels}</div>\n'


def _cells(run: Row, audit: Audit) -> tuple[str, ...]:
    epsilon, lower, delta = (number(run.get(name)) for name in ("epsilon", "epsilon_lower", "delta"))
    at = "" if lower is None or delta is None else f" at delta {rate(delta)}"
    about = interval(run.get("auc_interval"))
    between = "" if about is None else f" ({shown(about[0])} to {shown(about[1])})"
    return (
        _label(run),
        "unprotected" if epsilon is None else at_most(epsilon),
        percent(number(run.get("accuracy"))),
        f"{shown(number(run.get('auc')))}{between}{_whose(run, '', audit)}",
        _caught(run.get("tpr_at_1")),
        _caught(run.get("tpr_at_01")),
        f"{at_least(lower)}{at}{_whose(run, 'epsilon_lower_', audit)}",
    )


def _whose(run: Row, of: str, audit: Audit) -> str:
    """The attack and the adversary behind a number."""
    attack, vantage = words(run.get(f"{of}attack")), words(run.get(f"{of}vantage"))
    return f" [{audit.attack_title(attack)}; {audit.vantage_title(vantage)}]" if attack else ""


def _caught(found: object) -> str:
    """A true-positive rate, stored as a number or with its intervals; none if there were too few non-members."""
    about = row(found)
    value = number(about.get("tpr")) if about else number(found)
    between = interval(about.get("tpr_interval"))
    if value is None:
        return "refused"
    return percent(value) + ("" if between is None else f" ({percent(between[0])} to {percent(between[1])})")


def _drawings(runs: Sequence[Row]) -> tuple[str, str]:
    marks = [
        Mark(
            number(run.get("epsilon")),
            number(run.get("accuracy")),
            number(run.get("auc")),
            interval(run.get("auc_interval")),
        )
        for run in runs
    ]
    epsilons = pictures.limits(
        "accounted epsilon and lower bound of every run", [bar for run in runs for bar in _bars(run)]
    )
    return (
        figure("Accuracy and AUC", plots.drawn_scores("accuracy and AUC of every run", marks), _SCORES),
        figure("Accounted epsilon and lower bound", epsilons, _EPSILONS),
    )


def _bars(run: Row) -> tuple[Bar, Bar]:
    epsilon, lower, label = number(run.get("epsilon")), number(run.get("epsilon_lower")), _label(run)
    allowed = Bar(label, math.inf, "no limit") if epsilon is None else Bar(label, epsilon, f"ε ≤ {at_most(epsilon)}")
    shown = "no lower bound" if lower is None else f"ε ≥ {at_least(lower)}"
    return allowed, Bar("shown by its audit", lower, shown, "--second")


def _label(run: Row) -> str:
    return words(run.get("label")) or words(run.get("run_dir")) or "a run without a name"


_KINDS = {
    "data": "their data",
    "method": "their method",
    "audited_unit": "the audited unit",
    "canaries": "the canaries planted",
}
_READING = (
    "AUC and TPR are those of the main attack, which was chosen before any score was seen. A TPR is refused where too few"
    " units were held out for its false-positive rate. The lower bound on epsilon is the largest; with a guarantee, the"
    " largest for the adversaries that it covers. It may come from another attack and another adversary, which are named in"
    " brackets. Bounds of runs without a guarantee are at delta 0, where the same guesses show more than at the delta of a"
    " guarantee."
)
_SCORES = "Accuracy should stay high and the AUC near 0.5. The whiskers are intervals."
_EPSILONS = "For each run, the accounted epsilon, and below it the lower bound of its audit, as on the first screen."
