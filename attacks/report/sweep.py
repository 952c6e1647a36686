"""Runs that differ in their privacy: what it cost in accuracy, and what it hid."""

from __future__ import annotations

from collections.abc import Sequence

from attacks.reading import Audit
from attacks.report import plots
from attacks.report.plots import Mark
from attacks.values import Row, interval, number, row, words
from attacks.wording import at_least
from secure_fed.report.markup import facts, figure, figures, paragraph, section, subsection, table
from secure_fed.report.words import at_most, percent
from secure_fed.report.words import number as shown

_PAIR = 2
_HEAD = ("run", "accounted epsilon", "accuracy", "AUC", "caught at 1 %", "at 0.1 %", "epsilon shown")


def sweep(audit: Audit) -> str:
    """A table and two drawings; two runs stand side by side."""
    runs = sorted(audit.sweep, key=lambda run: (number(run.get("epsilon")) is None, number(run.get("epsilon")) or 0.0))
    if not runs:
        return ""
    table_of_runs = _side_by_side(runs) if len(runs) == _PAIR else table(_HEAD, map(_cells, runs))
    return section(
        "With and without privacy" if len(runs) == _PAIR and _one_protected(runs) else "With more and less privacy",
        paragraph(_READING),
        table_of_runs,
        figures(*_drawings([_mark(run) for run in runs])),
    )


def _side_by_side(runs: Sequence[Row]) -> str:
    panels = "".join(
        f"<div>{subsection(_cells(run)[0], facts(zip(_HEAD[1:], _cells(run)[1:], strict=True)))}</div>\n"
        for run in runs
    )
    return f'<div class="panels">\n{panels}</div>\n'


def _cells(run: Row) -> tuple[str, ...]:
    epsilon, lower = number(run.get("epsilon")), number(run.get("epsilon_lower"))
    about = interval(run.get("auc_interval"))
    between = "" if about is None else f" ({shown(about[0])} to {shown(about[1])})"
    return (
        words(run.get("label")) or words(run.get("run_dir")) or "a run without a name",
        "unprotected" if epsilon is None else at_most(epsilon),
        percent(number(run.get("accuracy"))),
        f"{shown(number(run.get('auc')))}{between}",
        _caught(run.get("tpr_at_1")),
        _caught(run.get("tpr_at_01")),
        at_least(lower),
    )


def _caught(rate: object) -> str:
    """A true-positive rate, given as a number or with its intervals; none where it was refused."""
    about = row(rate)
    value = number(about.get("tpr")) if about else number(rate)
    between = interval(about.get("tpr_interval"))
    if value is None:
        return "refused"
    return percent(value) + ("" if between is None else f" ({percent(between[0])} to {percent(between[1])})")


def _drawings(marks: Sequence[Mark]) -> tuple[str, str]:
    return (
        figure("What it cost, and what it hid", plots.scores("accuracy and AUC of every run", marks), _SCORES),
        figure("Promised and shown", plots.epsilons("promised and shown epsilon of every run", marks), _EPSILONS),
    )


def _mark(run: Row) -> Mark:
    names = ("epsilon", "accuracy", "auc", "epsilon_lower")
    epsilon, accuracy, auc, lower = (number(run.get(name)) for name in names)
    return Mark(epsilon, accuracy, auc, interval(run.get("auc_interval")), lower)


def _one_protected(runs: Sequence[Row]) -> bool:
    return [number(run.get("epsilon")) is None for run in runs] == [False, True]


_READING = (
    "The same training, made with different limits on what it may give away, and audited alike. The AUC is that of the"
    " strongest attack; caught at 1 % are the members that it names when it is wrong about 1 % of the others. A rate is refused"
    " where too few were held out to show it."
)
_SCORES = "Accuracy should stay high and the AUC near 0.5. The whiskers are intervals."
_EPSILONS = "The second bar is the largest lower bound of any attack. A run without a guarantee has no first bar."
