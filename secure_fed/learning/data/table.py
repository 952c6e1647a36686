"""A file of examples, or a split of a data set, as columns, with the place of every row for error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from secure_fed.errors import DataError


@dataclass(frozen=True, slots=True)
class Table:
    """The wanted columns of one file or one split of a data set.

    source:  its name in error messages: a path, or a data set and its split
    columns: the wanted columns that are present; a cell absent from a row is None. Long ones are on disk
    present: the names of all its columns, wanted or not
    lines:   for each row the line it starts on (text files), or its number from 1
    unit:    the unit of `lines`: "line" or "row"
    classes: the names of integer labels, by label column, if the source itself declares them
    """

    source: str
    columns: Mapping[str, Sequence[object]]
    present: tuple[str, ...]
    lines: Sequence[int]
    unit: str = "line"
    classes: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __len__(self) -> int:
        return len(self.lines)

    def place(self, row: int) -> str:
        """The place of row number `row` (from 0), in words."""
        return f"{self.source}, {self.unit} {self.lines[row]}"

    def column(self, name: str, setting: str) -> Sequence[object]:
        """The column `name`, which the user chose by `setting`."""
        if name not in self.columns:
            there = ", ".join(repr(column) for column in self.present)
            raise DataError(
                f"{self.source} has no column {name!r}: it has {there}; set {setting} to one of them or rename one"
            )
        return self.columns[name]
