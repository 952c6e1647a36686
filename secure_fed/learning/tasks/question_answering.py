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
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.learning.data.encode import (
    ASIDE,
    PARTS,
    TOKENISED_AT_ONCE,
    Aside,
    Collate,
    Encoded,
    Item,
    aligned,
    pad_id,
    require_fast,
)
from secure_fed.learning.data.label_skew import clusters, label_sets
from secure_fed.learning.data.rows import Columns, Rows, Table, Vocabulary, columns_of, is_text, text_column
from secure_fed.learning.tasks.headline import QUESTIONS
from secure_fed.learning.tasks.task import Answer, Loss, Metrics, Task, finite, inputs_of

_LONGEST = 30  # tokens of an answer
_EVEN = 0.5
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Answers(NamedTuple):
    """texts: all right answers. first: the first answer's place, from its first character to the one after its last."""

    texts: tuple[str, ...] = ()
    first: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Question:
    """context: the whole context. answers: all right answers. spans: `Window.spans` of each window."""

    context: str
    answers: tuple[str, ...]
    spans: tuple[NDArray[np.integer[Any]], ...]


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


def read_answers(table: Table, columns: Columns, *, unanswerable: bool = False) -> list[Answers]:
    """The answers of every row; each must be at its stated place, because the first answer is the training target.

    unanswerable: whether a row may have no answer, in SQuAD's lists or as an empty text without a place.
    """
    cells = table.column(columns.label, "data.label")
    beside = table.columns.get(f"{columns.label}_start", [None] * len(cells))
    contexts = text_column(table, columns.text_b, "data.text_b")
    found = []
    for row, (cell, start, context) in enumerate(zip(cells, beside, contexts, strict=True)):
        pairs = _pairs(cell, start)
        if pairs == [] and unanswerable:
            found.append(Answers())
            continue
        if pairs == []:
            raise DataError(
                f"{table.place(row)}: {columns.label!r} holds no answer; set data.unanswerable = true where questions may "
                "have none, or remove the row"
            )
        if not pairs:
            raise DataError(
                f"{table.place(row)}: {columns.label!r} is {cell!r:.60}, which is not an answer with its place; give a text "
                f"with its first character in {columns.label + '_start'!r}, or SQuAD's 'text' and 'answer_start'"
            )
        for text, place in pairs:
            if not text.strip() or context[place : place + len(text)] != text or place < 0:
                raise DataError(
                    f"{table.place(row)}: the answer {text!r:.60} does not stand at character {place} of {columns.text_b!r}; "
                    "correct its place or remove the row"
                )
        first, place = pairs[0]
        found.append(Answers(tuple(text for text, _ in pairs), (place, place + len(first))))
    return found


def _pairs(cell: Any, start: Any) -> list[tuple[str, int]] | None:
    """The answers of a cell with their places, in any of the formats; None for an invalid cell, [] for no answer."""
    if isinstance(cell, str) and not cell.strip() and start in (None, "", -1, "-1"):
        return []
    if isinstance(cell, Mapping):
        several, places = cell.get("text"), cell.get("answer_start")
    elif isinstance(cell, list | tuple):
        if not all(isinstance(one, Mapping) for one in cell):
            return None
        several, places = [one.get("text") for one in cell], [one.get("answer_start") for one in cell]
    else:
        several, places = [cell], [int(start) if isinstance(start, str) and start.strip().isdecimal() else start]
    if not isinstance(several, list) or not isinstance(places, list) or len(several) != len(places):
        return None
    if not all(is_text(text) for text in several) or not all(type(place) is int for place in places):
        return None
    return list(zip(several, places, strict=True))


class Window(NamedTuple):
    """The tokens of a question and of a part of its context, which a model reads at once.

    inputs: input_ids, and token_type_ids if the tokenizer returns them
    spans: (tokens, 2), each token's place in the context; (0, 0) for tokens that are not of the context
    """

    inputs: Item
    spans: NDArray[np.integer[Any]]


