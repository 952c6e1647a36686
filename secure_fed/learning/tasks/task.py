"""The base of all tasks: everything that depends on what a run learns, from the columns of a file to the answer it prints.

A task is a value made of the settings of [data]; it holds no data. What it computes for one example depends on that example
alone: nothing is counted, scaled or tuned over the rows, since such numbers would be private and leave without noise. The one
thing taken from all training rows is which classes there are (`Rows.label_names`), which every party must know and
which is therefore public.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from secure_fed.errors import ModelError
from secure_fed.learning.data import texts
from secure_fed.learning.data.encode import Encoded
from secure_fed.learning.data.labels import Vocabulary
from secure_fed.learning.data.rows import Columns, Rows, Texts
from secure_fed.learning.data.table import Table

Answer = dict[str, Any]
Batch = Any  # what a collate makes of some examples, and a model or a loss of the user's own may need
Collate = Callable[[Sequence[Any]], Batch]
Loss = Callable[[nn.Module, Batch], Tensor]  # (B,): one number an example
Metrics = Callable[[nn.Module, Iterable[Batch]], dict[str, float]]
Confidence = Callable[[nn.Module, Batch], Tensor]  # (B,): higher where the model fits an example better
# What models are given of a batch; the rest of it is for losses and metrics.
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Task(ABC):
    """A task of the rows of tables. By default an input is a text, or a pair of texts, and there are no classes.

    auto: the Auto class of transformers that loads the model. keeps_head: whether what lies outside the base model was
    pre-trained for this very task, and stays as it is. unlabelled: what stands for the label in `Rows.label` where there is
    none to know.
    """

    columns: Columns

    auto: ClassVar[str]
    keeps_head: ClassVar[bool] = False
    unlabelled: ClassVar[Any]

    @property
    @abstractmethod
    def title(self) -> str:
        """The name of the task in a sentence."""

    @property
    def beside(self) -> tuple[str, ...]:
        """Columns that explain labels, read where a table has them."""
        return ()

    def model_settings(self, label_names: Sequence[str]) -> dict[str, Any]:
        """The settings of the model's configuration that the task decides."""
        return {}

    @property
    def conversion(self) -> str:
        """A sentence on how an answer is made of the model's scores, where these are not the answer themselves."""
        return ""

    def texts(self, tables: Sequence[Table]) -> Texts:
        """The inputs of the tables' rows, without labels."""
        return texts.plain(tables, self.columns.text, self.columns.text_b)

    def line(self, text: Any) -> Any:
        """An input of `predict`, as `texts` would give it."""
        return text

    def classes(self, train: Sequence[Table]) -> Vocabulary:
        """The classes of the training data."""
        return Vocabulary((), ())

    @abstractmethod
    def labels(self, tables: Sequence[Table], classes: Vocabulary) -> Sequence[Any]:
        """The label of every row of the tables."""

    def read(self, train: Sequence[Table], test: Sequence[Table]) -> tuple[Rows, Rows]:
        """Inputs and labels of both, one table after the other; the classes are those of `train`."""
        classes = self.classes(train)
        return self.rows(train, classes), self.rows(test, classes)

    def rows(self, tables: Sequence[Table], classes: Vocabulary) -> Rows:
        """Inputs and labels of the tables, whose classes are known."""
        first, second = self.texts(tables)
        labels = tuple(self.labels(tables, classes))
        return Rows(tuple(first), labels, classes.names, None if second is None else tuple(second))

    def counted(self, rows: Rows) -> Iterable[Hashable]:
        """The labels that accuracy counts, one by one; none where no label could be given to every example."""
        return ()

    @abstractmethod
    def strata(self, rows: Rows, seed: int) -> Sequence[int]:
        """A class of each example, from 0, for partitions that skew classes and for what is said of skew."""

    @abstractmethod
    def encode(self, tokenizer: Any, rows: Rows, max_length: int) -> Encoded:
        """One item an example, whatever it takes to read it: an item is what privacy for an example protects."""

    @abstractmethod
    def collate(self, tokenizer: Any) -> Collate: ...

    @abstractmethod
    def loss(self, label_names: Sequence[str]) -> Loss:
        """loss(model, batch) -> (B,): each example's own, and the same however the batch is padded."""

    @abstractmethod
    def metrics(self, label_names: Sequence[str]) -> Metrics:
        """metrics(model, batches) -> "loss", "accuracy" where that has a meaning, and the task's own; not-a-number where one is
        not defined."""

    @abstractmethod
    def answers(self, model: nn.Module, batch: Mapping[str, Any], label_names: Sequence[str]) -> list[Answer]:
        """The answer to print for each example of a batch."""


def outputs_named(label_names: Sequence[str]) -> dict[str, Any]:
    """A model's outputs by name."""
    return {"id2label": dict(enumerate(label_names)), "label2id": {name: i for i, name in enumerate(label_names)}}


def logits(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """float32 scores of a batch that holds more than a model's inputs."""
    output: Any = model(**{name: batch[name] for name in _INPUTS if name in batch})
    scores: Tensor = getattr(output, "logits", output)
    return scores.float()


def finite(scores: Tensor) -> Tensor:
    """The scores an answer is made of; minus infinity is what rules one out."""
    if scores.isnan().any() or scores.isposinf().any() or not scores.isfinite().any():
        raise ModelError(
            "the scores of this run's model are not finite numbers: its training diverged; "
            "train again with a lower training.lr"
        )
    return scores
