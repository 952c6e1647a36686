"""The dates of the texts, in a column that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attacks.evidence.blind import when
from secure_fed.errors import DataError
from secure_fed.learning.data import files


def column(parts: Sequence[tuple[Path, str]], kept: Sequence[Sequence[int]], name: str) -> tuple[object, ...]:
    """The dates of all files' kept rows. parts: files and their options. DataError for a date that cannot be read."""
    return tuple(one for part, rows in zip(parts, kept, strict=True) for one in _read(*part, rows, name))


def _read(path: Path, option: str, rows: Sequence[int], name: str) -> tuple[object, ...]:
    values = files.read(path, [name], option).column(name, "--date")
    for row in rows:
        try:
            when(values[row])
        except ValueError as error:
            raise DataError(
                f"row {row + 1} of {option} has {values[row]!r:.40} in the column {name!r}, which --date cannot read: write "
                "dates as 2021-07-04, and leave out the date of a text that has none"
            ) from error
    return tuple(values[row] for row in rows)
