"""The losses and metrics of classification, compared with scikit-learn's and PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss
from torch import Tensor, nn

from secure_fed.errors import ModelError
from secure_fed.learning.tasks import classification
from tests.cells import every


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


def test_a_class_that_neither_occurs_nor_is_guessed_counts_for_nothing() -> None:
    scores = torch.tensor([[9.0, 0, 0, 0], [0, 9.0, 0, 0], [0, 9.0, 0, 0]])
    found = classification.metrics(Told(), batches(scores, torch.tensor([0, 1, 0]), 2))
    assert found["macro_f1"] == pytest.approx((2 / 3 + 2 / 3) / 2)


@pytest.mark.parametrize("wrap", [True, False])
def test_the_loss_is_one_number_an_example(wrap: bool) -> None:
    scores, labels = drawn(0, 4, 4)
    losses = classification.loss(Told(wrap), {"scores": scores, "labels": labels})
    alone = [float(nn.CrossEntropyLoss()(scores[row], labels[row])) for row in range(len(labels))]
    assert losses.shape == (37,)
    assert losses.tolist() == pytest.approx(alone, rel=1e-5)


def test_an_example_does_not_move_the_loss_of_another() -> None:
    scores, labels = drawn(1, 3, 3)
    scores.requires_grad_()
    classification.loss(Told(), {"scores": scores, "labels": labels})[5].backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    assert scores.grad.any(1).nonzero().flatten().tolist() == [5]


def test_half_precision_scores_are_judged_in_single() -> None:
    scores, labels = drawn(2, 3, 3)
    half = scores.bfloat16()
    losses = classification.loss(Told(), {"scores": half, "labels": labels})
    assert losses.dtype == torch.float32
    assert torch.equal(losses, classification.loss(Told(), {"scores": half.float(), "labels": labels}))


@pytest.mark.parametrize("as_dict", [True, False])
def test_logits_are_read_from_a_dict_and_other_outputs_are_refused_in_one_sentence(as_dict: bool) -> None:
    scores, labels = drawn(3, 4, 4)
    batch = {"scores": scores, "labels": labels}
    if as_dict:
        assert torch.equal(classification.logits(lambda scores: {"logits": scores}, batch), scores)  # type: ignore[arg-type]
        return
    for output in ((scores,), {"hidden": scores}, scores[:, None, :]):
        with pytest.raises(
            ModelError, match=r"has no `logits` of shape \(examples, classes\): return such logits, or give"
        ):
            classification.logits(lambda scores, output=output: output, batch)  # type: ignore[arg-type, misc]
