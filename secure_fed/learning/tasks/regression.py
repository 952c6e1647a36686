"""A number for each text or pair, such as how alike two sentences are.

The model learns (y - centre) / scale, with `data.label_centre` and `data.label_scale` as settings: a mean or a spread computed
from the clients' labels would be released without noise. The texts and the numbers are private. There is no accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from secure_fed.config import DataConfig
from secure_fed.errors import DataError
from secure_fed.learning.data.encode import Collate, Encoded, encode, numbers, pad_id
from secure_fed.learning.data.rows import Rows, Table, Vocabulary, columns_of
from secure_fed.learning.tasks.classification import logits
from secure_fed.learning.tasks.task import Answer, Loss, Metrics, Task, finite

_BINS = 10


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(B,) squared errors of the scaled numbers."""
    return (logits(model, batch).squeeze(-1) - batch["labels"]).square()


def metrics(model: nn.Module, batches: Iterable[Mapping[str, Tensor]], *, scale: float) -> dict[str, float]:
    """rmse in the data's unit, pearson, spearman, and the mean loss of the scaled numbers."""
    found = [(logits(model, batch).squeeze(-1), batch["labels"]) for batch in batches]
    guess, truth = (torch.cat(part).cpu().double().numpy() for part in zip(*found, strict=True))
    mean = float(np.square(guess - truth).mean())
    return {"rmse": scale * math.sqrt(mean), **correlations(guess, truth), "loss": mean}


def correlations(guess: NDArray[np.float64], truth: NDArray[np.float64]) -> dict[str, float]:
    """Pearson's and Spearman's correlation; not-a-number if either side is constant."""
    from scipy.stats import pearsonr, spearmanr

    if len(truth) < 2 or np.ptp(guess) == 0 or np.ptp(truth) == 0 or not np.isfinite(guess).all():
        return {"pearson": math.nan, "spearman": math.nan}
    return {"pearson": float(pearsonr(guess, truth).statistic), "spearman": float(spearmanr(guess, truth).statistic)}


@dataclass(frozen=True)
class Regression(Task):
    """`Rows.label` is the number in the data; an item's label is the scaled number."""

    centre: float = 0.0
    scale: float = 1.0

    auto = "AutoModelForSequenceClassification"
    unlabelled = 0.0

    @property
    def title(self) -> str:
        return f"regression on {'text pairs' if self.columns.text_b else 'texts'}"

    def model_settings(self, label_names: Sequence[str]) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    @property
    def conversion(self) -> str:
        if (self.centre, self.scale) == (0, 1):
            return ""
        return (
            f"The model learned (number - {self.centre}) / {self.scale}: in the data's unit, a prediction is "
            f"`{self.centre} + {self.scale} * model(**inputs).logits`."
        )

    def labels(self, tables: Sequence[Table], classes: Vocabulary) -> Sequence[Any]:
        return [value for table in tables for value in _values(table, self.columns.label)]

    def strata(self, rows: Rows, seed: int) -> Sequence[int]:
        """The decile of each number; equal numbers are in the same decile."""
        edges = np.quantile(rows.label, np.linspace(0, 1, _BINS + 1)[1:-1])
        return [int(index) for index in np.unique(np.searchsorted(edges, rows.label), return_inverse=True)[1]]

    def encode(self, tokenizer: Any, rows: Rows, max_length: int) -> Encoded:
        scaled = tuple((value - self.centre) / self.scale for value in rows.label)
        return Encoded({**encode(tokenizer, rows, max_length).columns, "labels": scaled})

    def collate(self, tokenizer: Any) -> Collate:
        return Collate(pad_id(tokenizer), numbers)

    def loss(self, label_names: Sequence[str]) -> Loss:
        return loss

    def metrics(self, label_names: Sequence[str]) -> Metrics:
        return partial(metrics, scale=self.scale)

    def answers(self, model: nn.Module, batch: Mapping[str, Any], label_names: Sequence[str]) -> list[Answer]:
        """The number, in the data's unit."""
        scores = finite(logits(model, batch).squeeze(-1))
        return [{"value": round(self.centre + self.scale * score, 6)} for score in scores.tolist()]


def _values(table: Table, column: str) -> list[float]:
    values: list[float] = []
    for row, cell in enumerate(table.column(column, "data.label")):
        try:
            value = float(cell) if isinstance(cell, str | int | float) and not isinstance(cell, bool) else math.nan
        except (ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value):
            raise DataError(
                f"{table.place(row)}: label {cell!r:.60} is not a finite number; "
                "correct it or set data.label to another column"
            )
        values.append(value)
    return values


def build(data: DataConfig) -> Regression:
    return Regression(columns_of(data), data.label_centre, data.label_scale)
