"""Columns of IOB2 tags (names, or numbers that the source has names for), their entities, and scores of predicted entities.

B-TYPE begins an entity, I-TYPE continues it, O is outside. An I-TYPE without an entity of its type before it begins one, as in
the script of the CoNLL shared tasks: models predict such tags, and annotators write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from secure_fed.errors import DataError
from secure_fed.learning.data.rows import Columns
from secure_fed.learning.data.table import Table
from secure_fed.learning.data.texts import text_lists

OUTSIDE = "O"


def tag_names(tables: Sequence[Table], column: str) -> tuple[str, ...]:
    """O, then B- and I- of every type in the training data, in the order of the types' names."""
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
    words = text_lists(table, columns.text, "data.text", divided=" ")
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
        yield from text_lists(table, column, "data.label", divided=" ")
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
