"""The best evaluation of a run, and when to stop waiting for a better one.

Evaluations are compared by accuracy, where the task has one, and else by loss. Choosing a model by a test set reveals something
about that test set. So under privacy the test set must be a declared one, not rows held out of the protected data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.data.holdout import is_declared
from secure_fed.rounds.record import Record

_SETTINGS = ("patience", "keep_best")


def require_choosable(config: RunConfig, facts: Mapping[str, Any]) -> None:
    """ConfigError where the best of several models may not be chosen, or cannot be kept."""
    chosen = next((name for name in _SETTINGS if getattr(config.evaluation, name)), None)
    if chosen is None:
        return
    setting, value = f"evaluation.{chosen}", getattr(config.evaluation, chosen)
    if config.privacy.unit != "none" and not is_declared(facts["test"]["from"]):
        raise ConfigError(
            f"{setting} chooses by the test rows, which were held out of the protected rows, so the choice would reveal "
            "them: set data.test to rows that need no protection"
        ).about(setting, value, "a declared test set")
    if config.evaluation.keep_best and config.method.personal:
        raise ConfigError(
            "evaluation.keep_best keeps the shared model, and method.personal leaves part of it at the clients: leave one of "
            "them out"
        ).about("evaluation.keep_best", True, "no method.personal")


def best(records: Sequence[Record]) -> Record | None:
    """The record of the first of the best evaluations, None before there is one."""
    merits = [(merit, record) for record in records if (merit := _merit(record)) is not None]
    return max(merits, key=lambda pair: pair[0], default=(0.0, None))[1]


def stalled(records: Sequence[Record], patience: int | None) -> str:
    """The reason to end the run: `patience` evaluations in a row were no better than the best before them; "" to go on."""
    found = best(records)
    if not patience or found is None:
        return ""
    since = [record for record in records if record["round"] > found["round"] and _merit(record) is not None]
    if len(since) < patience:
        return ""
    reached = f"accuracy {found['accuracy']:.1%}" if _number(found, "accuracy") else f"loss {found['loss']:.4g}"
    return f"{patience} evaluations in a row were no better than the evaluation of round {found['round']}, {reached}"


def require_measured(measured: Record, config: RunConfig) -> None:
    """ConfigError for an evaluation by which no model can be chosen, where one is to be chosen."""
    name = next((name for name in _SETTINGS if getattr(config.evaluation, name)), None)
    if name and not {"accuracy", "loss"} & set(
        measured
    ):  # after a run diverged its loss is NaN, which is no better than any number
        raise ConfigError(
            f"evaluation.{name} needs accuracy or loss, and the evaluation has neither: return one from metrics"
        ).about(f"evaluation.{name}", getattr(config.evaluation, name), "metrics with 'accuracy' or 'loss'")


def _merit(record: Record) -> float | None:
    """The figure of merit: larger is better."""
    if _number(record, "accuracy"):
        return float(record["accuracy"])
    return -float(record["loss"]) if _number(record, "loss") else None


def _number(record: Record, name: str) -> bool:
    value = record.get(name)
    return isinstance(value, int | float) and math.isfinite(value)
