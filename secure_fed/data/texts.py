"""Columns of text, and the texts to be labelled by a trained run: the columns it was trained on, without the labels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from secure_fed.data import files
from secure_fed.data.files import Table
from secure_fed.errors import DataError

if TYPE_CHECKING:
    from secure_fed.config import DataConfig


def read_texts(path: Path, data: DataConfig) -> tuple[list[str], list[str] | None]:
    """The texts of a file, and the second texts where the run labels pairs, in the file's order.

    A `.txt` file is one text a line; any other is read as training data are, by the columns `data.text` and `data.text_b`.
    """
    if files.kind(path) == ".txt":
        if data.text_b:
            raise DataError(
                f"{path} has one text a line, but this run labels pairs; give columns {data.text!r} and {data.text_b!r}"
            )
        return _stripped(files.text_lines(path)), None
    table = files.read(path, [name for name in (data.text, data.text_b) if name], "FILE")
    texts = column(table, data.text, "data.text")
    return texts, column(table, data.text_b, "data.text_b") if data.text_b else None


def read_lines(stream: Iterable[bytes], source: str) -> list[str]:
    """One text a line of UTF-8, blank lines included, so that answers can be matched by their number."""
    return _stripped(files.decoded(stream, source))


def column(table: Table, name: str, setting: str) -> list[str]:
    """A column that holds nothing but text that a tokenizer takes; `setting` is the key that named it."""
    texts: list[str] = []
    for row, value in enumerate(table.column(name, setting)):
        if not isinstance(value, str) or not _is_unicode(value):
            what = "missing" if value is None else f"{value!r:.60}, which is not text"
            raise DataError(f"{table.place(row)}: {name!r} is {what}; correct it or make another column {setting}")
        texts.append(value)
    return texts


def _stripped(lines: Iterable[str]) -> list[str]:
    return [line.rstrip("\r\n") for line in lines]


def _is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which JSON can spell and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
