"""What a task is: everything that depends on what a run learns, from the columns of a file to the answer it prints.

A task is a value made of the settings of [data]; it holds no data. What it computes for one example depends on that example
alone: nothing is counted, scaled or tuned over the rows, since such numbers would be private and leave without noise. The one
thing taken from all training rows is which classes there are (`Rows.label_names`), which every party must know and
which is therefore public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from secure_fed.errors import ModelError
from secure_fed.learning.data.columns import Reads
from secure_fed.learning.data.encode import Encoded
from secure_fed.learning.data.rows import Rows

Answer = dict[str, Any]
Batch = Any  # what a collate makes of some examples, and a model or a loss of the user's own may need
Collate = Callable[[Sequence[Any]], Batch]
Loss = Callable[[nn.Module, Batch], Tensor]  # (B,): one number an example
Metrics = Callable[[nn.Module, Iterable[Batch]], dict[str, float]]
Confidence = Callable[[nn.Module, Batch], Tensor]  # (B,): higher where the model fits an example better
# What models are given of a batch; the rest of it is for losses and metrics.
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class Task(Reads, Protocol):
    """Name, columns, model, batches, loss, metrics and answers of a task."""

    @property
    def title(self) -> str:
        """What is learned, in words."""

    @property
    def auto(self) -> str:
        """The Auto class of transformers that loads the model."""

    @property
    def keeps_head(self) -> bool:
        """Whether what lies outside the base model was pre-trained for this very task, and stays as it is."""

    @property
    def unlabelled(self) -> Any:
        """What stands for the label in `Rows.label` where there is none to know."""

    def model_settings(self, label_names: Sequence[str]) -> dict[str, Any]:
        """What the model's configuration is told."""

    def line(self, text: Any) -> Any:
        """An input of `predict`, as `texts` would give it."""

    def strata(self, rows: Rows, seed: int) -> Sequence[int]:
        """A class of each example, from 0, for partitions that skew classes and for what is said of skew."""

    def encode(self, tokenizer: Any, rows: Rows, max_length: int) -> Encoded:
        """One item an example, whatever it takes to read it: an item is what privacy for an example protects."""

    def collate(self, tokenizer: Any) -> Collate: ...

    def loss(self, label_names: Sequence[str]) -> Loss:
        """loss(model, batch) -> (B,): each example's own, and the same however the batch is padded."""

    def metrics(self, label_names: Sequence[str]) -> Metrics:
        """metrics(model, batches) -> "loss", "accuracy" where that has a meaning, and the task's own; not-a-number where one is
        not defined."""

    def answers(self, model: nn.Module, batch: Mapping[str, Any], label_names: Sequence[str]) -> list[Answer]:
        """What to print for each example of a batch."""


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
