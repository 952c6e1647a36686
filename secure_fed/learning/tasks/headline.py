"""The metrics of each task that are shown first, beside accuracy. Imports nothing, since every page of results imports it."""

from __future__ import annotations

_FIRST = {
    "multi_label": ("micro_f1", "macro_f1"),
    "regression": ("rmse", "pearson"),
    "tokens": ("f1",),
    "question_answering": ("f1",),
    "causal_lm": ("perplexity",),
    "multiple_choice": (),
}
ENTITIES = "recognition of entities"  # the title of the task that is called tokens
_NAMES = {"macro_f1": "macro-F1", "micro_f1": "micro-F1", "f1": "F1", "rmse": "RMSE", "pearson": "Pearson's r"}


def first_metrics(task: str) -> tuple[str, ...]:
    """The names of these metrics in records and results."""
    return _FIRST.get(task, ("macro_f1",))


def leads(task: str) -> bool:
    """Whether the task's own metric is shown before accuracy, which is high because most words are in no entity."""
    return task == "tokens"


def has_accuracy(task: str) -> bool:
    return task != "regression"


def spoken(metric: str) -> str:
    """The metric's name for people."""
    return _NAMES.get(metric, metric.replace("_", " "))
