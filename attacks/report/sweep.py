"""Runs side by side: the guarantee, the accuracy and the findings of each, as rows of audit.json, in a sentence and on the
page.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attacks.adversary.case import VANTAGES
from attacks.catalogue import ATTACKS
from attacks.report import curves, significance
from attacks.report.curves import Mark
from attacks.report.reading import Audit, Row, interval, number, read, row, words
from attacks.report.wording import at_least, ends
from secure_fed.errors import RunDirectoryError
from secure_fed.report import markup
from secure_fed.report.formatting import at_most, listed, percent, rate
from secure_fed.report.formatting import number as shown
from secure_fed.report.markup import Bar, facts, figure, figures, paragraph, section, subsection, table
from secure_fed.runs.directory import AUDIT, RESULT, private_part, read_object, read_text

Run = dict[str, Any]


def swept(audit: Mapping[str, Any], run_dir: Path, beside: Sequence[Path]) -> list[Run]:
    """A row for each run, the strongest guarantee first, runs without one last. The run itself is not repeated."""
    others = rows_beside(run_dir, beside)
    if not others:
        return []
    rows = [_row(run_dir, audit), *others]
    labels = Counter(run["label"] for run in rows)
    for run in rows:
        if labels[run["label"]] > 1:
            run["label"] += f", {Path(run['run_dir']).name}"
    return sorted(rows, key=lambda run: (run["epsilon"] is None, run["epsilon"] or 0.0))


def rows_beside(run_dir: Path, beside: Sequence[Path]) -> list[Run]:
    """The rows of other runs, each once. RunDirectoryError for a run that was not audited, or that changed after its audit."""
    rows = []
    for other in {one.resolve(): one for one in beside if one.resolve() != run_dir.resolve()}.values():
        folder = private_part(other)
        if read_text(folder / AUDIT) is None:
            raise RunDirectoryError(
                f"{other} has not been audited: run `secure-fed audit {shlex.quote(str(other))}` first"
            )
        audit, result = read_object(folder, AUDIT), read_object(other, RESULT)
        if audit.get("rounds") != result.get("rounds"):
            raise RunDirectoryError(
                f"{other} was audited after {audit.get('rounds')} rounds and has {result.get('rounds')} now: audit it again"
            )
        rows.append(_row(other, audit))
    return rows


def _row(run_dir: Path, audit: Mapping[str, Any]) -> Run:
    """The AUC of the run's main attack and its largest lower bound on epsilon, each with its attack and adversary.

    The main attack was chosen before scores were seen; for an audit without one it is the largest AUC. For a run with a
    guarantee it is the largest bound over the adversaries that it covers. delta: the bound's: the guarantee's delta, 0 without
    one.
    """
    result, parsed = read_object(run_dir, RESULT), read(audit)
    best, epsilon = parsed.main_cell or significance.strongest(parsed.of_membership), number(result.get("epsilon"))
    covered = [cell for cell in parsed.bounded if epsilon is None or cell.accounted is not None]
    least = max(covered, key=lambda cell: cell.lower or 0.0, default=None)

    def caught(target: float) -> Run | None:
        """The true-positive rate at that false-positive rate with its intervals; None if there were too few held-out units."""
        tail = best and best.tail(target)
        return asdict(tail) if tail else None

    return {
        "run_dir": str(run_dir),
        "label": "without privacy" if epsilon is None else f"epsilon {epsilon:.3g}",
        "epsilon": epsilon,
        "delta": number(result.get("delta")) or 0.0,
        "accuracy": number(result.get("accuracy")),
        "of": {name: words(audit.get(name)) for name in ("data", "method", "audited_unit", "canaries")},
        "attack": best and best.attack,
        "vantage": best and best.vantage,
        "auc": best and best.auc,
        "auc_interval": best and best.interval,
        "tpr_at_1": caught(0.01),
        "tpr_at_01": caught(0.001),
        "epsilon_lower": least and least.lower,
        "epsilon_lower_attack": least and least.attack,
        "epsilon_lower_vantage": least and least.vantage,
    }


def sentence(row: Mapping[str, Any]) -> str:
    """A row as a sentence: each number with its attack and adversary."""
    accuracy, area, lower = (row[name] for name in ("accuracy", "auc", "epsilon_lower"))
    clauses = [] if accuracy is None else [f"accuracy {accuracy:.1%}"]
    if area is None:
        clauses.append("no attack on membership gave a result")
    else:
        whose = _by_whom(row["attack"], row["vantage"])
        clauses.append(f"AUC {area:.2f} on membership (.5 is a coin) by {whose}")
    if lower is None:
        clauses.append("no lower bound on epsilon")
    else:
        whose = _by_whom(row["epsilon_lower_attack"], row["epsilon_lower_vantage"])
        clauses.append(f"epsilon at least {at_least(lower)} at delta {row['delta']:g} by {whose}")
    return f"{row['label']}: {'; '.join(clauses)}"


def _by_whom(attack: str, vantage: str) -> str:
    """An attack and its adversary, for display: '"Loss threshold" (outsider)'."""
    title = ATTACKS[attack].title if attack in ATTACKS else attack
    who = VANTAGES[vantage].title if vantage in VANTAGES else vantage
    return f'"{title}" ({who.lower()})'


_HEAD = ("run", "epsilon accounted", "accuracy", "AUC", "TPR at 1 % FPR", "at 0.1 %", "epsilon, lower bound")


def sweep(audit: Audit) -> str:
    """A table and two drawings; two runs stand side by side."""
    runs = sorted(audit.sweep, key=lambda run: (number(run.get("epsilon")) is None, number(run.get("epsilon")) or 0.0))
    if not runs:
        return ""
    cells, unprotected = [_cells(run, audit) for run in runs], [number(run.get("epsilon")) is None for run in runs]
    table_of_runs = table(_HEAD, cells)
    if len(runs) == 2:
        panels = (subsection(one[0], facts(zip(_HEAD[1:], one[1:], strict=True))) for one in cells)
        table_of_runs = '<div class="panels">\n' + "".join(f"<div>{panel}</div>\n" for panel in panels) + "</div>\n"
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


def _cells(run: Row, audit: Audit) -> tuple[str, ...]:
    epsilon, lower, delta = (number(run.get(name)) for name in ("epsilon", "epsilon_lower", "delta"))
    at = "" if lower is None or delta is None else f" at delta {rate(delta)}"

    def whose(of: str) -> str:
        """The attack and the adversary behind a number."""
        attack, vantage = words(run.get(f"{of}attack")), words(run.get(f"{of}vantage"))
        return f" [{audit.attack_title(attack)}; {audit.vantage_title(vantage)}]" if attack else ""

    return (
        _label(run),
        "unprotected" if epsilon is None else at_most(epsilon),
        percent(number(run.get("accuracy"))),
        f"{shown(number(run.get('auc')))}{ends(interval(run.get('auc_interval')))}{whose('')}",
        _caught(run.get("tpr_at_1")),
        _caught(run.get("tpr_at_01")),
        f"{at_least(lower)}{at}{whose('epsilon_lower_')}",
    )


def _caught(found: object) -> str:
    """A true-positive rate, stored as a number or with its intervals; none if there were too few non-members."""
    about = row(found)
    value = number(about.get("tpr")) if about else number(found)
    return "refused" if value is None else f"{percent(value)}{ends(interval(about.get('tpr_interval')), percent)}"


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
    epsilons = markup.limits(
        "accounted epsilon and lower bound of every run", [bar for run in runs for bar in _bars(run)]
    )
    return (
        figure("Accuracy and AUC", curves.drawn_scores("accuracy and AUC of every run", marks), _SCORES),
        figure("Accounted epsilon and lower bound", epsilons, _EPSILONS),
    )


def _bars(run: Row) -> tuple[Bar, Bar]:
    epsilon, lower, label = number(run.get("epsilon")), number(run.get("epsilon_lower")), _label(run)
    allowed = Bar(label, math.inf, "no limit") if epsilon is None else Bar(label, epsilon, f"ε ≤ {at_most(epsilon)}")
    written = "no lower bound" if lower is None else f"ε ≥ {at_least(lower)}"
    return allowed, Bar("shown by its audit", lower, written, "--second")


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
