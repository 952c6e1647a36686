"""Runs side by side: what each guarantees, how good its model is, and what attacks found in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from secure_fed.errors import RunDirectoryError
from secure_fed.run_dir import RESULT, read_object, read_text


def swept(audit: Mapping[str, Any], run_dir: Path, beside: Sequence[Path]) -> list[dict[str, Any]]:
    """A row for each run, the strongest guarantee first and those without one last."""
    if not beside:
        return []
    rows = [_row(run_dir, audit), *(_row(other, read_object(other, "audit.json")) for other in beside)]
    return sorted(rows, key=lambda row: (row["epsilon"] is None, row["epsilon"] or 0.0))


def require_audited(beside: Sequence[Path]) -> None:
    """Refuse runs that have no audit yet, before one is made that they are to stand beside."""
    for other in beside:
        if read_text(other / "audit.json") is None:
            raise RunDirectoryError(f"{other} has not been audited: run `secure-fed audit {other}` first")


def _row(run_dir: Path, audit: Mapping[str, Any]) -> dict[str, Any]:
    """A run by its attack of the largest area, with an interval that allows for the choice, and the largest lower bound against
    those whom its guarantee covers.
    """
    result = read_object(run_dir, RESULT)
    cells = [cell for cell in audit.get("cells", ()) if cell.get("applicable") and cell.get("auc") is not None]
    best: Mapping[str, Any] = max(cells, key=lambda cell: float(cell["auc"]), default={})
    at = best.get("tpr_at_fpr") or {}
    epsilon = result.get("epsilon")
    covered = cells if epsilon is None else [cell for cell in cells if cell.get("epsilon_accounted") is not None]
    bounds = [cell["epsilon_lower"] for cell in covered if cell.get("epsilon_lower") is not None]
    return {
        "run_dir": str(run_dir),
        "label": "without privacy" if epsilon is None else f"epsilon {epsilon:.3g}",
        "epsilon": epsilon,
        "accuracy": result.get("accuracy"),
        "attack": best.get("attack"),
        "vantage": best.get("vantage"),
        "auc": best.get("auc"),
        "auc_interval": best.get("auc_interval_corrected") or best.get("auc_interval"),
        "tpr_at_1": at.get("0.01"),
        "tpr_at_01": at.get("0.001"),
        "epsilon_lower": max(bounds, default=None),
    }
