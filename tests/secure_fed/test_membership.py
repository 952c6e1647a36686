"""The membership inference figure that every run reports beside its accuracy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from secure_fed.learning.audit_pool.unit import Unit
from secure_fed.learning.tasks.confidence import of_classes, of_likelihood
from secure_fed.runs.membership import EXAMPLES, looked_at, mean_of_units, of_data
from tests.secure_fed import toys
from tests.secure_fed.test_holding import CLIENT, numbered

CLASSES = 12  # a label that was not learned is seldom guessed
OVERFIT = {
    "method.modules_to_save": ["first", "classifier"],
    "method.target_modules": "query",
    "federation.rounds": 4,
    "training.lr": 0.01,
    "training.steps": 40,
    "training.batch_size": 64,
    "evaluation.audit_fraction": 1.0,
    "evaluation.every": 4,
}


def test_a_model_that_knows_its_examples_by_heart_is_caught() -> None:
    train = [[{**item, "labels": i % CLASSES} for i, item in enumerate(own)] for own in numbered((40, 40))]
    result = toys.federation(OVERFIT, train=train, model=Wide()).run()
    found = result.summary["membership"]
    assert found["auc"] > 0.9
    assert found["auc_interval"][0] > 0.8
    assert found["members"] + found["non_members"] == 80


class Wide(torch.nn.Module):
    """A model wide enough to memorise random labels."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = torch.nn.Linear(6, 256)
            self.query = torch.nn.Linear(256, 64)
            self.classifier = torch.nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.query(self.first(3 * x).relu()).relu())
        return scores


def test_a_model_that_did_not_train_is_at_chance() -> None:
    result = toys.federation(
        {"evaluation.audit_fraction": 1.0, "training.lr": 1e-12}, train=numbered((150, 150, 150))
    ).run()
    low, high = result.summary["membership"]["auc_interval"]
    assert low < 0.5 < high


def test_small_runs_say_why_nothing_was_measured() -> None:
    found = toys.federation().run().summary["membership"]
    assert found["auc"] is found["auc_interval"] is found["tpr_at_fpr"] is None
    assert "too few" in found["why"]


def test_with_privacy_for_clients_the_units_are_clients() -> None:
    settings = {**CLIENT, "evaluation.audit_fraction": 0.6}
    federation = toys.federation(settings, train=numbered((3,) * 80))
    result = federation.run()
    found = of_data(federation.assembly, result.state)
    assert found is not None
    assert found["unit"] == "client"
    assert found["non_members"] == 80 - result.summary["clients"]
    assert any("membership" in words for words in result.summary["privacy"]["not_covered"])


def test_a_unit_counts_by_the_mean_of_a_few_of_its_examples() -> None:
    units = [Unit("a", "a", list(range(100))), Unit("b", "b", [7]), Unit("c", "c", [])]
    examples, owner = looked_at(units)
    assert len(examples) == EXAMPLES + 1
    means = mean_of_units(np.array([*range(EXAMPLES), 7.0]), owner, 3)
    assert means[0] == pytest.approx(np.mean(range(EXAMPLES)))
    assert means[1] == 7
    assert np.isfinite(means[2])


def test_the_logit_of_a_probability_is_exact_where_float32_has_ended() -> None:
    scores = torch.tensor([[40.0, 0.0, 1.0], [0.0, 0.0, 0.0], [-3.0, 5.0, 0.5]])
    labels = torch.tensor([0, 1, 2])
    p = scores.double().softmax(1).gather(1, labels[:, None]).squeeze(1)
    found = of_classes(scores, labels)
    assert found.dtype == torch.float64
    assert found[0] == pytest.approx(40 - np.log(1 + np.e))
    assert torch.allclose(found[1:], torch.log(p / (1 - p))[1:])
    assert torch.allclose(of_likelihood(torch.log(p[1:])), torch.log(p / (1 - p))[1:])
    assert torch.isfinite(of_likelihood(torch.tensor([0.0, -1e-9, -800.0]))).all()
