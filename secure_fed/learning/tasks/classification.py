"""Sequence classification, of one text or of a pair: the loss of each example, and accuracy and macro-F1.

The texts and labels are private. The names of the classes are public, and so is `data.class_priors` if it is set: shares of the
classes that are known without the data. The loss of class c is then weighted by 1 / (classes * prior_c), so that the mean
weight under these priors is one. Weights counted on the clients' data would reveal their label histograms, and are not
supported.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError, ModelError
from secure_fed.learning.data.encode import IGNORED, Collate, Encoded, Item, encode, pad_id, whole_numbers
from secure_fed.learning.data.rows import Rows, Table, Vocabulary, columns_of, vocabulary_of
from secure_fed.learning.tasks.task import Answer, Loss, Metrics, Task, finite, outputs_named

_ROUNDED = 0.01  # tolerance for the sum of rounded shares


def logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(B, classes) float32 scores, from a model that returns them, or an object or a dict that has them as `logits`."""
    output: Any = model(**{name: value for name, value in batch.items() if name != "labels"})
    scores = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(scores, Tensor) or scores.ndim != 2:
        shape = f" of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else ""
        raise ModelError(
            f"the model returned a {type(output).__name__}{shape}, which has no `logits` of shape (examples, classes): return "
            "such logits, or give Federation a loss= and metrics= that read this output"
        )
    return scores.float()


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(B,) cross-entropies, one an example: no example's loss depends on another."""
    return functional.cross_entropy(logits(model, batch), batch["labels"], reduction="none")


def known_classes(items: Sequence[Item], name: str, width: int, *, count: int) -> Tensor:
    """(B,) the class of each item, one of `count`, or `IGNORED`; any other is refused."""
    found = whole_numbers(items, name, width)
    wrong = found[(found != IGNORED) & ((found < 0) | (found >= count))]
    if len(wrong):
        raise DataError(
            f"{name!r} of an item is {int(wrong[0])}, and the model's {count} classes are 0 to {count - 1}; correct it, or "
            "give Federation a model with a larger num_labels"
        )
    return found


def weighed_loss(model: nn.Module, batch: Mapping[str, Tensor], *, by_class: Tensor) -> Tensor:
    """(B,) cross-entropies, each times the weight of its example's class: (classes,)."""
    return loss(model, batch) * by_class.to(batch["labels"].device)[batch["labels"]]


def metrics(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """accuracy, macro_f1 and mean loss, without weights of classes.

    Macro-F1 is the mean of the F1 of every class that occurs among labels or predictions, as scikit-learn has it.
    """
    found = [(logits(model, batch), batch["labels"]) for batch in batches]
    all_scores, truth = map(torch.cat, zip(*found, strict=True))
    guess, count = all_scores.argmax(1), partial(torch.bincount, minlength=all_scores.shape[1])
    return {
        "accuracy": float((guess == truth).double().mean()),
        "macro_f1": f1_scores(count(truth[guess == truth]), count(guess) + count(truth))["macro_f1"],
        "loss": float(functional.cross_entropy(all_scores, truth)),
    }


def f1_scores(right: Tensor, given: Tensor) -> dict[str, float]:
    """micro_f1 over all answers, and macro_f1, the mean over the classes that occur among truth or guesses.

    right: (classes,) numbers of right answers. given: (classes,) numbers of guesses plus numbers of true labels.
    F1 = 2 right / (guessed + true); not-a-number if no class occurs at all.
    """
    right, given, present = right.double(), given.double(), given > 0
    if not present.any():
        return {"micro_f1": math.nan, "macro_f1": math.nan}
    return {
        "micro_f1": float(2 * right.sum() / given.sum()),
        "macro_f1": float((2 * right[present] / given[present]).mean()),
    }


@dataclass(frozen=True)
class Classification(Task):
    """One class of each text or pair."""

    priors: tuple[str, ...] | tuple[float, ...] = ()

    auto = "AutoModelForSequenceClassification"
    unlabelled = 0

    @property
    def title(self) -> str:
        return "classification of text pairs" if self.columns.text_b else "text classification"

    @property
    def beside(self) -> tuple[str, ...]:
        return (f"{self.columns.label}_name",)

    def model_settings(self, label_names: Sequence[str]) -> dict[str, Any]:
        return outputs_named(label_names)

    def classes(self, train: Sequence[Table]) -> Vocabulary:
        return vocabulary_of(train, self.columns.label)

    def labels(self, tables: Sequence[Table], classes: Vocabulary) -> Sequence[Any]:
        return classes.encode(tables, self.columns.label)

    def counted(self, rows: Rows) -> Iterable[Hashable]:
        return rows.label

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


def weights(priors: Sequence[str] | Sequence[float], label_names: Sequence[str]) -> Tensor:
    """(classes,) of 1 / (classes * share): of mean one under the shares.

    priors: a share for every class in the order of `label_names`, or "name=share" in any order.
    """
    shares = [_share(prior) for prior in priors]
    names = [name for name, _ in shares]
    if None in names and any(name is not None for name in names):
        raise ConfigError(
            f"data.class_priors is {list(priors)}; give a share of every class in their order, or 'name=share' of every one"
        )
    expected = [None] * len(label_names) if None in names else sorted(label_names)
    if (names if None in names else sorted(map(str, names))) != expected:
        raise ConfigError(
            f"data.class_priors is {list(priors)!r:.200}, but the {len(label_names)} classes are "
            f"{', '.join(label_names)!r:.200}; give each of them one share"
        )
    total = sum(share for _, share in shares)
    if abs(total - 1) > _ROUNDED:
        raise ConfigError(f"the shares of data.class_priors add up to {total:g}; make them add up to 1")
    by_name = dict(shares)
    in_order = [share for _, share in shares] if None in names else [by_name[name] for name in label_names]
    return torch.tensor([1 / (len(in_order) * share) for share in in_order])


def _share(prior: str | float) -> tuple[str | None, float]:
    name, equals, text = prior.rpartition("=") if isinstance(prior, str) else ("", "", str(prior))
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ConfigError(f"data.class_priors holds {prior!r}; give a share above 0 and at most 1, or 'name=share'")
    return (name.strip() if equals else None), share


def build(data: DataConfig) -> Classification:
    return Classification(columns_of(data), data.class_priors)
