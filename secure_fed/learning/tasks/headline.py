"""Each task's headline metric, and the metrics shown beside it. Imports nothing, since every page of results imports it."""

from __future__ import annotations

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


def first_metrics(task: str, of_answers: str = "") -> tuple[str, ...]:
    """The names of these metrics in records and results. of_answers: the metric of written answers, if there is one."""
    return (*_FIRST.get(task, ("macro_f1",)), *filter(None, [of_answers]))


def headline(task: str) -> str:
    """The metric, larger is better, that stands for a model of the task: "f1" of entities and of answers, else "accuracy".

    It alone chooses the best evaluation, counts the rounds to a target, and compares clients and configurations. A model that
    finds no entity can have a high accuracy of words, and an answer that is off by a word counts nothing for accuracy.

    task: its name in `data.task`, or its title in a result.
    """
    return _HEADLINE.get(task, "accuracy")


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


def shown(metric: str, value: float) -> str:
    """The metric and its value for people: "accuracy 91.2%", "F1 0.412"."""
    return f"{spoken(metric)} {value:.1%}" if metric == "accuracy" else f"{spoken(metric)} {value:.3g}"
