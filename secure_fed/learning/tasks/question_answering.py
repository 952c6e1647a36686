"""Extractive question answering: the answer to a question is a span of a context (SQuAD).

Columns: question, context, and answers, in any of SQuAD's formats: {"text": [...], "answer_start": [...]}, a list of
{"text", "answer_start"}, or one text, with its place in the column of the same name plus "_start".

An item is one question with all windows of its context. It trains on one of them, the window with most of its first answer, so
a question is one example for privacy, however long its context is; it is evaluated on all of them, by the best span anywhere.
The loss is the mean cross-entropy of the first and the last token over the window's tokens. With `data.unanswerable` a question
may have no answer (SQuAD 2; Rajpurkar et al., 2018, arXiv 1806.03822): it trains on its first window, whose first token ([CLS])
is start and end. Questions, contexts and answers are private.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.config import DataConfig
from secure_fed.errors import DataError
from secure_fed.learning.data.encode import Collate, Encoded, Item, pad_id
from secure_fed.learning.data.labels import Vocabulary
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.data.strata import clusters, label_sets
from secure_fed.learning.data.table import Table
from secure_fed.learning.tasks.columns import columns_of
from secure_fed.learning.tasks.headline import QUESTIONS
from secure_fed.learning.tasks.item_extras import ASIDE, PARTS, Aside
from secure_fed.learning.tasks.spans import Answers, best_f1, exact, read_answers
from secure_fed.learning.tasks.task import Answer, Loss, Metrics, Task, finite
from secure_fed.learning.tasks.windows import answered, best_span, null_margin, windows

_LONGEST = 30  # tokens of an answer
_EVEN = 0.5


@dataclass(frozen=True, slots=True)
class Question:
    """context: the whole context. answers: all right answers. spans: `Window.spans` of each window."""

    context: str
    answers: tuple[str, ...]
    spans: tuple[NDArray[np.integer[Any]], ...]


def scores(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(B, 2, L) scores of every token as an answer's first and last; minus infinity on padding."""
    output: Any = model(
        **{name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
    )
    both = torch.stack([output.start_logits, output.end_logits], 1).float()
    return both.masked_fill(batch["attention_mask"][:, None] == 0, -math.inf)


def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(B,) means of the cross-entropies of start and end; `labels` is (B, 2)."""
    both = scores(model, batch).flatten(0, 1), batch["labels"].flatten()  # (2 B, L), (2 B,)
    return functional.cross_entropy(*both, reduction="none").view(-1, 2).mean(1)


def metrics(model: nn.Module, batches: Iterable[Mapping[str, Any]], *, unanswerable: bool = False) -> dict[str, float]:
    """exact_match, also as accuracy, f1, and the mean loss of the windows that are trained on.

    unanswerable: also exact_match and f1 of questions with an answer, and of questions without; not-a-number if none exist.
    """
    losses, matches, f1s, answerable = [], list[float](), list[float](), list[bool]()
    for batch in batches:
        losses.append(loss(model, batch))
        for question, found in _best(model, batch, unanswerable=unanswerable):
            right = question.answers or ("",)
            matches.append(exact(found.text(question), right))
            f1s.append(best_f1(found.text(question), right))
            answerable.append(bool(question.answers))
    of_kinds = {}
    if unanswerable:
        for kind, chosen in (("has_answer", np.array(answerable)), ("no_answer", ~np.array(answerable))):
            of_kinds[f"{kind}_exact_match"], of_kinds[f"{kind}_f1"] = _mean(matches, chosen), _mean(f1s, chosen)
    accuracy = float(np.mean(matches))
    return {
        "accuracy": accuracy,
        "exact_match": accuracy,
        "f1": float(np.mean(f1s)),
        **of_kinds,
        "loss": float(torch.cat(losses).mean()),
    }


def _mean(values: Sequence[float], chosen: NDArray[np.bool_]) -> float:
    return float(np.array(values)[chosen].mean()) if chosen.any() else math.nan


class Found(NamedTuple):
    """The best answer: its probability among all answers, its place, and the probability that there is none."""

    score: float
    start: int
    end: int
    none: float = 0.0

    def text(self, question: Question) -> str:
        """The answer, or "" if it is likelier that there is none."""
        return "" if self.none > _EVEN else question.context[self.start : self.end]


def _best(
    model: nn.Module, batch: Mapping[str, Any], *, unanswerable: bool, checked: bool = False
) -> list[tuple[Question, Found]]:
    """Every question with its best answer."""
    of_parts = scores(model, batch[PARTS])
    if checked:
        finite(of_parts)
    found = []
    for question, own in zip(batch[ASIDE], of_parts.cpu().split(batch["counts"].tolist()), strict=True):
        windowed = [one[:, : len(span)] for one, span in zip(own.double().numpy(), question.spans, strict=True)]
        score, start, end = best_span(windowed, question.spans, _LONGEST)
        none = _sigmoid(null_margin(windowed, question.spans, _LONGEST)) if unanswerable else 0.0
        found.append((question, Found(math.exp(score), start, end, none)))
    return found


def _sigmoid(margin: float) -> float:
    return float(np.exp(-np.logaddexp(0.0, -margin)))


def places(items: Sequence[Item], name: str, width: int) -> Tensor:
    """(batch, 2) the first and the last token of each answer, both inside the window."""
    for item in items:
        if max(item[name]) >= len(item["input_ids"]):
            raise DataError(f"an answer ends at token {max(item[name])} of a window of {len(item['input_ids'])}")
    return torch.tensor([list(item[name]) for item in items])


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """`Rows.text` is the question, `Rows.text_b` the context, `Rows.label` its `Answers`, perhaps empty with `unanswerable`."""

    stride: int = 32
    unanswerable: bool = False

    title = QUESTIONS
    auto = "AutoModelForQuestionAnswering"
    unlabelled = Answers()

    @property
    def beside(self) -> tuple[str, ...]:
        return (f"{self.columns.label}_start",)

    def labels(self, tables: Sequence[Table], classes: Vocabulary) -> Sequence[Any]:
        return [one for table in tables for one in read_answers(table, self.columns, unanswerable=self.unanswerable)]

    def strata(self, rows: Rows, seed: int) -> Sequence[int]:
        """By source where the data name one, else by the k-means cluster of question and context."""
        if rows.client is not None:
            return label_sets([()] * len(rows), rows.client)
        return clusters([f"{one} {other}" for one, other in zip(rows.text, rows.text_b or (), strict=True)], seed=seed)

    def encode(self, tokenizer: Any, rows: Rows, max_length: int) -> Encoded:
        columns: dict[str, list[Any]] = {"labels": [], PARTS: [], ASIDE: []}
        contexts = rows.text_b or ()
        every = windows(tokenizer, rows.text, contexts, max_length, self.stride)
        for context, answers, found in zip(contexts, rows.label, every, strict=True):
            chosen, span = answered(found, *answers.first) if answers.texts else (0, (0, 0))
            for name, value in found[chosen].inputs.items():
                columns.setdefault(name, []).append(value)
            columns["labels"].append(span)
            columns[PARTS].append(tuple({**window.inputs, "labels": (0, 0)} for window in found))
            columns[ASIDE].append(Question(context, answers.texts, tuple(window.spans for window in found)))
        return Encoded({name: tuple(column) for name, column in columns.items()})

    def collate(self, tokenizer: Any) -> Aside:
        return Aside(Collate(pad_id(tokenizer), places))

    def loss(self, label_names: Sequence[str]) -> Loss:
        return loss

    def metrics(self, label_names: Sequence[str]) -> Metrics:
        return partial(metrics, unanswerable=self.unanswerable)

    def answers(self, model: nn.Module, batch: Mapping[str, Any], label_names: Sequence[str]) -> list[Answer]:
        """The answer, its first character in the context, and its probability: the start's times the end's.

        With unanswerable questions, also the probability that there is no answer. If "no answer" scores higher than the best
        answer, the answer is "", without a place, with this probability; the probability of any other answer is multiplied by
        the probability that there is one.
        """
        return [
            self._answer(question, found)
            for question, found in _best(model, batch, unanswerable=self.unanswerable, checked=True)
        ]

    def _answer(self, question: Question, found: Found) -> Answer:
        none = found.none > _EVEN
        score = found.none if none else found.score * (1 - found.none)
        answer = {"answer": found.text(question), "start": None if none else found.start, "score": round(score, 6)}
        return answer | ({"no_answer": round(found.none, 6)} if self.unanswerable else {})


def build(data: DataConfig) -> QuestionAnswering:
    return QuestionAnswering(columns_of(data), data.stride, data.unanswerable)
