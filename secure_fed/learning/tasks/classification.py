"""Sequence classification, of one text or of a pair: the loss of each example, and accuracy and macro-F1.

Private are the texts and labels. Public are the names of the classes, and `data.class_priors` where it is set: shares of the
classes that are known without looking at the data. The loss of class c is then weighed by 1 / (classes * prior_c), so that
its mean weight under these priors is one. Weights counted on the clients' data would tell their label histograms, and are
not to be had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.learning.data.columns import Columns, Texts
from secure_fed.learning.data.encode import Collate, Encoded, encode, pad_id
from secure_fed.learning.data.labels import learn
from secure_fed.learning.tasks import sequences
from secure_fed.learning.tasks.priors import weights
from secure_fed.learning.tasks.task import Answer, finite

if TYPE_CHECKING:
    from secure_fed.config import DataConfig
    from secure_fed.learning.data.files import Table
    from secure_fed.learning.data.rows import Rows
    from secure_fed.learning.tasks.task import Loss, Metrics


def logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(B, classes) float32 scores; takes models that return a tensor and those that return an object with `logits`."""
    output: Any = model(**{name: value for name, value in batch.items() if name != "labels"})
    scores: Tensor = getattr(output, "logits", output)
    return scores.float()


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(B,) cross-entropies, one an example: no example's loss depends on another."""
    return functional.cross_entropy(logits(model, batch), batch["labels"], reduction="none")


def weighed_loss(model: nn.Module, batch: Mapping[str, Tensor], *, by_class: Tensor) -> Tensor:
    """(B,) cross-entropies, each times the weight of its example's class: (classes,)."""
    return loss(model, batch) * by_class.to(batch["labels"].device)[batch["labels"]]


def metrics(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """accuracy, macro_f1 and mean loss, without weights of classes.

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


@dataclass(frozen=True)
class Classification:
    """One class of each text or pair."""

    columns: Columns
    priors: tuple[str, ...] | tuple[float, ...] = ()

    auto = "AutoModelForSequenceClassification"
    keeps_head = False
    unlabelled = 0

    @property
    def title(self) -> str:
        return "classification of text pairs" if self.columns.text_b else "text classification"

    @property
    def beside(self) -> tuple[str, ...]:
        return (f"{self.columns.label}_name",)

    def model_settings(self, label_names: Sequence[str]) -> dict[str, Any]:
        return sequences.named(label_names)

    def texts(self, tables: Sequence[Table]) -> Texts:
        return sequences.read_texts(tables, self.columns)

    def line(self, text: Any) -> Any:
        return text

    def read(self, train: Sequence[Table], test: Sequence[Table]) -> tuple[Rows, Rows]:
        vocabulary = learn(train, self.columns.label)
        made = [
            sequences.labelled(tables, self.columns, vocabulary.encode(tables, self.columns.label), vocabulary.names)
            for tables in (train, test)
        ]
        return made[0], made[1]

    def strata(self, rows: Rows, seed: int) -> Sequence[int]:
        return rows.label

    def encode(self, tokenizer: Any, rows: Rows, max_length: int) -> Encoded:
        return encode(tokenizer, rows, max_length)

    def collate(self, tokenizer: Any) -> Collate:
        return Collate(pad_id(tokenizer))

    def loss(self, label_names: Sequence[str]) -> Loss:
        return partial(weighed_loss, by_class=weights(self.priors, label_names)) if self.priors else loss

    def metrics(self, label_names: Sequence[str]) -> Metrics:
        return metrics

    def answers(self, model: nn.Module, batch: Mapping[str, Any], label_names: Sequence[str]) -> list[Answer]:
        """The class and its probability."""
        best = finite(logits(model, batch)).softmax(1).max(1)
        return [
            {"label": label_names[int(label)], "probability": round(float(probability), 6)}
            for probability, label in zip(*best, strict=True)
        ]


def build(data: DataConfig) -> Classification:
    return Classification(sequences.USUAL.chosen(data), data.class_priors)
