"""Token classification: a tag for every word, for named entities in IOB2 tags.

A row has a list of words and a list of as many tags (in CSV: separated by spaces). A word's label is at its first token; its
other tokens have no label. The loss of an example is the mean over its words, so that its weight does not depend on the length
of other examples, and is 0 if `model.max_length` leaves it no word. A word that was cut off gets the tag O: an entity there is
missed. The words and tags are private; the set of entity types is public.

IOB2 tags are names, or numbers that the source has names for. B-TYPE begins an entity, I-TYPE continues it, O is outside. An
I-TYPE without an entity of its type before it begins one, as in the script of the CoNLL shared tasks: models predict such tags,
and annotators write them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.config import DataConfig
from secure_fed.errors import DataError
from secure_fed.learning.data.encode import (
    ASIDE,
    IGNORED,
    Aligned,
    Aside,
    Collate,
    Encoded,
    aligned,
    pad_id,
    per_token,
    require_room,
)
from secure_fed.learning.data.label_skew import label_sets
from secure_fed.learning.data.on_disk import kept
from secure_fed.learning.data.rows import Columns, Rows, Table, Texts, Vocabulary, columns_of, text_lists
from secure_fed.learning.tasks.headline import ENTITIES
from secure_fed.learning.tasks.task import Answer, Loss, Metrics, Task, finite, logits, outputs_named

OUTSIDE = "O"  # the tag of a word in no entity


@dataclass(frozen=True, slots=True)
class Sentence:
    """words: all words. tags: the name of each word's tag. read: the words that have a token with a label, in order."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    read: tuple[int, ...]


@dataclass(frozen=True)
class Tokens(Task):
    """`Rows.text` is a tuple of words, `Rows.label` the index of each word's tag, O being 0."""

    title = ENTITIES
    auto = "AutoModelForTokenClassification"
    unlabelled = ()

    def model_settings(self, label_names: Sequence[str]) -> dict[str, Any]:
        return outputs_named(label_names)

    def texts(self, tables: Sequence[Table]) -> Texts:
        column = self.columns.text
        rows = (tuple(row) for table in tables for row in text_lists(table, column, "data.text", divided=True))
        return kept(rows), None

    def line(self, text: Any) -> Any:
        return tuple(text.split()) if isinstance(text, str) else tuple(text)

    def classes(self, train: Sequence[Table]) -> Vocabulary:
        names = tag_names(train, self.columns.label)
        return Vocabulary(names, names)

    def labels(self, tables: Sequence[Table], classes: Vocabulary) -> Iterable[Any]:
        return (row for table in tables for row in encoded_tags(table, self.columns, classes.names))

    def counted(self, rows: Rows) -> Iterable[Hashable]:
        """The tag of every word."""
        return itertools.chain.from_iterable(rows.label)

    def strata(self, rows: Rows, seed: int) -> Sequence[int]:
        """By the set of an example's types of entities, and by its source where the data name one."""
        types = [{rows.label_names[tag].partition("-")[2] for tag in tags if tag} for tags in rows.label]
        return label_sets(types, rows.client)

    def encode(self, tokenizer: Any, rows: Rows, max_length: int) -> Encoded:
        require_room(tokenizer, max_length, pair=False)
        columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], ASIDE: []}
        sentences = aligned(tokenizer, [" ".join(words) for words in rows.text])
        for words, tags, whole in zip(rows.text, rows.label, sentences, strict=True):
            tokens = _cut(whole, max_length, pad_id(tokenizer))
            read, places = _first_tokens(words, tokens)
            labels = np.full(len(tokens.ids), IGNORED)
            labels[places] = [tags[word] if tags else 0 for word in read]
            columns["input_ids"].append(tokens.ids)
            columns["labels"].append(labels)
            columns[ASIDE].append(Sentence(words, tuple(rows.label_names[tag] for tag in tags), tuple(read)))
        return Encoded({name: tuple(column) for name, column in columns.items()})

    def collate(self, tokenizer: Any) -> Aside:
        return Aside(Collate(pad_id(tokenizer), per_token))

    def loss(self, label_names: Sequence[str]) -> Loss:
        return loss

    def metrics(self, label_names: Sequence[str]) -> Metrics:
        return partial(metrics, names=label_names)

    def answers(self, model: nn.Module, batch: Mapping[str, Any], label_names: Sequence[str]) -> list[Answer]:
        """The entities, each with its words and their places, from `start` to `end` - 1."""
        tags = guessed(finite(logits(model, batch)), batch, label_names)
        return [
            {
                "entities": [
                    {"text": " ".join(sentence.words[found.start : found.end]), **found._asdict()}
                    for found in entities(own)
                ]
            }
            for own, sentence in zip(tags, batch[ASIDE], strict=True)
        ]


