"""Labels and numbers of whole texts, compared with scikit-learn, SciPy and loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor, nn

from secure_fed import RunConfig
from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.learning.data.rows import Rows, Table
from secure_fed.learning.tasks import build, classification, multi_label, regression
from secure_fed.learning.tasks.classification import weights
from tests.cells import every
from tests.golden import refused


class Told(nn.Module):
    """A model that returns the scores in its batch."""

    def forward(self, scores: Tensor) -> Tensor:
        return scores


def batches(scores: Tensor, labels: Tensor, size: int = 8) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(labels), size):
        yield {"scores": scores[start : start + size], "labels": labels[start : start + size]}


def table(cells: list[object], source: str = "x.jsonl") -> Table:
    texts: list[object] = [f"text {index}" for index in range(len(cells))]
    return Table(source, {"text": texts, "label": cells}, ("text", "label"), range(1, len(cells) + 1))


def read(task: str, cells: list[object], test: list[object] | None = None, **settings: Any) -> tuple[Rows, Rows]:
    return build(DataConfig(task=task, **settings)).read([table(cells)], [] if test is None else [table(test, "t.csv")])


# Several labels


@every("seed", [0, 1])
def test_scores_of_labels_are_those_of_scikit_learn(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(37, 5, generator=generator)
    labels = (torch.rand(37, 5, generator=generator) < 0.3).float()
    scores[:, 4], labels[:, 4] = -9.0, 0.0  # a label that never occurs and is never predicted
    guess = (scores > 0).int().numpy()
    found = multi_label.metrics(Told(), batches(scores, labels))
    truth = labels.int().numpy()
    assert found["accuracy"] == pytest.approx(accuracy_score(truth, guess))
    assert found["micro_f1"] == pytest.approx(f1_score(truth, guess, average="micro"))
    assert found["macro_f1"] == pytest.approx(f1_score(truth[:, :4], guess[:, :4], average="macro"))
    each = multi_label.loss(Told(), {"scores": scores, "labels": labels})
    shares = scores.double().sigmoid()
    naive = [
        -sum(math.log(float(shares[i, j] if labels[i, j] else 1 - shares[i, j])) for j in range(5)) / 5
        for i in range(37)
    ]
    assert each.tolist() == pytest.approx(naive, rel=1e-4)
    assert found["loss"] == pytest.approx(sum(naive) / 37, rel=1e-4)


def test_what_has_no_figure(recwarn: pytest.WarningsRecorder) -> None:
    found = multi_label.metrics(Told(), batches(torch.full((4, 2), -1.0), torch.zeros(4, 2)))
    assert found["accuracy"] == 1
    assert math.isnan(found["micro_f1"])
    constant = regression.correlations(np.ones(4), np.arange(4.0))
    assert math.isnan(constant["pearson"])
    assert math.isnan(constant["spearman"])
    assert not recwarn.list


def test_labels_and_numbers_are_read_from_lists_and_from_texts() -> None:
    train, test = read("multi_label", [["b", "a"], [], "c; a", ["a", "a"]], [["c"]])
    assert train.label_names == ("a", "b", "c")
    assert train.label == ((0, 1), (), (0, 2), (0,))
    assert test.label == ((2,),)
    numbers, _ = read("regression", [1, 2.5, " 3e1 ", "-4"])
    assert (numbers.label, numbers.label_names) == ((1.0, 2.5, 30.0, -4.0), ())


@every("cells", [[["a"], 7], [["a"], ["b", None]], [[1, 0], [1, 0, 1]], [[], []], [["a"], ["b", 3]]])
def test_lists_that_are_none_are_refused(cells: list[object]) -> None:
    with refused(DataError):
        read("multi_label", cells)


def test_strata_of_labels_go_by_the_set() -> None:
    task = build(DataConfig(task="multi_label"))
    rows, _ = read("multi_label", [["a", "b"], ["b", "a"], [], ["a"], []])
    strata = task.strata(rows, 0)
    assert strata[0] == strata[1]
    assert strata[2] == strata[4]
    assert len(set(strata)) == 3


# Numbers


def test_numbers_are_scaled_by_the_settings_alone() -> None:
    task = build(DataConfig(task="regression", label_centre=2.0, label_scale=4.0))
    guess, truth = np.array([0.5, -1.0, 2.0, 0.25]), np.array([4.0, -2.0, 9.0, 3.0])
    batch = {"scores": torch.tensor(guess[:, None]), "labels": torch.tensor((truth - 2) / 4)}
    found = task.metrics(())(Told(), [batch])
    assert found["rmse"] == pytest.approx(math.sqrt(np.mean((2 + 4 * guess - truth) ** 2)), rel=1e-6)
    assert found["loss"] == pytest.approx(np.mean((guess - (truth - 2) / 4) ** 2), rel=1e-6)
    assert found["pearson"] == pytest.approx(pearsonr(guess, truth).statistic)
    assert found["spearman"] == pytest.approx(spearmanr(guess, truth).statistic)
    assert "accuracy" not in found
    assert [one["value"] for one in task.answers(Told(), {"scores": batch["scores"].float()}, ())] == pytest.approx(
        2 + 4 * guess
    )


@every("cell", ["high", None, True, "nan", "", [1.0], "inf"])
def test_what_is_no_number_is_refused(cell: object) -> None:
    with refused(DataError):
        read("regression", [1.0, cell])


def test_strata_of_numbers_are_tenths() -> None:
    task = build(DataConfig(task="regression"))
    values = np.random.default_rng(0).permutation(100).astype(float)
    rows = Rows(("x",) * 100, tuple(values), ())
    strata = task.strata(rows, 0)
    assert np.bincount(strata).tolist() == [10] * 10
    assert all(stratum == value // 10 for stratum, value in zip(strata, values, strict=True))
    assert set(task.strata(Rows(("x",) * 5, (1.0,) * 5, ()), 0)) == {0}


# Public shares of classes


@pytest.mark.parametrize("priors", [(0.8, 0.2), ("b=0.2", "a = 0.8"), ("0.8", "0.2")])
def test_a_class_weighs_by_its_inverse_public_share(priors: Any) -> None:
    task = build(DataConfig(class_priors=priors))
    batch = {"scores": torch.randn(6, 2), "labels": torch.tensor([0, 1, 1, 0, 0, 1])}
    plain, weighed = classification.loss(Told(), batch), task.loss(("a", "b"))(Told(), batch)
    expected = [float(one) / (2 * (0.2 if label else 0.8)) for one, label in zip(plain, batch["labels"], strict=True)]
    assert weighed.tolist() == pytest.approx(expected, rel=1e-5)
    shares = torch.tensor([0.8, 0.2])
    assert float((weights(priors, ("a", "b")) * shares).sum()) == pytest.approx(1)


def test_without_public_shares_all_classes_weigh_the_same() -> None:
    assert build(DataConfig()).loss(("a", "b")) is classification.loss


@every(
    "priors", [(0.5,), ("a=0.5", "c=0.5"), ("a=0.5", "a=0.5"), ("a=0.5", "0.5"), (0.5, 0.6), (0.0, 1.0), ("a=x", "b=1")]
)
def test_shares_that_are_none_are_refused(priors: Any) -> None:
    with refused(ConfigError):
        weights(priors, ("a", "b"))


def test_public_shares_are_a_setting() -> None:
    assert RunConfig.load(None, ["data.class_priors=[0.9, 0.1]"]).data.class_priors == (0.9, 0.1)
    assert RunConfig.load(None, ['data.class_priors=["a=1", "b=0"]']).data.class_priors == ("a=1", "b=0")
    with refused(ConfigError):
        RunConfig.load(None, ['data.class_priors=[0.9, "b=0.1"]'])
    with refused(ConfigError):
        RunConfig.load(None, ["data.train=x.csv", "data.task=regression", "data.class_priors=[0.9, 0.1]"])
