"""Losses, metrics and agreement of answers, the best model, and the end of a run that stalls.

Classification is compared with scikit-learn and PyTorch, agreement with cases worked out by hand and with figures of another
implementation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss
from torch import Tensor, nn
from torch.utils.data import default_collate

from secure_fed.commands.cli import main
from secure_fed.errors import ConfigError, ModelError
from secure_fed.learning.evaluation import agreement, evaluate, exact_match, rouge_l
from secure_fed.learning.tasks import classification
from secure_fed.runs.evaluation import across_clients, best, stalled
from secure_fed.runs.store import read_best, read_records
from tests.cells import every
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.conftest import Refuses

CPU = torch.device("cpu")


class Told(nn.Module):
    """A model that returns the scores in the batch as its logits."""

    def __init__(self, wrap: bool = False) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, scores: Tensor) -> Any:
        return SimpleNamespace(logits=scores) if self.wrap else scores


def batches(scores: Tensor, labels: Tensor, size: int) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(labels), size):
        yield {"scores": scores[start : start + size], "labels": labels[start : start + size]}


def drawn(seed: int, classes: int, labelled: int) -> tuple[Tensor, Tensor]:
    """Scores and labels of 37 examples, whose labels are among the first `labelled` classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(37, classes, generator=generator), torch.randint(labelled, (37,), generator=generator)


@every("size", [1, 8, 37, 100])
@every(("classes", "labelled"), [(2, 2), (5, 5), (5, 3), (40, 10)])
def test_metrics_are_those_of_scikit_learn(classes: int, labelled: int, size: int) -> None:
    scores, labels = drawn(size + classes, classes, labelled)
    found = classification.metrics(Told(), batches(scores, labels, size))
    guess = scores.argmax(1)
    assert found["accuracy"] == pytest.approx(accuracy_score(labels, guess))
    assert found["macro_f1"] == pytest.approx(f1_score(labels, guess, average="macro"))
    probabilities = scores.double().softmax(1)
    assert found["loss"] == pytest.approx(log_loss(labels, probabilities, labels=range(classes)), rel=1e-5)


@every("wrap", [True, False])
def test_the_loss_is_one_number_an_example(wrap: bool) -> None:
    scores, labels = drawn(0, 4, 4)
    losses = classification.loss(Told(wrap), {"scores": scores, "labels": labels})
    alone = [float(nn.CrossEntropyLoss()(scores[row], labels[row])) for row in range(len(labels))]
    assert losses.shape == (37,)
    assert losses.tolist() == pytest.approx(alone, rel=1e-5)


def test_half_precision_scores_are_judged_in_single() -> None:
    scores, labels = drawn(2, 3, 3)
    half = scores.bfloat16()
    losses = classification.loss(Told(), {"scores": half, "labels": labels})
    assert losses.dtype == torch.float32
    assert torch.equal(losses, classification.loss(Told(), {"scores": half.float(), "labels": labels}))


def test_logits_are_read_from_a_dict_and_other_outputs_are_refused_in_one_sentence() -> None:
    scores, labels = drawn(3, 4, 4)
    batch: Any = {"scores": scores, "labels": labels}
    model: Any = {"logits": scores}
    assert torch.equal(classification.logits(lambda scores: model, batch), scores)  # type: ignore[arg-type]
    for output in ((scores,), {"hidden": scores}, scores[:, None, :]):
        with refused(ModelError):
            classification.logits(lambda scores, output=output: output, batch)  # type: ignore[arg-type, misc]


def test_evaluation_needs_no_gradients_and_no_dropout() -> None:
    def metrics(model: Any, batches: Any) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        return {"examples": float(sum(len(batch["labels"]) for batch in batches))}

    assert evaluate(toys.model().train(), toys.examples(1, 7), default_collate, metrics, 3, CPU) == {"examples": 7.0}


