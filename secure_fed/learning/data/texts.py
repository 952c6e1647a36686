"""Columns of text."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, cast

from secure_fed.errors import DataError
from secure_fed.learning.data.on_disk import kept
from secure_fed.learning.data.rows import Texts
from secure_fed.learning.data.table import Table


def plain_texts(tables: Sequence[Table], text: str, text_b: str) -> Texts:
    """The column `text`, and the column `text_b` if it is named, over all tables."""
    first = kept(*(text_column(table, text, "data.text") for table in tables))
    return first, kept(*(text_column(table, text_b, "data.text_b") for table in tables)) if text_b else None


def text_column(table: Table, name: str, setting: str) -> Sequence[str]:
    """A column of texts that a tokenizer accepts; anything else is refused. setting: the key that named the column."""
    cells = table.column(name, setting)
    for row, value in enumerate(cells):
        if not is_text(value):
            what = "missing" if value is None else f"{value!r:.60}, which is not text"
            raise DataError(f"{table.place(row)}: {name!r} is {what}; correct it or make another column {setting}")
    return cast("Sequence[str]", cells)


def text_lists(table: Table, name: str, setting: str, *, divided: str | None = None) -> Iterator[list[str]]:
    """A column of lists of texts. Where a table has no lists (CSV), a text is split at `divided`."""
    for row, value in enumerate(table.column(name, setting)):
        if isinstance(value, str) and divided is not None and is_text(value):
            value = value.split(divided) if divided.strip() else value.split()
        if not isinstance(value, list | tuple) or not all(map(is_text, value)):
            raise DataError(
                f"{table.place(row)}: {name!r} is {value!r:.60}, which is not a list of texts; "
                f"correct it or make another column {setting}"
            )
        yield list(value)


def require_some_text(table: Table, name: str, setting: str) -> None:
    """Refuse a table of empty texts only: the column is the wrong one."""
    if all(map(is_blank, table.column(name, setting))):
        raise DataError(f"every {name!r} of {table.source} is empty; set {setting} to a column with text")


def require_text_to_learn(tables: Sequence[Table], learned: Sequence[tuple[str, str]]) -> None:
    """Refuse a training row without any text: it would teach a model to answer nothing, and nobody would notice.

    learned: the columns whose text a row needs, with their settings. One of them may be empty where another has text.
    """
    blank = [
        (table, row)
        for table in tables
        for row, cells in enumerate(zip(*(table.column(*one) for one in learned), strict=True))
        if all(map(is_blank, cells))
    ]
    if blank:
        table, row = blank[0]
        names = " and ".join(repr(name) for name, _ in learned)
        others = f" (as in {len(blank) - 1} more of {sum(map(len, tables))} training rows)" if len(blank) > 1 else ""
        raise DataError(
            f"{table.place(row)}: {names} {'is' if len(learned) == 1 else 'are'} empty{others}, so there is nothing to learn "
            f"from; add the text, remove the row, or set {learned[-1][1]} to another column"
        ).about(learned[-1][1], "", "a text")


def is_blank(cell: object) -> bool:
    """Whether a text, or every text of a list, has no visible character. False for values that `text_column` refuses."""
    if is_text(cell):
        return all(unicodedata.category(character) in _INVISIBLE for character in str(cell))
    return isinstance(cell, list | tuple) and all(map(is_blank, cell))


_INVISIBLE = frozenset(("Cc", "Cf", "Zs", "Zl", "Zp"))  # controls, joiners and marks of byte order, spaces and breaks


def is_chat(text: Any) -> bool:
    """Whether an input is a conversation: its turns, each a role and a text."""
    return isinstance(text, tuple) and bool(text) and all(isinstance(turn, tuple) for turn in text)


def normal_text(text: Any) -> str:
    """A text, its words, or its turns, without what a copy may change: white space, capitals, and ways to write a character."""
    if is_chat(text):
        return "\n".join(f"{role} {normal_text(said)}" for role, said in text)
    written = text if isinstance(text, str) else " ".join(map(str, text))
    return " ".join(unicodedata.normalize("NFKC", written).casefold().split())


def is_text(value: object) -> bool:
    """False for values that are no text, and for half a surrogate pair, which JSON can write and no tokenizer accepts."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
