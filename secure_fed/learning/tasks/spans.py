"""Answers that stand in a context: read from columns, and compared as SQuAD does (Rajpurkar et al., 2016, arXiv 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from secure_fed.errors import DataError
from secure_fed.learning.data.rows import Columns
from secure_fed.learning.data.table import Table
from secure_fed.learning.data.texts import is_text, text_column

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Answers(NamedTuple):
    """texts: all right answers. first: the first answer's place, from its first character to the one after its last."""

    texts: tuple[str, ...] = ()
    first: tuple[int, int] = (0, 0)


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


def normalised(answer: str) -> str:
    """Lower case, then without punctuation, then without articles, with single spaces."""
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
