"""Texts to be labelled by a trained run: the columns it was trained on, without the labels."""

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
    if path.suffix.lower() == ".txt":
        return _text_file(path, data), None
    wanted = [name for name in (data.text, data.text_b) if name]
    table = files.read(path, wanted, "FILE")
    texts = _column(table, "data.text", data.text)
    return texts, _column(table, "data.text_b", data.text_b) if data.text_b else None


def lines(stream: Iterable[str], source: str) -> list[str]:
    """One text a line, blank lines included, so that answers can be matched by their number."""
    try:
        return [line.rstrip("\r\n") for line in stream]
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is not UTF-8 (byte 0x{error.object[error.start]:02x}); save it as UTF-8") from error


def _text_file(path: Path, data: DataConfig) -> list[str]:
    if data.text_b:
        raise DataError(
            f"{path} has one text a line, but this run labels pairs; give columns {data.text!r} and {data.text_b!r}"
        )
    try:
        with path.open(encoding="utf-8-sig") as file:
            return lines(file, str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _column(table: Table, setting: str, name: str) -> list[str]:
    if name not in table.columns:
        there = ", ".join(map(repr, table.present))
        raise DataError(f"{table.source} has no column {name!r}, the run's {setting}: it has {there}; rename one")
    texts: list[str] = []
    for row, value in enumerate(table.columns[name]):
        if not isinstance(value, str):
            raise DataError(f"{table.place(row)}: {name!r} is {value!r:.60}, which is not text; correct it")
        texts.append(value)
    return texts
