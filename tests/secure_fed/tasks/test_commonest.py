"""The share of the commonest label in a test set, and accuracies that are no better than it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from secure_fed import Federation, RunConfig
from secure_fed.config import DataConfig
from secure_fed.learning import tasks
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.problem import configured
from secure_fed.learning.tasks.headline import Commonest, commonest_of_items, no_better
from secure_fed.report.for_the_record import accuracy
from secure_fed.report.record import owned
from secure_fed.report.terminal import rows
from secure_fed.runs.result import no_learning
from tests.cells import every
from tests.golden import said
from tests.secure_fed.tasks.conftest import Write


def test_the_share_of_the_commonest_label_and_the_sentence() -> None:
    assert Commonest.among([0, 2, 2, 1]) == Commonest(0.5, 4)
    assert Commonest.among([(0, 1), (), (0, 1)]) == Commonest(2 / 3, 3)
    assert Commonest.among([]) is None
    assert "52.0 % is no better than always giving the commonest label of the test set, 50.0 %" in no_better(
        0.52, Commonest(0.5, 400)
    )
    assert no_better(0.8, Commonest(0.5, 400)) == no_better(None, Commonest(0.5, 4)) == no_better(0.1, None) == ""


@every("accuracy", [0.5, 0.55, 0.6, 0.9, 1.0])
@every("of", [10, 200, 2000])
def test_no_better_is_within_the_interval_of_wilson(accuracy: float, of: int) -> None:
    right = round(accuracy * of)
    low = binomtest(right, of).proportion_ci(0.95, "wilson").low
    assert Commonest(low + 1e-4, of).not_exceeded_by(right / of)
    assert not Commonest(low - 1e-4, of).not_exceeded_by(right / of)


@every(
    ("task", "labels", "expected"),
    [
        ("classification", (0, 1, 1), Commonest(2 / 3, 3)),
        ("multi_label", ((), (0,), (0,), (0, 1)), Commonest(0.5, 4)),
        ("tokens", ((0, 0, 1), (0,)), Commonest(0.75, 4)),
        ("multiple_choice", (1, 1, 0), Commonest(2 / 3, 3)),
        ("regression", (1.0, 1.0), None),
    ],
)
def test_what_each_task_counts(task: str, labels: tuple[object, ...], expected: Commonest | None) -> None:
    built = tasks.build(DataConfig(train="rows.jsonl", task=task))
    assert Commonest.among(built.counted(Rows(("a",) * len(labels), labels, ("x", "y", "z")))) == expected


def test_items_of_the_users_own() -> None:
    labels = [1, np.int64(1), torch.tensor(0)]
    assert commonest_of_items([{"labels": label} for label in labels]) == Commonest(2 / 3, 3)
    assert commonest_of_items([{"labels": 1}, {"labels": [0, 1]}]) is None
    assert commonest_of_items([{"labels": 1.0}]) is None
    assert commonest_of_items([("text", 1)]) is None


def test_a_run_that_learned_nothing_says_so() -> None:
    config = RunConfig().override(
        ["data.examples=60", "data.test_examples=60", "federation.rounds=1", "training.steps=1", "training.lr=1e-9"]
    )
    federation = Federation(config)
    test = federation.assembly.problem.test
    labels = [int(test[number]["labels"]) for number in range(len(test))]
    result = federation.run().summary
    assert result["commonest"] == {"share": max(map(labels.count, labels)) / 60, "of": 60}
    shown = dict(rows(result))
    assert f"; share of the commonest label: {100 * result['commonest']['share']:.1f} %" in shown["accuracy"]
    assert shown["  no learning"] == result["no_learning"]
    said(result["no_learning"], hide=r"\d+\.\d %")


@pytest.mark.parametrize(("rate", "learns"), [(1e-9, False), (0.03, True)])
def test_without_labels_to_count_the_loss_is_compared_with_the_start(rate: float, learns: bool, write: Write) -> None:
    """And a model that never saw such texts is the first reason, of which the user is warned before training."""
    file = write("rows", [{"text": f"note {n}", "label": n % 7} for n in range(40)])
    settings = [f"data.train={file}", f"data.test={file}", "data.task=regression", f"training.lr={rate}"]
    federation = Federation(RunConfig().override([*settings, "federation.clients=2", "federation.rounds=1"]))
    assert sum("was pre-trained on the built-in notes alone" in warning for warning in federation.warnings) == 1
    sentence = federation.run().summary["no_learning"]
    assert (sentence is None) == learns
    if sentence:
        said(sentence, hide=r"\d+\.\d+")


def test_of_rows_held_out_of_private_ones_the_commonest_label_is_not_said(write: Write, tmp_path: Path) -> None:
    """Their labels are private, and the share of the commonest would be released without noise: their number is compared."""
    file = write("rows", [{"text": f"note {n}", "label": n % 2} for n in range(40)])
    held_out = RunConfig().override([f"data.train={file}", "federation.clients=2", "federation.cohort=2"])
    private = ["privacy.unit=example", "privacy.epsilon=8", "federation.rounds=1"]
    assert configured(held_out).commonest is not None
    assert configured(held_out.override(private)).commonest is None
    assert configured(held_out.override([*private, f"data.test={file}"])).commonest == Commonest(0.5, 40)
    nothing = ["privacy.even_if_hopeless=true", "training.steps=1", "training.microbatch=1", "evaluation.dummies=0"]
    federation = Federation(held_out.override([*private, *nothing]))
    federation.run(tmp_path / "run")
    assert no_learning(federation.assembly, {"accuracy": 0.51}, None) == ""
    said(no_learning(federation.assembly, {"accuracy": 0.5}, None))
    assert "; no interval: held-out rows are not counted" in accuracy(owned(tmp_path / "run"))
