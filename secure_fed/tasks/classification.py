"""Sequence classification, of one text or of a pair: the loss of each example, and accuracy and macro-F1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(B, classes) float32 scores; takes models that return a tensor and those that return an object with `logits`."""
    output: Any = model(**{name: value for name, value in batch.items() if name != "labels"})
    scores: Tensor = getattr(output, "logits", output)
    return scores.float()


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(B,) cross-entropies, one an example: no example's loss depends on another."""
    return functional.cross_entropy(logits(model, batch), batch["labels"], reduction="none")


def metrics(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """accuracy, macro_f1 and mean loss.

    Macro-F1 is the mean of the F1 of every class that occurs among labels or predictions, as scikit-learn has it.
    """
    scores, labels = [], []
    for batch in batches:
        scores.append(logits(model, batch))
        labels.append(batch["labels"])
    all_scores, truth = torch.cat(scores), torch.cat(labels)
    guess = all_scores.argmax(1)
    return {
        "accuracy": float((guess == truth).double().mean()),
        "macro_f1": _macro_f1(guess, truth, all_scores.shape[1]),
        "loss": float(functional.cross_entropy(all_scores, truth)),
    }


def _macro_f1(guess: Tensor, truth: Tensor, classes: int) -> float:
    right = torch.bincount(truth[guess == truth], minlength=classes).double()
    named = torch.bincount(guess, minlength=classes).double() + torch.bincount(truth, minlength=classes).double()
    present = named > 0
    return float((2 * right[present] / named[present]).mean())
