"""Runs side by side: the guarantee, the accuracy and the findings of each."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attacks.adversary.vantage import VANTAGES
from attacks.catalogue import ATTACKS
from attacks.report import significance
from attacks.report.audited import Cell
from attacks.report.reading import read
from attacks.report.values import number, words
from attacks.report.wording import at_least
from secure_fed.errors import RunDirectoryError
from secure_fed.runs.directory import AUDIT, RESULT, private_part, read_object, read_text

Run = dict[str, Any]


def swept(audit: Mapping[str, Any], run_dir: Path, beside: Sequence[Path]) -> list[Run]:
    """A row for each run, the strongest guarantee first, runs without one last. The run itself is not repeated."""
    others = rows_beside(run_dir, beside)
    if not others:
        return []
    rows = [_row(run_dir, audit), *others]
    labels = Counter(row["label"] for row in rows)
    for row in rows:
        if labels[row["label"]] > 1:
            row["label"] += f", {Path(row['run_dir']).name}"
    return sorted(rows, key=lambda row: (row["epsilon"] is None, row["epsilon"] or 0.0))


def rows_beside(run_dir: Path, beside: Sequence[Path]) -> list[Run]:
    """The rows of other runs, each once. RunDirectoryError for a run that was not audited, or that changed after its audit."""
    others = {one.resolve(): one for one in beside if one.resolve() != run_dir.resolve()}
    return [_audited_row(other) for other in others.values()]


def _audited_row(run_dir: Path) -> Run:
    folder = private_part(run_dir)
    if read_text(folder / AUDIT) is None:
        raise RunDirectoryError(
            f"{run_dir} has not been audited: run `secure-fed audit {shlex.quote(str(run_dir))}` first"
        )
    audit, result = read_object(folder, AUDIT), read_object(run_dir, RESULT)
    if audit.get("rounds") != result.get("rounds"):
        raise RunDirectoryError(
            f"{run_dir} was audited after {audit.get('rounds')} rounds and has {result.get('rounds')} now: audit it again"
        )
    return _row(run_dir, audit)


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


def _row(run_dir: Path, audit: Mapping[str, Any]) -> Run:
    """The AUC of the run's main attack and its largest lower bound on epsilon, each with its attack and adversary.

    The main attack was chosen before scores were seen; for an audit without one it is the largest AUC. For a run with a
    guarantee it is the largest bound over the adversaries that it covers. delta: the bound's: the guarantee's delta, 0 without
    one.
    """
    result, parsed = read_object(run_dir, RESULT), read(audit)
    best, epsilon = parsed.main_cell or significance.strongest(parsed.of_membership), number(result.get("epsilon"))
    covered = [cell for cell in parsed.bounded if epsilon is None or cell.accounted is not None]
    shown = max(covered, key=lambda cell: cell.lower or 0.0, default=None)
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
        "tpr_at_1": _tail(best, 0.01),
        "tpr_at_01": _tail(best, 0.001),
        "epsilon_lower": shown and shown.lower,
        "epsilon_lower_attack": shown and shown.attack,
        "epsilon_lower_vantage": shown and shown.vantage,
    }


def _tail(cell: Cell | None, target: float) -> Run | None:
    """The true-positive rate at that false-positive rate with its intervals; None if there were too few held-out units."""
    tail = cell and cell.tail(target)
    return asdict(tail) if tail else None


def _by_whom(attack: str, vantage: str) -> str:
    """An attack and its adversary, for display: '"Loss threshold" (outsider)'."""
    title = ATTACKS[attack].title if attack in ATTACKS else attack
    who = VANTAGES[vantage].title if vantage in VANTAGES else vantage
    return f'"{title}" ({who.lower()})'
