"""The report's sentences and numbers for each task's metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from secure_fed.config import RunConfig
from secure_fed.learning.tasks import TASKS
from secure_fed.report.measured import how_good, key_numbers
from secure_fed.report.record import RunRecord

MEASURED = {
    "classification": (
        {"macro_f1": 0.5},
        "finds the right one of 3 classes for 25.0 % of the test examples (macro-F1 0.500)",
    ),
    "multi_label": (
        {"micro_f1": 0.4},
        "finds exactly the right labels of 25.0 % of the test examples (micro-F1 0.400)",
    ),
    "regression": ({"rmse": 1.5, "pearson": 0.7}, "is off by 1.500 on the test examples (root mean square; Pearson's"),
    "tokens": (
        {"f1": 0.3},
        "finds the entities of the test texts with an F1 of 0.300 (it tags 25.0 % of the words correctly)",
    ),
    "question_answering": ({"f1": 0.3}, "answers 25.0 % of the test questions exactly (F1 of the words 0.300)"),
    "causal_lm": ({"perplexity": 33.0}, "predicts 25.0 % of the next tokens of the test texts (perplexity 33.000)"),
    "chat": ({"perplexity": 33.0}, "assistant's next tokens in the test conversations (perplexity 33.000)"),
    "multiple_choice": ({}, "chooses correctly in 25.0 % of the test examples."),
}


def record(task: str, row: dict[str, Any]) -> RunRecord:
    config = RunConfig().replace({("data", "train"): "rows.jsonl", ("data", "task"): task})
    return RunRecord("run", config, {"label_names": ["a", "b", "c"], "clients": []}, ({"round": 1, **row},), None)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_told_of_in_its_own_words(task: str) -> None:
    metrics, said = MEASURED[task]
    measured = metrics | {"loss": 1.0} | ({} if task == "regression" else {"accuracy": 0.25})
    found = record(task, measured)
    assert said in how_good(found)
    names = [name for name, _ in key_numbers(found)]
    assert ("accuracy" in names) == (task != "regression")
    assert all(value != "–" for name, value in key_numbers(found) if name != "macro-F1" or "macro_f1" in metrics)


def test_what_was_not_measured_is_not_made_up() -> None:
    assert how_good(record("tokens", {})) == "The shared model has not been evaluated on test examples."
    assert (
        how_good(record("classification", {"loss": 0.5}))
        == "The shared model has a loss of 0.500 on the test examples."
    )
    assert how_good(record("classification", {"accuracy": 0.5})).endswith("for 50.0 % of the test examples.")


def test_accuracy_stands_beside_the_commonest_label() -> None:
    """The report shows that label's share, and says if the model is no better. For entities, F1 precedes accuracy."""
    common = {"commonest": {"share": 0.5, "of": 400}}
    worse, better = (
        replace(record("classification", {"accuracy": accuracy}), result={**common, "accuracy": accuracy})
        for accuracy in (0.52, 0.8)
    )
    assert ("share of the commonest label", "50.0 %") in key_numbers(worse)
    assert "The accuracy of 52.0% is no better than always giving the commonest label" in how_good(worse)
    assert "no better" not in how_good(better)
    tags = replace(record("tokens", {"f1": 0.3, "accuracy": 0.9}), result={**common, "accuracy": 0.9})
    assert [name for name, _ in key_numbers(tags)][:2] == ["F1", "accuracy"]
