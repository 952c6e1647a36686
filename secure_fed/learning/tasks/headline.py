"""What stands for a model in results: each task's headline metric, the metrics beside it, and the commonest label.

Needs no torch, since every page of results imports it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_FIRST = {
    "multi_label": ("micro_f1", "macro_f1"),
    "regression": ("rmse", "pearson"),
    "tokens": ("f1",),
    "question_answering": ("f1",),
    "causal_lm": ("perplexity",),
    "chat": ("perplexity",),
    "multiple_choice": (),
}
# The titles, in results, of the tasks that are called tokens and question_answering.
ENTITIES, QUESTIONS = "recognition of entities", "extractive question answering"
_HEADLINE = dict.fromkeys(("tokens", ENTITIES, "question_answering", QUESTIONS), "f1")
_NAMES = {
    "macro_f1": "macro-F1",
    "micro_f1": "micro-F1",
    "f1": "F1",
    "rmse": "RMSE",
    "pearson": "Pearson's r",
    "rouge_l": "ROUGE-L",
}
_Z = 1.96  # two-sided, 95 %


def headline(task: str) -> str:
    """The metric, larger is better, that stands for a model of the task: "f1" of entities and of answers, else "accuracy".

    It alone chooses the best evaluation, counts the rounds to a target, and compares clients and configurations. A model that
    finds no entity can have a high accuracy of words, and an answer that is off by a word counts nothing for accuracy.

    task: its name in `data.task`, or its title in a result.
    """
    return _HEADLINE.get(task, "accuracy")


def first_metrics(task: str, of_answers: str = "") -> tuple[str, ...]:
    """The names of a task's own metrics in records and results. of_answers: the metric of written answers, if there is one."""
    return (*_FIRST.get(task, ("macro_f1",)), *filter(None, [of_answers]))


def scores(task: str, of_answers: str = "") -> tuple[str, str]:
    """The two scores between 0 and 1 that are shown by round, the headline first. of_answers: see `first_metrics`."""
    return ("accuracy", of_answers or "macro_f1") if headline(task) == "accuracy" else (headline(task), "accuracy")


def leads(task: str) -> bool:
    """Whether the task's own metric is its headline, shown before accuracy."""
    return headline(task) != "accuracy"


def has_accuracy(task: str) -> bool:
    return task != "regression"


def spoken(metric: str) -> str:
    """The metric's name for people."""
    return _NAMES.get(metric, metric.replace("_", " "))


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def shown(metric: str, value: float) -> str:
    """The metric and its value for people: "accuracy 91.2 %", "F1 0.412"."""
    return f"{spoken(metric)} {percent(value)}" if metric == "accuracy" else f"{spoken(metric)} {value:.3g}"


@dataclass(frozen=True)
class Commonest:
    """The most frequent label of a test set, to which an accuracy is compared: the accuracy of always predicting it.

    share: the most frequent label's share of the labels that accuracy counts. of: the number of these labels.
    """

    share: float
    of: int

    @classmethod
    def among(cls, labels: Iterable[Hashable]) -> Commonest | None:
        """The most frequent of these labels; None without labels."""
        counts = Counter(labels)
        return cls(max(counts.values()) / counts.total(), counts.total()) if counts else None

    @classmethod
    def of_result(cls, result: Mapping[str, Any]) -> Commonest | None:
        """Read from a run's result; None for results of older versions, which lack it."""
        found = result.get("commonest")
        return None if found is None else cls(float(found["share"]), int(found["of"]))

    def not_exceeded_by(self, accuracy: float) -> bool:
        """Whether the share lies in Wilson's 95 % interval of this accuracy, or above it."""
        n, z = self.of, _Z
        middle = accuracy + z * z / (2 * n)
        width = z * math.sqrt(accuracy * (1 - accuracy) / n + z * z / (4 * n * n))
        return (middle - width) / (1 + z * z / n) <= self.share


def commonest_of_items(examples: Sequence[Any]) -> Commonest | None:
    """The most frequent label of items whose `labels` are one whole number each; None if any item's are not."""
    labels = []
    for number in range(len(examples)):
        item = examples[number]
        label: Any = item.get("labels") if isinstance(item, Mapping) else None
        label = label.item() if hasattr(label, "item") and getattr(label, "ndim", 1) == 0 else label
        if type(label) is not int:
            return None
        labels.append(label)
    return Commonest.among(labels)


def no_better(accuracy: float | None, common: Commonest | None) -> str:
    """The sentence on a model that is no better than its test set's most frequent label; empty if it is better, or unknown."""
    if accuracy is None or common is None or not common.not_exceeded_by(accuracy):
        return ""
    return (
        f"The accuracy of {percent(accuracy)} is no better than always giving the commonest label of the test set, "
        f"{percent(common.share)} (at 95 % confidence): the accuracy shows no learning."
    )
