"""The base class of tasks: everything that depends on the kind of task, from the columns of a file to the printed answer.

A task is made from the settings of [data] and contains no data. Its results for one example depend on that example alone:
nothing is counted, scaled or tuned over the rows, since such numbers would be private and released without noise. Only the set
of classes (`Rows.label_names`) comes from all training rows: every party must know it, and it is therefore public.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from secure_fed.errors import ModelError
from secure_fed.learning.data.encode import Encoded
from secure_fed.learning.data.rows import Reads, Rows

Answer = dict[str, Any]
Batch = Any  # the result of a collate; a user's own model or loss may need any type
Collate = Callable[[Sequence[Any]], Batch]
Loss = Callable[[nn.Module, Batch], Tensor]  # (B,): one number an example
Metrics = Callable[[nn.Module, Iterable[Batch]], dict[str, float]]
Confidence = Callable[[nn.Module, Batch], Tensor]  # (B,): higher where the model fits an example better
# The model's inputs in a batch; the rest of a batch is for losses and metrics.
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Task(Reads):
    """A task on the rows of tables.

    auto: the Auto class of transformers that loads the model. keeps_head: whether the layers outside the base model were
    pre-trained for this very task, and are kept. unlabelled: the value in `Rows.label` for a row without a label.
    """

    auto: ClassVar[str]
    keeps_head: ClassVar[bool] = False
    unlabelled: ClassVar[Any]

    @property
    @abstractmethod
    def title(self) -> str:
        """The name of the task in a sentence."""

    def model_settings(self, label_names: Sequence[str]) -> dict[str, Any]:
        """The settings of the model's configuration that the task decides."""
        return {}

    @property
    def conversion(self) -> str:
        """A sentence on how to compute an answer from the model's scores, if they are not the answer."""
        return ""

    def prepare(self, tokenizer: Any) -> None:
        """Give a tokenizer what the task needs of it."""

    def line(self, text: Any) -> Any:
        """An input of `predict`, as `texts` would give it."""
        return text

    def counted(self, rows: Rows) -> Iterable[Hashable]:
        """The labels that accuracy counts, one by one; none if no single label could be the answer to every example."""
        return ()

    def strata(self, rows: Rows, seed: int) -> Sequence[int]:
        """A class of each example, from 0, for partitions that skew classes and for reports of skew; by default one for all."""
        return [0] * len(rows)

    @abstractmethod
    def encode(self, tokenizer: Any, rows: Rows, max_length: int) -> Encoded:
        """One item for each example, however many inputs of the model it needs: example-level privacy protects an item.

        An example that has no room in `max_length` tokens may have an item without tokens: then it is left out.
        """

    @abstractmethod
    def collate(self, tokenizer: Any) -> Collate: ...

    @abstractmethod
    def loss(self, label_names: Sequence[str]) -> Loss:
        """loss(model, batch) -> (B,): each example's own, and the same however the batch is padded."""

    @abstractmethod
    def metrics(self, label_names: Sequence[str]) -> Metrics:
        """metrics(model, batches) -> "loss", "accuracy" if it is meaningful, and the task's own; not-a-number for an undefined
        metric."""

    @abstractmethod
    def answers(self, model: nn.Module, batch: Mapping[str, Any], label_names: Sequence[str]) -> list[Answer]:
        """The answer to print for each example of a batch."""


def outputs_named(label_names: Sequence[str]) -> dict[str, Any]:
    """A model's outputs by name."""
    return {"id2label": dict(enumerate(label_names)), "label2id": {name: i for i, name in enumerate(label_names)}}


def logits(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """float32 scores of a batch that holds more than a model's inputs."""
    output: Any = model(**inputs_of(batch))
    scores: Tensor = getattr(output, "logits", output)
    return scores.float()


def inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The model's inputs in a batch."""
    return {name: batch[name] for name in _INPUTS if name in batch}


def finite(scores: Tensor) -> Tensor:
    """The scores for an answer, checked to be finite; minus infinity, which excludes an answer, is allowed."""
    if scores.isnan().any() or scores.isposinf().any() or not scores.isfinite().any():
        raise ModelError(
            "the scores of this run's model are not finite numbers: its training diverged; "
            "train again with a lower training.lr"
        )
    return scores
