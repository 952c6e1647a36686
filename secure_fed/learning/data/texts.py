"""Columns of text, and the texts to be judged by a trained run: the columns it was trained on, without the labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from secure_fed.errors import DataError
from secure_fed.learning.data import files
from secure_fed.learning.data.formats import decoded, text_lines
from secure_fed.learning.data.rows import Reads, Texts
from secure_fed.learning.data.table import Table


def read_texts(path: Path, task: Reads) -> Texts:
    """The texts of a file, and the second texts where the task has such, in the file's order.

    A `.txt` file is one text a line; any other is read as training data are, by the columns `data.text` and `data.text_b`.
    """
    columns = task.columns
    if files.kind(path) == ".txt":
        if columns.text_b:
            raise DataError(
                f"{path} has one text a line, but this run labels pairs; give columns {columns.text!r} and "
                f"{columns.text_b!r}"
            )
        return _stripped(text_lines(path)), None
    table = files.read(path, [name for name in (columns.text, columns.text_b) if name], "FILE")
    return task.texts([table])


def read_lines(stream: Iterable[bytes], source: str) -> list[str]:
    """One text a line of UTF-8, blank lines included, so that answers can be matched by their number."""
    return _stripped(decoded(stream, source))


def plain(tables: Sequence[Table], text: str, text_b: str) -> Texts:
    """The columns of a text, and of a second one if `text_b` names it, over all tables."""
    first = [cell for table in tables for cell in column(table, text, "data.text")]
    second = [cell for table in tables for cell in column(table, text_b, "data.text_b")] if text_b else None
    return first, second


def column(table: Table, name: str, setting: str) -> list[str]:
    """A column that holds nothing but text that a tokenizer takes; `setting` is the key that named it."""
    texts: list[str] = []
    for row, value in enumerate(table.column(name, setting)):
        if not is_text(value):
            what = "missing" if value is None else f"{value!r:.60}, which is not text"
            raise DataError(f"{table.place(row)}: {name!r} is {what}; correct it or make another column {setting}")
        texts.append(str(value))
    return texts


def lists(table: Table, name: str, setting: str, *, divided: str | None = None) -> list[list[str]]:
    """A column that holds lists of texts. Where a table has no lists (CSV), `divided` is what parts a text into one."""
    found: list[list[str]] = []
    for row, value in enumerate(table.column(name, setting)):
        if isinstance(value, str) and divided is not None and is_text(value):
            value = value.split(divided) if divided.strip() else value.split()
        if not isinstance(value, list | tuple) or not all(map(is_text, value)):
            raise DataError(
                f"{table.place(row)}: {name!r} is {value!r:.60}, which is not a list of texts; "
                f"correct it or make another column {setting}"
            )
        found.append([str(one) for one in value])
    return found


def require_some(table: Table, name: str, setting: str) -> None:
    """Some blank texts occur in real data and stay; a table of nothing else is refused."""
    cells = table.column(name, setting)
    if all(
        not cell.strip() if isinstance(cell, str) else isinstance(cell, list | tuple) and not cell for cell in cells
    ):
        raise DataError(f"every {name!r} of {table.source} is empty; set {setting} to a column with text")


def is_text(value: object) -> bool:
    """False for what is no text, and for half a surrogate pair, which JSON can spell and no tokenizer takes."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _stripped(lines: Iterable[str]) -> list[str]:
    return [line.rstrip("\r\n") for line in lines]
