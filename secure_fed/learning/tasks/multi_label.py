"""Any number of labels of each text or pair: a column of lists (in CSV: labels with semicolons between them).

The loss of an example is the mean over labels of the binary cross-entropy. A label is predicted if its probability is above one
half: a threshold tuned on data would reveal a number about them. The texts and each text's labels are private; the set of
labels is public.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.config import DataConfig
from secure_fed.errors import DataError
from secure_fed.learning.data.encode import Collate, Encoded, encode, numbers, pad_id
from secure_fed.learning.data.label_skew import label_sets
from secure_fed.learning.data.rows import Rows, Table, Vocabulary, columns_of, vocabulary_of
from secure_fed.learning.tasks.classification import f1_scores, logits
from secure_fed.learning.tasks.task import Answer, Loss, Metrics, Task, finite, outputs_named


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(B,) means over labels of the binary cross-entropy; `labels` is (B, labels) of 0 and 1."""
    return functional.binary_cross_entropy_with_logits(logits(model, batch), batch["labels"], reduction="none").mean(1)


def metrics(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """accuracy (the share of examples with every label right), micro_f1, macro_f1 and mean loss."""
    found = [(logits(model, batch), batch["labels"]) for batch in batches]
    all_scores, all_labels = map(torch.cat, zip(*found, strict=True))
    guess, truth = all_scores > 0, all_labels > 0
    return {
        "accuracy": float((guess == truth).all(1).double().mean()),
        **f1_scores((guess & truth).sum(0), guess.sum(0) + truth.sum(0)),
        "loss": float(functional.binary_cross_entropy_with_logits(all_scores, all_labels)),
    }


@dataclass(frozen=True)
class MultiLabel(Task):
    """`Rows.label` is the sorted indices of an example's labels, perhaps none."""

    auto = "AutoModelForSequenceClassification"
    unlabelled = ()

    @property
    def title(self) -> str:
        return f"labels of {'text pairs' if self.columns.text_b else 'texts'}"

    def model_settings(self, label_names: Sequence[str]) -> dict[str, Any]:
        return outputs_named(label_names) | {"problem_type": "multi_label_classification"}

    def classes(self, train: Sequence[Table]) -> Vocabulary:
        flat = [_one_a_row(table, self.columns.label)[0] for table in train]
        if not any(map(len, flat)):
            raise DataError(f"no row of {train[0].source} has a label; set data.label to a column of lists of labels")
        return vocabulary_of(flat, self.columns.label)

    def labels(self, tables: Sequence[Table], classes: Vocabulary) -> Sequence[Any]:
        sets: list[tuple[int, ...]] = []
        for flat, counts in (_one_a_row(table, self.columns.label) for table in tables):
            found = classes.encode([flat], self.columns.label)
            ends = np.cumsum(counts)
            sets += [tuple(sorted(set(found[end - count : end]))) for end, count in zip(ends, counts, strict=True)]
        return sets

    def counted(self, rows: Rows) -> Iterable[Hashable]:
        return rows.label

    def strata(self, rows: Rows, seed: int) -> Sequence[int]:
        return label_sets([{rows.label_names[label] for label in labels} for labels in rows.label])

    def encode(self, tokenizer: Any, rows: Rows, max_length: int) -> Encoded:
        encoded = encode(tokenizer, rows, max_length)
        present = np.zeros((len(rows), len(rows.label_names)), dtype=np.float32)
        for row, labels in zip(present, rows.label, strict=True):
            row[list(labels)] = 1
        return Encoded({**encoded.columns, "labels": tuple(present)})

    def collate(self, tokenizer: Any) -> Collate:
        return Collate(pad_id(tokenizer), numbers)

    def loss(self, label_names: Sequence[str]) -> Loss:
        return loss

    def metrics(self, label_names: Sequence[str]) -> Metrics:
        return metrics

    def answers(self, model: nn.Module, batch: Mapping[str, Any], label_names: Sequence[str]) -> list[Answer]:
        """The predicted labels, and the probability of every label."""
        probabilities = finite(logits(model, batch)).sigmoid()
        return [
            {
                "labels": [name for name, share in zip(label_names, row, strict=True) if share > 0.5],
                "probabilities": {name: round(share, 6) for name, share in zip(label_names, row, strict=True)},
            }
            for row in probabilities.tolist()
        ]


def _one_a_row(table: Table, column: str) -> tuple[Table, list[int]]:
    """The table with one row for every label, and the number of labels in each original row."""
    lists: list[list[object]] = []
    for row, value in enumerate(table.column(column, "data.label")):
        labels = [part for part in value.split(";") if part.strip()] if isinstance(value, str) else value
        if not isinstance(labels, list | tuple):
            raise DataError(
                f"{table.place(row)}: {column!r} is {value!r:.60}, which is not a list of labels; "
                "correct it or set data.label to another column"
            )
        # Some libraries state for every label whether the text has it: zeros and ones, some repeated.
        names = list(map(str, labels))
        if len(set(names)) < len(names) and all(name in ("0", "1", "0.0", "1.0") for name in names):
            raise DataError(
                f"{table.place(row)}: {column!r} is {value!r:.60}, a 0 or 1 for every label; list the labels that the text "
                "has, by their names or numbers"
            )
        lists.append(list(labels))
    lines = [line for line, labels in zip(table.lines, lists, strict=True) for _ in labels]
    flat: list[object] = [label for labels in lists for label in labels]
    return Table(table.source, {column: flat}, (column,), lines, table.unit, table.classes), list(map(len, lists))


def build(data: DataConfig) -> MultiLabel:
    return MultiLabel(columns_of(data))
