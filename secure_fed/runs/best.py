"""The best evaluation of a run, and when to stop waiting for a better one.

Evaluations are compared by the task's headline metric (F1 of entities and of answers, else accuracy), or by loss in a run that
does not measure it. Choosing a model by a test set reveals something about that test set. So under privacy the test set must be
a declared one, not rows held out of the protected data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.tasks.headline import headline, shown
from secure_fed.rounds.record import Record

CHOOSING = ("patience", "keep_best")  # settings of [evaluation]


def best(records: Sequence[Record], task: str) -> Record | None:
    """The record of the first of the best evaluations, None before there is one. task: see `headline`."""
    name = _measure(records, task)
    sign = -1 if name == "loss" else 1
    return max(_measured(records, name), key=lambda record: sign * float(record[name]), default=None)


def stalled(records: Sequence[Record], patience: int | None, task: str) -> str:
    """The reason to end the run: `patience` evaluations in a row were no better than the best before them; "" to go on."""
    found = best(records, task)
    if not patience or found is None:
        return ""
    name = _measure(records, task)
    if sum(record["round"] > found["round"] for record in _measured(records, name)) < patience:
        return ""
    reached = f"loss {found['loss']:.4g}" if name == "loss" else shown(name, found[name])
    return f"{patience} evaluations in a row were no better than the evaluation of round {found['round']}, {reached}"


def require_measured(measured: Record, config: RunConfig) -> None:
    """ConfigError for an evaluation by which no model can be chosen, where one is to be chosen."""
    name = next((name for name in CHOOSING if getattr(config.evaluation, name)), None)
    # After a run diverged its loss is NaN, which is no better than any number.
    if name and not {headline(config.data.task), "accuracy", "loss"} & set(measured):
        raise ConfigError(
            f"evaluation.{name} needs accuracy or loss, and the evaluation has neither: return one from metrics"
        ).about(f"evaluation.{name}", getattr(config.evaluation, name), "metrics with 'accuracy' or 'loss'")


def _measure(records: Sequence[Record], task: str) -> str:
    """The one number by which all evaluations of a run are compared: of the task's metrics and the loss, the first measured."""
    return next((name for name in (headline(task), "accuracy") if _measured(records, name)), "loss")


def _measured(records: Sequence[Record], name: str) -> list[Record]:
    """The records with a finite number of that name."""
    return [one for one in records if isinstance(one.get(name), int | float) and math.isfinite(one[name])]