def windows(
    tokenizer: Any, questions: Sequence[str], contexts: Sequence[str], max_length: int, stride: int
) -> Iterator[list[Window]]:
    """The windows of each example: of `max_length` tokens at most, neighbours having `stride` tokens of the context in common.

    A question takes half of the tokens at most; a longer question is cut at its end.
    """
    require_fast(tokenizer)
    half = max_length // 2
    room = max_length - half - tokenizer.num_special_tokens_to_add(pair=True)
    if room < 1:
        raise ConfigError(f"model.max_length is {max_length}, too few for a question and its context: set at least 32")
    if stride >= room:
        raise ConfigError(
            f"data.stride is {stride}, but with model.max_length = {max_length} a window may have no more than {room} tokens "
            "of a context: lower data.stride or raise model.max_length"
        )
    shortened = [
        question[: _end(own.spans, half)] if len(own.ids) > half else question
        for question, own in zip(questions, aligned(tokenizer, questions, special=False), strict=True)
    ]
    for start in range(0, len(shortened), TOKENISED_AT_ONCE):
        some = slice(start, start + TOKENISED_AT_ONCE)
        tokens = tokenizer(
            shortened[some],
            list(contexts[some]),
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        found: list[list[Window]] = [[] for _ in shortened[some]]
        for row, example in enumerate(tokens["overflow_to_sample_mapping"]):
            of_context = np.array([part == 1 for part in tokens.sequence_ids(row)])
            spans = np.asarray(tokens["offset_mapping"][row], dtype=np.int32).reshape(-1, 2) * of_context[:, None]
            names = [name for name in ("input_ids", "token_type_ids") if name in tokens]
            found[example].append(
                Window({name: np.asarray(tokens[name][row], dtype=np.int32) for name in names}, spans)
            )
        yield from found


def _end(spans: NDArray[np.integer[Any]], half: int) -> int:
    """The end of the first `half` tokens of a text: before a character that the next token shares, as in UTF-8 bytes."""
    return int(min(spans[half - 1, 1], spans[half, 0]))


def answered(found: Sequence[Window], start: int, end: int) -> tuple[int, tuple[int, int]]:
    """The (first) window with the most characters from `start` to `end` - 1, and its first and last token of them.

    If no token of the answer is left, its place is the first token.
    """
    overlaps = [np.minimum(window.spans[:, 1], end) - np.maximum(window.spans[:, 0], start) for window in found]
    chosen = int(np.argmax([np.maximum(overlap, 0).sum() for overlap in overlaps]))
    inside = np.flatnonzero(overlaps[chosen] > 0)
    return chosen, (int(inside[0]), int(inside[-1])) if len(inside) else (0, 0)


def places(items: Sequence[Item], name: str, width: int) -> Tensor:
    """(batch, 2) the first and the last token of each answer, both inside the window."""
    for item in items:
        if max(item[name]) >= len(item["input_ids"]):
            raise DataError(f"an answer ends at token {max(item[name])} of a window of {len(item['input_ids'])}")
    return torch.tensor([list(item[name]) for item in items])


def scores(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(B, 2, L) scores of every token as an answer's first and last; minus infinity on padding."""
    output: Any = model(**inputs_of(batch))
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
        none = 0.0
        if unanswerable:  # the sigmoid of the margin
            none = float(np.exp(-np.logaddexp(0.0, -null_margin(windowed, question.spans, _LONGEST))))
        found.append((question, Found(math.exp(score), start, end, none)))
    return found


def best_span(
    scores: Sequence[NDArray[np.float64]], found: Sequence[NDArray[np.integer[Any]]], longest: int
) -> tuple[float, int, int]:
    """(log-probability, first character, end character) of the best answer over all windows of an example.

    The end character is the one after the last. scores: a window's (2, tokens) scores of starts and of ends. found: its
    `Window.spans`. An answer lies in the context, ends no earlier than it starts, and has at most `longest` tokens. Starts and
    ends are each a distribution over the context's tokens; a token in several windows counts once, with its highest score.
    """
    each = (_in_window(one, spans, longest) for one, spans in zip(scores, found, strict=True))
    best = max(each, key=lambda one: one[0])  # the first of several
    if best[0] == -np.inf:
        return best
    return best[0] - _normal([one[0] for one in scores], found) - _normal([one[1] for one in scores], found), *best[1:]


def null_margin(
    scores: Sequence[NDArray[np.float64]], found: Sequence[NDArray[np.integer[Any]]], longest: int
) -> float:
    """The score of "no answer" minus the score of the best answer, over all windows of an example.

    "No answer" is the first token, as start and as end. Of several windows, the lowest score of "no answer" counts, since an
    answer in one of them is an answer (Rajpurkar et al., 2018, arXiv 1806.03822; transformers' run_qa has the same rule).
    """
    best = max(_in_window(one, spans, longest)[0] for one, spans in zip(scores, found, strict=True))
    return min(float(start[0] + end[0]) for start, end in scores) - best


def _in_window(scores: NDArray[np.float64], spans: NDArray[np.integer[Any]], longest: int) -> tuple[float, int, int]:
    """(score, first character, end character) of a window's best answer; minus infinity without a token."""
    start, end = scores
    places = np.flatnonzero(spans[:, 1] > spans[:, 0])
    if not len(places):
        return -np.inf, 0, 0
    distance = np.arange(len(places)) - np.arange(len(places))[:, None]
    joint = np.where((distance >= 0) & (distance < longest), start[places, None] + end[places], -np.inf)
    first, last = divmod(int(joint.argmax()), len(places))
    return float(joint[first, last]), int(spans[places[first], 0]), int(spans[places[last], 1])


def _normal(scores: Sequence[NDArray[np.float64]], found: Sequence[NDArray[np.integer[Any]]]) -> float:
    """log sum exp over the context's tokens."""
    spans = np.concatenate(found)
    inside = spans[:, 1] > spans[:, 0]
    token = np.unique(spans[inside], axis=0, return_inverse=True)[1].ravel()
    highest = np.full(token.max() + 1, -np.inf)
    np.maximum.at(highest, token, np.concatenate(scores)[inside])
    return float(np.logaddexp.reduce(highest))


def normalised(answer: str) -> str:
    """An answer as SQuAD compares it (Rajpurkar et al., 2016, arXiv 1606.05250).

    Lower case, then without punctuation, then without articles, with single spaces.
    """
    return " ".join(_ARTICLE.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact(guess: str, answers: Sequence[str]) -> float:
    """1 if the guess is one of the answers, else 0."""
    return float(normalised(guess) in {normalised(answer) for answer in answers})


def best_f1(guess: str, answers: Sequence[str]) -> float:
    """The highest F1 of the guess's words against an answer's words; a word counts as often as it occurs."""
    return max(_f1(normalised(guess).split(), normalised(answer).split()) for answer in answers)


def _f1(guess: Sequence[str], answer: Sequence[str]) -> float:
    if not guess or not answer:
        return float(guess == answer)
    return 2 * (Counter(guess) & Counter(answer)).total() / (len(guess) + len(answer))
