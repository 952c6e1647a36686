"""Labels in the data, converted to indices: integers in ascending order, or names in alphabetical order.

A label is an integer, or text that names a class. Text that is an integer in Python's notation ("7", not "007")
is read as an integer if all labels are of this kind, because CSV has no other way. True and false are names.
Spaces around a label are ignored, as in the line `text, label` of a CSV file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn
from unicodedata import normalize

from secure_fed.errors import DataError
from secure_fed.learning.data.table import Table

Label = int | str

_ABSENT = frozenset(("nan", "na", "n/a", "null", "none"))
_DIGITS = 1000  # of an integer; Python itself reads no more than a few thousand
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(nan|inf)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The classes of the training data: class i has the name `names[i]` and the value `values[i]` in the data."""

    values: tuple[Label, ...]
    names: tuple[str, ...]

    def encode(self, tables: Sequence[Table], column: str) -> tuple[int, ...]:
        """The index of every label of `tables`; a label that is no class of the training data is refused."""
        index = {value: position for position, value in enumerate(self.values)}
        encoded = []
        labels = _labels(tables, column, integers=isinstance(self.values[0], int))
        for table, of_table in zip(tables, labels, strict=True):
            for row, label in enumerate(of_table):
                if label not in index:
                    some = ", ".join(map(repr, self.values[:8])) + (", ..." if len(self.values) > 8 else "")
                    raise DataError(
                        f"{table.place(row)}: label {label!r} never occurs in the training data, whose "
                        f"labels are {some}; remove the row or set data.label to another column"
                    )
                encoded.append(index[label])
        return tuple(encoded)


def vocabulary_of(tables: Sequence[Table], column: str) -> Vocabulary:
    """The classes of the training data: at least two, sorted, with their names in the data."""
    labels = _labels(tables, column, integers=_all_integers(tables, column))
    distinct = {label for of_table in labels for label in of_table}
    values: tuple[Label, ...] = tuple(sorted(distinct, key=lambda label: (isinstance(label, str), label)))
    if len(values) == 1:
        more = f" and {len(tables) - 1} more" if len(tables) > 1 else ""
        raise DataError(
            f"all {sum(map(len, tables))} labels of {tables[0].source}{more} are {values[0]!r}, and classification "
            f"needs at least two classes; give other data or set data.label to another column"
        )
    declared = _declared(tables, column)
    if declared and all(isinstance(value, int) and 0 <= value < len(declared) for value in values):
        return Vocabulary(tuple(range(len(declared))), declared)
    return Vocabulary(values, _beside(tables, labels, column, values) or tuple(map(str, values)))


def _all_integers(tables: Sequence[Table], column: str) -> bool:
    """Whether all labels written as text are integers; a column of numbers that are no integers is refused."""
    texts = [
        (table, row, value)
        for table in tables
        for row, value in enumerate(_cells(table, column))
        if isinstance(value, str)
    ]
    if all(_INTEGER.fullmatch(value) for _, _, value in texts):
        return True
    _refuse_absent(texts)
    if all(_NUMBER.fullmatch(value) for _, _, value in texts):
        for table, row, value in texts:
            if "." in value:
                _refuse(table, row, value)
    return False


def _refuse_absent(texts: Sequence[tuple[Table, int, str]]) -> None:
    """Refuse a word for a missing label, such as "nan", if all other labels written as text are integers."""
    absent = [(table, row, value) for table, row, value in texts if value.lower() in _ABSENT]
    if absent and all(_INTEGER.fullmatch(value) or value.lower() in _ABSENT for _, _, value in texts):
        table, row, value = absent[0]
        raise DataError(
            f"{table.place(row)}: label {value!r} beside integers says that the label is missing; add it, remove the row, or "
            "give the class another name if it is one"
        )


def _labels(tables: Sequence[Table], column: str, *, integers: bool) -> list[list[Label]]:
    """The labels of each table: all integers or all names, over all tables.

    A missing label is refused first, since it may be the reason why other labels became decimal numbers.
    """
    for table in tables:
        for row, value in enumerate(_cells(table, column)):
            if value is None or value != value:
                raise DataError(f"{table.place(row)}: a label is missing; add it, or set data.label to another column")
    labels: list[list[Label]] = []
    first: tuple[Label, str] | None = None
    for table in tables:
        of_table: list[Label] = []
        for row, value in enumerate(_cells(table, column)):
            label = _label(table, row, value, integers=integers)
            first = first or (label, table.place(row))
            if isinstance(label, int) != isinstance(first[0], int):
                raise DataError(
                    f"{table.place(row)}: label {label!r} beside label {first[0]!r} ({first[1]}) mixes "
                    f"integers and names; write one or the other, or set data.label to another column"
                )
            of_table.append(label)
        labels.append(of_table)
    return labels


def _cells(table: Table, column: str) -> list[object]:
    values = table.column(column, "data.label")
    return [normalize("NFC", value.strip() or value) if isinstance(value, str) else value for value in values]


def _label(table: Table, row: int, value: object, *, integers: bool) -> Label:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and integers and _INTEGER.fullmatch(value):
        if len(value) > _DIGITS:
            _refuse(table, row, value)
        return int(value)
    if not isinstance(value, int | str) or (isinstance(value, str) and not value.strip()):
        _refuse(table, row, value)
    return value


def _refuse(table: Table, row: int, value: object) -> NoReturn:
    raise DataError(
        f"{table.place(row)}: label {value!r:.60} is neither an integer nor a name; "
        f"correct it or set data.label to another column"
    )


def _declared(tables: Sequence[Table], column: str) -> tuple[str, ...] | None:
    """The class names that the source itself declares, if all its tables agree."""
    declared = {dict(table.classes).get(column) for table in tables}
    return declared.pop() if len(declared) == 1 else None


def _beside(
    tables: Sequence[Table], labels: Sequence[Sequence[Label]], column: str, values: Sequence[Label]
) -> tuple[str, ...] | None:
    """The names in the column `<label>_name`, if labels and names correspond one to one."""
    beside = f"{column}_name"
    if not all(beside in table.columns for table in tables):
        return None
    pairs = {
        (label, str(name))
        for table, of_table in zip(tables, labels, strict=True)
        for label, name in zip(of_table, table.columns[beside], strict=True)
    }
    names = dict(pairs)
    one_to_one = len(pairs) == len(names) == len(set(names.values()))
    return tuple(names[value] for value in values) if one_to_one else None
