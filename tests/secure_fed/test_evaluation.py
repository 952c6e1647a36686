"""Metrics over a test set and over clients, and how well answers agree with references.

Agreement is compared with cases worked out by hand and with figures of another implementation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from secure_fed.errors import ConfigError
from secure_fed.learning.evaluation import agreement, evaluate, exact_match, picked, rouge_l
from secure_fed.learning.tasks import classification
from secure_fed.runs.evaluation import across_clients
from tests.secure_fed import toys

CPU = torch.device("cpu")


def test_metrics_are_those_of_all_examples_at_once_whatever_the_batches() -> None:
    model, examples = toys.model(dropout=0.5), toys.examples(1, 13)
    scores = model.eval()(torch.stack([example["x"] for example in examples])).detach()
    labels = torch.tensor([example["labels"] for example in examples])
    for size in (1, 4, 100):
        found = evaluate(model.train(), examples, default_collate, classification.metrics, size, CPU)
        assert found["accuracy"] == pytest.approx(float((scores.argmax(1) == labels).double().mean()))
        assert found["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(scores, labels)), rel=1e-5)


def test_evaluation_needs_no_gradients_and_no_dropout() -> None:
    def metrics(model: Any, batches: Any) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        return {"examples": float(sum(len(batch["labels"]) for batch in batches))}

    assert evaluate(toys.model().train(), toys.examples(1, 7), default_collate, metrics, 3, CPU) == {"examples": 7.0}


@pytest.mark.parametrize(("clients", "worst"), [(1, 0.0), (9, 0.0), (20, 0.5), (25, 0.5), (30, 1.0)])
def test_worst_decile_is_the_mean_of_the_worst_tenth(clients: int, worst: float) -> None:
    found = across_clients([{"accuracy": float(rank)} for rank in reversed(range(clients))], "accuracy")
    assert found == {"mean": (clients - 1) / 2, "worst_decile": worst}


def test_metrics_that_lack_the_compared_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.per_client compares clients by 'accuracy'"):
        across_clients([{"accuracy": 1.0}, {"error": 0.5}], "accuracy")


GSM8K = "#### (.*)"


@pytest.mark.parametrize(
    ("answer", "reference", "pattern", "expected"),
    [
        ("Paris", " paris\n", "", 1),
        ("New  York", "new york", "", 1),
        ("Paris.", "Paris", "", 0),
        ("", "", "", 1),
        ("he has 3 left\n#### 3", "3 + 4 = 7\n#### 3", GSM8K, 1),
        ("he has 3 left\n#### 3", "3 + 4 = 7\n#### 7", GSM8K, 0),
        ("#### 3\n#### 4", "#### 3", GSM8K, 1),  # the first match counts
        ("it is 3", "#### 3", GSM8K, 0),
        ("it is 3", "it is 3", GSM8K, 0),
        ("so B", "the answer is (b)", r"[A-Da-d]\b", 1),
        ("x", "y", "(z)?", 1),  # a group that takes no part in a match is empty
    ],
)
def test_exact_match(answer: str, reference: str, pattern: str, expected: int) -> None:
    assert exact_match(answer, reference, pattern) == expected
    assert agreement("exact_match", pattern)(answer, reference) == expected


def test_a_pattern_picks_its_first_group_or_its_match() -> None:
    assert picked("a 12 b 34", r"b (\d+)") == "34"
    assert picked("a 12 b 34", r"\d+") == "12"
    assert picked("a", r"\d+") is None
    assert picked("a", "") == "a"


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("the cat was found under the bed", "the cat was under the bed", 0.923076923076923),
        ("police kill the gunman", "police killed the gunman", 0.75),
        ("the gunman kill police", "police killed the gunman", 0.5),
        ("A, b; c d!", "a c b d e", 0.6666666666666665),
        ("one two three four five six", "six five four three two one", 0.16666666666666666),
        ("x", "y z", 0.0),
        ("Tiny little words, tiny words.", "words tiny little", 0.5),
    ],
)
def test_rouge_l_is_that_of_the_library_rouge_score(answer: str, reference: str, expected: float) -> None:
    """Figures of rouge-score 0.1.2 (fmeasure, no stemmer)."""
    assert rouge_l(answer, reference) == pytest.approx(expected)
    assert agreement("rouge_l")(answer, reference) == pytest.approx(expected)


def longest(one: Sequence[str], other: Sequence[str]) -> int:
    """By trying all subsequences."""
    everywhere = [{*itertools.combinations(words, size)} for words in (one, other) for size in range(len(one) + 1)]
    half = len(everywhere) // 2
    return max(size for size in range(half) if everywhere[size] & everywhere[half + size])


def test_rouge_l_counts_the_longest_common_subsequence() -> None:
    for one in itertools.product("abc", repeat=4):
        for other in (("a", "b", "c", "a"), ("c", "c", "a", "b"), ("b", "b", "b", "b")):
            assert rouge_l(" ".join(one), " ".join(other)) == pytest.approx(longest(one, other) / 4)


def test_rouge_l_reads_words_of_every_script() -> None:
    assert rouge_l("кошка спит", "Кошка не спит") == pytest.approx(0.8)
    assert rouge_l("", "") == 1
    assert rouge_l("", "a") == rouge_l("a", "?") == 0


def test_f1_is_that_of_squad() -> None:
    assert agreement("f1")("The cat sat", "a cat sat down.") == pytest.approx(2 * 2 / 5)
