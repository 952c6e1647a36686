"""Runs side by side: the guarantee, the accuracy and the findings of each, as rows of audit.json, in a sentence and on the
page.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attacks.adversary.case import VANTAGES
from attacks.catalogue import ATTACKS
from attacks.evidence.attempts import number
from attacks.evidence.verdict import strongest
from attacks.record import Audit, RunBeside, Tail, read
from attacks.report import curves
from attacks.report.phrases import at_least, ends
from secure_fed.errors import RunDirectoryError
from secure_fed.report import markup
from secure_fed.report.formatting import at_most, listed, percent, rate
from secure_fed.report.formatting import number as shown
from secure_fed.report.markup import Bar, facts, figure, figures, paragraph, section, subsection, table
from secure_fed.runs.directory import AUDIT, RESULT, private_part, read_object, read_text


def swept(audit: Audit, run_dir: Path, beside: Sequence[Path]) -> tuple[RunBeside, ...]:
    """A row for each run, the strongest guarantee first, runs without one last. The run itself is not repeated."""
    others = rows_beside(run_dir, beside)
    if not others:
        return ()
    rows = [_row(run_dir, audit), *others]
    labels = Counter(run.label for run in rows)
    rows = [
        run if labels[run.label] < 2 else replace(run, label=f"{run.label}, {Path(run.run_dir).name}") for run in rows
    ]
    return tuple(sorted(rows, key=lambda run: (run.epsilon is None, run.epsilon or 0.0)))


def rows_beside(run_dir: Path, beside: Sequence[Path]) -> list[RunBeside]:
    """The rows of other runs, each once. RunDirectoryError for a run that was not audited, or that changed after its audit."""
    rows = []
    for other in {one.resolve(): one for one in beside if one.resolve() != run_dir.resolve()}.values():
        folder = private_part(other)
        if read_text(folder / AUDIT) is None:
            raise RunDirectoryError(
                f"{other} has not been audited: run `secure-fed audit {shlex.quote(str(other))}` first"
            )
        audit, result = read(read_object(folder, AUDIT), str(folder / AUDIT)), read_object(other, RESULT)
        if audit.rounds != result.get("rounds"):
            raise RunDirectoryError(
                f"{other} was audited after {audit.rounds} rounds and has {result.get('rounds')} now: audit it again"
            )
        rows.append(_row(other, audit))
    return rows


def _row(run_dir: Path, audit: Audit) -> RunBeside:
    """The AUC of the run's main attack and its largest lower bound on epsilon, each with its attack and adversary.

    The main attack was chosen before scores were seen; for an audit without one it is the largest AUC. For a run with a
    guarantee it is the largest bound over the adversaries that it covers. delta: the bound's: the guarantee's delta, 0 without
    one.
    """
    result = read_object(run_dir, RESULT)
    best, epsilon = audit.main_cell or strongest(audit.of_membership), number(result.get("epsilon"))
    covered = [cell for cell in audit.bounded if epsilon is None or cell.epsilon_accounted is not None]
    least = max(covered, key=lambda cell: cell.epsilon_lower or 0.0, default=None)
    run = RunBeside(
        run_dir=str(run_dir),
        label="without privacy" if epsilon is None else f"epsilon {epsilon:.3g}",
        epsilon=epsilon,
        delta=number(result.get("delta")) or 0.0,
        accuracy=number(result.get("accuracy")),
        of={name: getattr(audit, name) or "" for name in _KINDS},
    )
    if best is not None:
        run = replace(run, attack=best.attack, vantage=best.vantage, auc=best.auc, auc_interval=best.auc_interval)
        run = replace(run, tpr_at_1=best.tail(0.01), tpr_at_01=best.tail(0.001))
    if least is not None:
        run = replace(run, epsilon_lower=least.epsilon_lower)
        run = replace(run, epsilon_lower_attack=least.attack, epsilon_lower_vantage=least.vantage)
    return run


def sentence(run: RunBeside) -> str:
    """A row as a sentence: each number with its attack and adversary."""
    clauses = [] if run.accuracy is None else [f"accuracy {percent(run.accuracy)}"]
    if run.auc is None:
        clauses.append("no attack on membership gave a result")
    else:
        whose = _by_whom(run.attack, run.vantage)
        clauses.append(f"AUC {run.auc:.2f} on membership (.5 is chance) by {whose}")
    if run.epsilon_lower is None:
        clauses.append("no lower bound on epsilon")
    else:
        whose = _by_whom(run.epsilon_lower_attack, run.epsilon_lower_vantage)
        clauses.append(f"epsilon at least {at_least(run.epsilon_lower)} at delta {run.delta:g} by {whose}")
    return f"{run.label}: {'; '.join(clauses)}"


def _by_whom(attack: str | None, vantage: str | None) -> str:
    """An attack and its adversary, for display: '"Loss threshold" (outsider)'."""
    title = ATTACKS[attack].title if attack in ATTACKS else attack
    who = VANTAGES[vantage].title if vantage in VANTAGES else vantage
    return f'"{title}" ({str(who).lower()})'


_HEAD = ("run", "epsilon accounted", "accuracy", "AUC", "TPR at 1 % FPR", "at 0.1 %", "epsilon, lower bound")


def sweep(audit: Audit) -> str:
    """A table and two drawings; two runs stand side by side."""
    runs = sorted(audit.sweep, key=lambda run: (run.epsilon is None, run.epsilon or 0.0))
    if not runs:
        return ""
    cells, unprotected = [_cells(run, audit) for run in runs], [run.epsilon is None for run in runs]
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


def _unlike(runs: Sequence[RunBeside]) -> str:
    """The settings other than privacy in which these runs differ, because they may also explain a difference."""
    kinds = {name: {run.of.get(name, "") for run in runs} for name in _KINDS}
    unlike = [title for name, title in _KINDS.items() if len(kinds[name]) > 1]
    if not unlike:
        return "The same training with different privacy, audited alike."
    return (
        f"These runs differ in more than their privacy: in {listed(unlike)}. So their figures say little about the effect of"
        " privacy."
    )


def _cells(run: RunBeside, audit: Audit) -> tuple[str, ...]:
    at = "" if run.epsilon_lower is None else f" at delta {rate(run.delta)}"

    def whose(attack: str | None, vantage: str | None) -> str:
        """The attack and the adversary behind a number."""
        return f" [{audit.attack_title(attack)}; {audit.vantage_title(vantage or '')}]" if attack else ""

    return (
        run.label,
        "unprotected" if run.epsilon is None else at_most(run.epsilon),
        percent(run.accuracy),
        f"{shown(run.auc)}{ends(run.auc_interval)}{whose(run.attack, run.vantage)}",
        _caught(run.tpr_at_1),
        _caught(run.tpr_at_01),
        f"{at_least(run.epsilon_lower)}{at}{whose(run.epsilon_lower_attack, run.epsilon_lower_vantage)}",
    )


def _caught(found: Tail | None) -> str:
    """A true-positive rate with its interval; none if there were too few non-members."""
    return "refused" if found is None else f"{percent(found.tpr)}{ends(found.tpr_interval, percent)}"


def _drawings(runs: Sequence[RunBeside]) -> tuple[str, str]:
    bars = []
    for run in runs:
        limit = "no limit" if run.epsilon is None else f"ε ≤ {at_most(run.epsilon)}"
        written = "no lower bound" if run.epsilon_lower is None else f"ε ≥ {at_least(run.epsilon_lower)}"
        bars.append(Bar(run.label, math.inf if run.epsilon is None else run.epsilon, limit))
        bars.append(Bar("shown by its audit", run.epsilon_lower, written, "--second"))
    epsilons = markup.limits("accounted epsilon and lower bound of every run", bars)
    return (
        figure("Accuracy and AUC", curves.drawn_scores("accuracy and AUC of every run", runs), _SCORES),
        figure("Accounted epsilon and lower bound", epsilons, _EPSILONS),
    )


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
