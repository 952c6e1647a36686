"""Multiple choice by likelihood: the choice that a causal language model finds most likely after the prompt.

A row has a prompt, a list of choices, and the right choice: its number from 0, or its text. The score of a choice is the mean
log-likelihood of its tokens, or their sum (`data.likelihood`), which favours short choices. An item is one question with all
its choices. It trains on the right choice, like language modelling of a target, so training needs one sequence for each
example; it is evaluated on all choices. Prompts, choices and right choices are private.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from secure_fed.config import DataConfig
from secure_fed.errors import DataError
from secure_fed.learning.data.encode import ASIDE, PARTS, Aside, Collate, Encoded, pad_id, per_token, require_room
from secure_fed.learning.data.on_disk import kept
from secure_fed.learning.data.rows import Columns, Rows, Table, Texts, Vocabulary, columns_of, plain_texts, text_lists
from secure_fed.learning.tasks.causal_lm import continuations, loss
from secure_fed.learning.tasks.next_tokens import token_losses
from secure_fed.learning.tasks.task import Answer, Loss, Metrics, Task, finite


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of a question, and the number of the right one."""

    texts: tuple[str, ...]
    right: int


def likelihoods(model: nn.Module, batch: Mapping[str, Any], *, mean: bool) -> list[Tensor]:
    """The scores of every item's choices."""
    losses, counted = token_losses(model, batch[PARTS])
    sums = -losses.sum(1)
    scores = sums / counted.sum(1).clamp(min=1) if mean else sums
    return list(scores.cpu().split(batch["counts"].tolist()))


def metrics(model: nn.Module, batches: Iterable[Mapping[str, Any]], *, mean: bool) -> dict[str, float]:
    """accuracy, and the mean loss of the right choices."""
    losses, right = [], list[bool]()
    for batch in batches:
        losses.append(loss(model, batch))
        scores = likelihoods(model, batch, mean=mean)
        right += [int(own.argmax()) == one.right for own, one in zip(scores, batch[ASIDE], strict=True)]
    return {"accuracy": sum(right) / len(right), "loss": float(torch.cat(losses).mean())}


@dataclass(frozen=True)
class MultipleChoice(Task):
    """`Rows.text` is the prompt, `Rows.text_b` a tuple of choices, `Rows.label` the number of the right one."""

    mean: bool = True

    title = "multiple choice by likelihood"
    auto = "AutoModelForCausalLM"
    keeps_head = True
    unlabelled = 0

    def texts(self, tables: Sequence[Table]) -> Texts:
        prompts, _ = plain_texts(tables, self.columns.text, "")
        return prompts, kept(row for table in tables for row in _choices(table, self.columns.text_b))

    def labels(self, tables: Sequence[Table], classes: Vocabulary) -> Sequence[Any]:
        return [number for table in tables for number in _right(table, self.columns)]

    def counted(self, rows: Rows) -> Iterable[Hashable]:
        return rows.label

    def encode(self, tokenizer: Any, rows: Rows, max_length: int) -> Encoded:
        require_room(tokenizer, max_length, pair=False)
        choices = rows.text_b or ()
        flat = [(prompt, choice) for prompt, own in zip(rows.text, choices, strict=True) for choice in own]
        found = list(continuations(tokenizer, [one for one, _ in flat], [other for _, other in flat], max_length))
        ends = list(accumulate(map(len, choices)))
        parts = [tuple(found[end - len(own) : end]) for end, own in zip(ends, choices, strict=True)]
        trained = [own[right] for own, right in zip(parts, rows.label, strict=True)]
        return Encoded(
            {
                "input_ids": tuple(item["input_ids"] for item in trained),
                "labels": tuple(item["labels"] for item in trained),
                PARTS: tuple(parts),
                ASIDE: tuple(Choices(tuple(own), right) for own, right in zip(choices, rows.label, strict=True)),
            }
        )

    def collate(self, tokenizer: Any) -> Aside:
        return Aside(Collate(pad_id(tokenizer), per_token))

    def loss(self, label_names: Sequence[str]) -> Loss:
        return loss

    def metrics(self, label_names: Sequence[str]) -> Metrics:
        return partial(metrics, mean=self.mean)

    def answers(self, model: nn.Module, batch: Mapping[str, Any], label_names: Sequence[str]) -> list[Answer]:
        """The most likely choice, its number, and the score of each."""
        return [
            {
                "label": int(finite(own).argmax()),
                "choice": one.texts[int(own.argmax())],
                "likelihoods": [round(score, 6) for score in own.tolist()],
            }
            for own, one in zip(likelihoods(model, batch, mean=self.mean), batch[ASIDE], strict=True)
        ]


def _choices(table: Table, column: str) -> Iterator[tuple[str, ...]]:
    for row, choices in enumerate(text_lists(table, column, "data.text_b")):
        if len(choices) < 2 or not all(choice.strip() for choice in choices):
            raise DataError(
                f"{table.place(row)}: {column!r} has the choices {choices!r:.60}; give at least two, none of them blank"
            )
        yield tuple(choices)


def _right(table: Table, columns: Columns) -> list[int]:
    """The number of each row's right choice. A column of numbers is read as such throughout, also where choices are numbers."""
    pairs = list(zip(_choices(table, columns.text_b), table.column(columns.label, "data.label"), strict=True))
    as_texts = [own.index(cell) if isinstance(cell, str) and cell in own else None for own, cell in pairs]
    as_numbers = [_number(cell, len(own)) for own, cell in pairs]
    if None not in as_texts and None not in as_numbers and as_texts != as_numbers:
        raise DataError(
            f"{table.place(0)}: the labels in {columns.label!r} are texts of choices as well as numbers of choices; write "
            "numbers from 0 that are no strings"
        )
    both = zip(as_texts, as_numbers, strict=True)
    found = as_numbers if None not in as_numbers else [number if text is None else text for text, number in both]
    for row, (right, (own, cell)) in enumerate(zip(found, pairs, strict=True)):
        if right is None:
            raise DataError(
                f"{table.place(row)}: label {cell!r:.60} is neither the number of one of the {len(own)} choices, from 0, nor "
                "its text; correct it or set data.label to another column"
            )
    return [right for right in found if right is not None]


def _number(cell: object, count: int) -> int | None:
    """The cell as the number of one of `count` choices; None if it is none."""
    number = int(cell) if isinstance(cell, str) and cell.strip().isdecimal() else cell
    return number if type(number) is int and 0 <= number < count else None


def build(data: DataConfig) -> MultipleChoice:
    return MultipleChoice(columns_of(data), data.likelihood == "mean")