@every(("clients", "worst"), [(1, 0.0), (9, 0.0), (20, 0.5), (25, 0.5), (30, 1.0)])
def test_worst_decile_is_the_mean_of_the_worst_tenth(clients: int, worst: float) -> None:
    found = across_clients([{"accuracy": float(rank)} for rank in reversed(range(clients))], "accuracy")
    assert found == {"mean": (clients - 1) / 2, "worst_decile": worst}


GSM8K = "#### (.*)"


@every(
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


@every(
    ("answer", "reference", "expected"),
    [
        ("the cat was found under the bed", "the cat was under the bed", 0.923076923076923),
        ("police kill the gunman", "police killed the gunman", 0.75),
        ("the gunman kill police", "police killed the gunman", 0.5),
        ("A, b; c d!", "a c b d e", 0.6666666666666665),
        ("one two three four five six", "six five four three two one", 0.16666666666666666),
        ("x", "y z", 0.0),
        ("Tiny little words, tiny words.", "words tiny little", 0.5),
        ("кошка спит", "Кошка не спит", 0.8),  # in every script, which the library does not read
        ("", "", 1.0),
        ("", "a", 0.0),
        ("a", "?", 0.0),
    ],
)
def test_rouge_l_is_that_of_the_library_rouge_score(answer: str, reference: str, expected: float) -> None:
    """Figures of rouge-score 0.1.2 (fmeasure, no stemmer)."""
    assert rouge_l(answer, reference) == pytest.approx(expected)
    assert agreement("rouge_l")(answer, reference) == pytest.approx(expected)


def test_f1_is_that_of_squad() -> None:
    assert agreement("f1")("The cat sat", "a cat sat down.") == pytest.approx(2 * 2 / 5)


ACCURACIES = (0.3, 0.6, 0.5, 0.6, 0.4, 0.9, 0.2)


def rounds(*values: float | None, name: str = "accuracy") -> list[dict[str, Any]]:
    return [{"round": at + 1} | ({} if value is None else {name: value}) for at, value in enumerate(values)]


def chosen(records: list[dict[str, Any]], task: str = "classification") -> int | None:
    """The round of the best evaluation."""
    found = best(records, task)
    return None if found is None else found["round"]


def test_the_best_is_the_first_of_the_highest_accuracy_or_of_the_least_loss() -> None:
    assert chosen([]) is None
    assert chosen(rounds(None, None)) is None
    assert chosen(rounds(0.2, None, 0.5, 0.5)) == 3
    assert chosen(rounds(2.0, 0.5, float("nan"), 0.7, name="loss")) == 2


@every("task", ["tokens", "question_answering"])
def test_entities_and_answers_are_chosen_by_f1(task: str) -> None:
    records = [one | {"f1": f1} for one, f1 in zip(rounds(0.95, 0.97, 0.9, 0.96), (0.0, 0.1, 0.5, 0.4), strict=True)]
    assert chosen(records, task) == 3
    assert chosen(records) == 2, "another task's own metric chooses nothing"
    reason = "1 evaluations in a row were no better than the evaluation of round 3, F1 0.5"
    assert stalled(records, 1, task) == reason
    assert stalled(records, 2, task) == ""


def test_evaluations_are_compared_by_one_number() -> None:
    """An accuracy that is once undefined is not replaced by that evaluation's loss."""
    records = [{"round": 1, "accuracy": 0.2, "loss": 5.0}, {"round": 2, "accuracy": float("nan"), "loss": -9.0}]
    assert chosen(records) == 1
    assert chosen(records[1:]) == 2


def test_a_run_is_stalled_after_so_many_evaluations_that_are_no_better() -> None:
    assert stalled(rounds(0.5, 0.4, 0.5), None, "classification") == ""
    assert stalled(rounds(0.5, 0.4), 2, "classification") == ""
    assert stalled(rounds(0.5, None, 0.4, None), 2, "classification") == "", "rounds without an evaluation do not count"
    assert (
        stalled(rounds(0.5, 0.4, 0.5), 2, "classification")
        == "2 evaluations in a row were no better than the evaluation of round 1, accuracy 50.0 %"
    )
    assert stalled(rounds(0.5, 0.4, 0.6, 0.5), 2, "classification") == ""
    assert (
        stalled(rounds(1.5, 2.5, name="loss"), 1, "classification")
        == "1 evaluations in a row were no better than the evaluation of round 1, loss 1.5"
    )


def measuring(values: Sequence[float]) -> Callable[..., dict[str, float]]:
    """A metrics function that returns these accuracies one after the other."""
    left = iter(values)
    return lambda model, batches: {"accuracy": next(left), "loss": 1.0}


def test_a_run_ends_when_it_stalls_and_resumed_stays_ended(tmp_path: Path) -> None:
    settings = {"federation.rounds": 7, "evaluation.patience": 2, "evaluation.keep_best": True}
    built = toys.federation(settings, metrics=measuring(ACCURACIES))
    states: list[Any] = []
    built.callbacks.append(type("Keeping", (), {"on_round_end": lambda self, record, state: states.append(state)})())
    result = built.run(tmp_path / "run")
    assert result.state.round == 4
    assert result.summary["best_round"] == 2
    assert "2 evaluations in a row were no better than the evaluation of round 2" in result.summary["ended_early"]
    assert result.best is not None
    stored = read_best(tmp_path / "run")
    assert stored is not None
    for kept in (result.best, stored.state):
        assert kept.round == 2
        assert toys.same(kept.tensors, states[1].tensors)
        assert not toys.same(kept.tensors, result.state.tensors)
    again = toys.federation(settings, metrics=measuring(())).run(tmp_path / "run", resume=True)
    assert again.state.round == 4
    assert again.best is not None
    assert toys.same(again.best.tensors, result.best.tensors)


def test_a_spent_budget_ends_with_an_evaluation_that_is_kept_and_recorded(tmp_path: Path) -> None:
    settings = {
        **{"privacy.unit": "client", "privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3, "privacy.epsilon": 4.0},
        **{"privacy.on_exhausted": "stop", "federation.rounds": 6, "federation.sampling": "poisson"},
        **{"evaluation.every": 5, "evaluation.keep_best": True},
    }
    result = toys.federation(settings, metrics=measuring((0.3, 0.6))).run(tmp_path / "run")
    assert 1 <= result.state.round < 5
    assert result.best is not None
    assert read_records(tmp_path / "run")[-1]["accuracy"] == result.summary["accuracy"] == 0.3
    again = toys.federation(settings, metrics=measuring(())).run(tmp_path / "run", resume=True)
    assert again.summary["accuracy"] == 0.3


def test_what_is_no_choice_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, "evaluation.keep_best"):
        toys.federation({"evaluation.keep_best": True, "method.personal": "head"})
    wordless = toys.federation({"evaluation.patience": 2}, metrics=lambda model, batches: {"score": 1.0})
    with refused(ConfigError, "evaluation.patience"):
        wordless.run()
    toys.federation().run(tmp_path / "run")
    assert read_best(tmp_path / "run") is None


PRIVATE = ["--set", "privacy.unit=client", "--set", "privacy.noise_multiplier=1", "--set", "privacy.delta=1e-3"]


@pytest.mark.nightly
def test_under_privacy_nothing_is_chosen_by_rows_that_were_held_out_of_the_protected_ones(
    tmp_path: Path, refuses: Refuses
) -> None:
    rows = [{"text": f"word {n}", "label": n % 2, "who": f"c{n % 8}"} for n in range(40)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["--set", f"data.train={tmp_path / 'own.jsonl'}", "--set", "data.client=who", "--set", "federation.rounds=2"]
    run = ["train", *own, *PRIVATE, "--set", "evaluation.patience=1", "--out", str(tmp_path / "run")]
    refuses(*run)
    assert main([*run, "--set", f"data.test={tmp_path / 'own.jsonl'}"]) == 0
