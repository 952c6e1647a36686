"""Metrics over a test set and over clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from secure_fed.errors import ConfigError
from secure_fed.learning.evaluation import evaluate
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