def build(data: DataConfig) -> Tokens:
    return Tokens(columns_of(data))


def tag_names(tables: Sequence[Table], column: str) -> tuple[str, ...]:
    """The tags of a column: O, then B- and I- of every type in the training data, in the order of the types' names."""
    types: set[str] = set()
    for table in tables:
        for row, tags in enumerate(_tags(table, column)):
            for tag in tags:
                mark, _, kind = tag.partition("-")
                if tag != OUTSIDE and not (mark in ("B", "I") and kind):
                    raise DataError(
                        f"{table.place(row)}: tag {tag!r:.60} is neither O nor B- or I- with a type behind it; "
                        "correct it or set data.label to another column"
                    )
                types |= {kind} if kind else set()
    if not types:
        raise DataError(f"every tag of {tables[0].source} is O; give data with entities, or set data.label")
    return (OUTSIDE, *(f"{mark}-{kind}" for kind in sorted(types) for mark in "BI"))


def encoded_tags(table: Table, columns: Columns, names: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """The index of every tag; each row must have as many tags as words."""
    index = {name: number for number, name in enumerate(names)}
    words = text_lists(table, columns.text, "data.text", divided=True)
    for row, (own, tags) in enumerate(zip(words, _tags(table, columns.label), strict=True)):
        if len(own) != len(tags):
            raise DataError(
                f"{table.place(row)}: {columns.text!r} has {len(own)} words and {columns.label!r} {len(tags)} tags; "
                "give every word one tag"
            )
        unknown = next((tag for tag in tags if tag not in index), None)
        if unknown is not None:
            raise DataError(
                f"{table.place(row)}: tag {unknown!r:.60} never occurs in the training data, whose types are "
                f"{', '.join(name[2:] for name in names[1::2])}; remove the row or set data.label to another column"
            )
        yield tuple(index[tag] for tag in tags)


def _tags(table: Table, column: str) -> Iterator[list[str]]:
    declared = dict(table.classes).get(column)
    if declared is None:
        yield from text_lists(table, column, "data.label", divided=True)
        return
    for row, tags in enumerate(table.column(column, "data.label")):
        if not isinstance(tags, list | tuple) or not all(
            isinstance(tag, int) and 0 <= tag < len(declared) for tag in tags
        ):
            raise DataError(
                f"{table.place(row)}: {column!r} is {tags!r:.60}, which is not a list of numbers below {len(declared)}; "
                "correct it or set data.label to another column"
            )
        yield [declared[tag] for tag in tags]


def _cut(whole: Aligned, max_length: int, blank: int) -> Aligned:
    """At most `max_length` tokens, including special tokens at the end; a text without tokens becomes one padding token."""
    ids, spans = whole
    if not len(ids):
        return Aligned(np.array([blank], dtype=np.int32), np.zeros((1, 2), dtype=np.int64))
    if len(ids) > max_length:
        text = np.flatnonzero(spans[:, 1] > spans[:, 0])
        end = len(ids) - 1 - int(text[-1]) if len(text) else 0
        kept = np.r_[: max_length - end, len(ids) - end : len(ids)]
        ids, spans = ids[kept], spans[kept]
    return Aligned(ids, spans)


def _first_tokens(words: Sequence[str], tokens: Aligned) -> tuple[list[int], list[int]]:
    """The words that have a token, and the place of the first token of each.

    A token belongs to the word of its last character: some tokenizers include the space before a word in its token.
    """
    ends = np.cumsum([len(word) + 1 for word in words])  # of each word in the text, with the space behind it
    read: list[int] = []
    places: list[int] = []
    for place, (start, end) in enumerate(tokens.spans):
        word = int(np.searchsorted(ends, end - 1, side="right"))
        if end > start and word < len(words) and end <= ends[word] - 1 and (not read or word > read[-1]):
            read.append(word)
            places.append(place)
    return read, places


def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(B,) mean cross-entropies over an example's labelled tokens; 0 if it has none."""
    return mean_of_labelled(logits(model, batch), batch["labels"])


def mean_of_labelled(scores: Tensor, labels: Tensor) -> Tensor:
    """(B,) from scores (B, L, classes) and labels (B, L), `IGNORED` for a token without a label."""
    losses = functional.cross_entropy(scores.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def metrics(model: nn.Module, batches: Iterable[Mapping[str, Any]], *, names: Sequence[str]) -> dict[str, float]:
    """accuracy over words, precision, recall and f1 of entities, and the mean loss of an example."""
    losses, guesses, truths = [], list[list[str]](), list[Sequence[str]]()
    for batch in batches:
        scores = logits(model, batch)
        losses.append(mean_of_labelled(scores, batch["labels"]))
        guesses += guessed(scores, batch, names)
        truths += [sentence.tags for sentence in batch[ASIDE]]
    right = [
        guess == true
        for ours, theirs in zip(guesses, truths, strict=True)
        for guess, true in zip(ours, theirs, strict=True)
    ]
    return {
        "accuracy": sum(right) / len(right) if right else math.nan,
        **entity_scores(guesses, truths),
        "loss": float(torch.cat(losses).mean()),
    }


def guessed(scores: Tensor, batch: Mapping[str, Any], names: Sequence[str]) -> list[list[str]]:
    """The predicted tag of every word of every example; O for words that were cut off."""
    best = scores.argmax(2).cpu()
    found = []
    for row, labels, sentence in zip(best, batch["labels"].cpu(), batch[ASIDE], strict=True):
        tags = ["O"] * len(sentence.words)
        for word, tag in zip(sentence.read, row[labels != IGNORED].tolist(), strict=True):
            tags[word] = names[tag]
        found.append(tags)
    return found


class Entity(NamedTuple):
    """Words `start` to `end` - 1."""

    type: str
    start: int
    end: int


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence, in order."""
    found: list[Entity] = []
    for index, tag in enumerate(tags):
        mark, _, kind = tag.partition("-")
        goes_on = bool(found) and found[-1].end == index and found[-1].type == kind
        if mark == "I" and goes_on:
            found[-1] = found[-1]._replace(end=index + 1)
        elif mark in ("B", "I"):
            found.append(Entity(kind, index, index + 1))
    return found


def entity_scores(guesses: Iterable[Sequence[str]], truths: Iterable[Sequence[str]]) -> dict[str, float]:
    """precision, recall and f1 over all sentences: an entity is found if its type and both its ends are.

    Each is 0 if its denominator is 0, for example without predicted entities.
    """
    right = guessed = true = 0
    for guess, truth in zip(guesses, truths, strict=True):
        ours, theirs = set(entities(guess)), set(entities(truth))
        right, guessed, true = right + len(ours & theirs), guessed + len(ours), true + len(theirs)
    return {
        "precision": right / guessed if guessed else 0.0,
        "recall": right / true if true else 0.0,
        "f1": 2 * right / (guessed + true) if guessed + true else 0.0,
    }
