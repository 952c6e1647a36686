"""Rounds and bytes to a target of the task's headline metric, and time under a bandwidth.

Both are computed from records alone, so they do not change if a run is interrupted and resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from secure_fed.config import EvaluationConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.tasks.headline import headline

Record = Mapping[str, Any]
_MEGA = 1_000_000


def require_headline(record: Record, target: float, task: str) -> None:
    """Refuse a target where metrics do not give the task's headline metric."""
    if (name := headline(task)) not in record:
        raise ConfigError(
            f"evaluation.target_accuracy = {target} needs {name!r}, which metrics does not return; return it, or leave the "
            "setting out"
        ).about("evaluation.target_accuracy", target, f"metrics with {name!r}")


def transfer_seconds(record: Record, megabytes_per_second: float) -> float:
    """Seconds that one client of the round sends and receives: bytes both ways / clients / bandwidth.

    All clients send at the same time over separate lines, as in FedARA (section V); a megabyte is 10^6 bytes.
    """
    clients = record["cohort"]
    moved = record["bytes_up"] + record["bytes_down"]
    return moved / clients / (megabytes_per_second * _MEGA) if clients else 0.0


def summary(records: Sequence[Record], settings: EvaluationConfig, task: str, *, secret_cohort: bool) -> dict[str, Any]:
    """The record's `target` and `bandwidth`, each if its setting is set. task: see `headline`."""
    found: dict[str, Any] = {}
    if settings.target_accuracy is not None:
        found["target"] = _target(records, settings.target_accuracy, headline(task))
    if settings.bandwidth is not None:
        found["bandwidth"] = _time(records, settings.bandwidth, secret_cohort)
    return found


def _target(records: Sequence[Record], target: float, metric: str) -> dict[str, Any]:
    """The first evaluated round that reached the target, and the bytes sent by then. None if no round did."""
    reached = next(
        (place for place, row in enumerate(records) if row.get(metric) is not None and row[metric] >= target), None
    )
    upto = [] if reached is None else records[: reached + 1]
    sent = {name: sum(row[name] for row in upto) if upto else None for name in ("bytes_up", "bytes_down")}
    return {"metric": metric, "accuracy": target, "rounds": len(upto) or None, **sent}


def _time(records: Sequence[Record], bandwidth: float, secret_cohort: bool) -> dict[str, Any]:
    """Seconds that the run would take with clients computing at the same time, at the speed that was measured here.

    Clients train one after the other here, so a round's measured time, evaluation included, is divided by their number. Where
    this number is secret, so is the time, which would reveal it.
    """
    transfer = sum(row["transfer_seconds"] for row in records)
    compute = None if secret_cohort else sum(row["seconds"] / max(1, row["cohort"]) for row in records)
    return {
        "megabytes_per_second": bandwidth,
        "transfer_seconds": transfer,
        "compute_seconds": compute,
        "seconds": None if compute is None else transfer + compute,
    }
