"""From the cells of a table to the examples of a task.

A reader returns a `Table`: the columns of one file, or of one split of a data set, as they are written. The functions below it
check its columns of text, and `Vocabulary` converts its labels to indices. `Columns` names the columns that a task reads, and
`Rows` are labelled examples, which every source returns and every partition divides.
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar, cast

from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.learning.data.on_disk import kept, taken


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
            ).about(setting, name, "a column that there is")
        return self.columns[name]


Texts = tuple[Sequence[Any], Sequence[Any] | None]  # the first input of every row, and the second if the task has one
_INVISIBLE = frozenset(("Cc", "Cf", "Zs", "Zl", "Zp"))  # controls, joiners and marks of byte order, spaces and breaks


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


def text_lists(table: Table, name: str, setting: str, *, divided: bool = False) -> Iterator[list[str]]:
    """A column of lists of texts. divided: where a table has no lists (CSV), a text is split at its spaces."""
    for row, value in enumerate(table.column(name, setting)):
        if isinstance(value, str) and divided and is_text(value):
            value = value.split()
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


def is_text(value: object) -> bool:
    """False for values that are no text, and for half a surrogate pair, which JSON can write and no tokenizer accepts."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def is_blank(cell: object) -> bool:
    """Whether a text, or every text of a list, has no visible character. False for values that `text_column` refuses."""
    if is_text(cell):
        return all(unicodedata.category(character) in _INVISIBLE for character in str(cell))
    return isinstance(cell, list | tuple) and all(map(is_blank, cell))


def is_chat(text: Any) -> bool:
    """Whether an input is a conversation: its turns, each a role and a text."""
    return isinstance(text, tuple) and bool(text) and all(isinstance(turn, tuple) for turn in text)


def normal_text(text: Any) -> str:
    """A text, its words, or its turns, without what a copy may change: white space, capitals, and ways to write a character."""
    if is_chat(text):
        return "\n".join(f"{role} {normal_text(said)}" for role, said in text)
    written = text if isinstance(text, str) else " ".join(map(str, text))
    return " ".join(unicodedata.normalize("NFKC", written).casefold().split())


Label = int | str
_ABSENT = frozenset(("nan", "na", "n/a", "null", "none"))
_DIGITS = 1000  # of an integer; Python itself reads no more than a few thousand
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(nan|inf)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The classes of the training data: class i has the name `names[i]` and the value `values[i]` in the data.

    A label is an integer, or text that names a class. Integers are in ascending order, names in alphabetical order. Text that
    is an integer in Python's notation ("7", not "007") is read as an integer if all labels are of this kind, because CSV has
    no other way. True and false are names. Spaces around a label are ignored, as in the line `text, label` of a CSV file.
    """

    values: tuple[Label, ...]
    names: tuple[str, ...]

    def encode(self, tables: Sequence[Table], column: str) -> tuple[int, ...]:
        """The index of every label of `tables`; a label that is no class of the training data is refused."""
        index = {value: position for position, value in enumerate(self.values)}
        labels = _labels(tables, column, integers=isinstance(self.values[0], int))
        for label, (table, row, _) in zip(labels, _cells(tables, column), strict=True):
            if label not in index:
                some = ", ".join(map(repr, self.values[:8])) + (", ..." if len(self.values) > 8 else "")
                raise DataError(
                    f"{table.place(row)}: label {label!r} never occurs in the training data, whose "
                    f"labels are {some}; remove the row or set data.label to another column"
                )
        return tuple(index[label] for label in labels)


def vocabulary_of(tables: Sequence[Table], column: str) -> Vocabulary:
    """The classes of the training data: at least two, sorted, with their names in the data."""
    labels = _labels(tables, column, integers=_all_integers(tables, column))
    values: tuple[Label, ...] = tuple(sorted(set(labels), key=lambda label: (isinstance(label, str), label)))
    if len(values) == 1:
        more = f" and {len(tables) - 1} more" if len(tables) > 1 else ""
        raise DataError(
            f"all {sum(map(len, tables))} labels of {tables[0].source}{more} are {values[0]!r}, and classification "
            f"needs at least two classes; give other data or set data.label to another column"
        )
    declared = {dict(table.classes).get(column) for table in tables}
    named = declared.pop() if len(declared) == 1 else None  # by the source itself, if all its tables agree
    if named and all(isinstance(value, int) and 0 <= value < len(named) for value in values):
        return Vocabulary(tuple(range(len(named))), named)
    return Vocabulary(values, _beside(tables, labels, column, values) or tuple(map(str, values)))


def _all_integers(tables: Sequence[Table], column: str) -> bool:
    """Whether all labels written as text are integers.

    A column of numbers that are no integers is refused, and so is a word for a missing label, such as "nan", beside integers
    alone.
    """
    texts = [(table, row, value) for table, row, value in _cells(tables, column) if isinstance(value, str)]
    if all(_INTEGER.fullmatch(value) for _, _, value in texts):
        return True
    absent = [(table, row, value) for table, row, value in texts if value.lower() in _ABSENT]
    if absent and all(_INTEGER.fullmatch(value) or value.lower() in _ABSENT for _, _, value in texts):
        table, row, value = absent[0]
        raise DataError(
            f"{table.place(row)}: label {value!r} beside integers says that the label is missing; add it, remove the row, or "
            "give the class another name if it is one"
        )
    if all(_NUMBER.fullmatch(value) for _, _, value in texts):
        for table, row, value in texts:
            if "." in value:
                _refuse(table, row, value)
    return False


def _labels(tables: Sequence[Table], column: str, *, integers: bool) -> list[Label]:
    """The labels of all tables, one table after the other: all integers or all names.

    A missing label is refused first, since it may be the reason why other labels became decimal numbers.
    """
    for table, row, value in _cells(tables, column):
        if value is None or value != value:
            raise DataError(f"{table.place(row)}: a label is missing; add it, or set data.label to another column")
    labels: list[Label] = []
    first: tuple[Label, str] | None = None
    for table, row, value in _cells(tables, column):
        label = _label(table, row, value, integers=integers)
        first = first or (label, table.place(row))
        if isinstance(label, int) != isinstance(first[0], int):
            raise DataError(
                f"{table.place(row)}: label {label!r} beside label {first[0]!r} ({first[1]}) mixes "
                f"integers and names; write one or the other, or set data.label to another column"
            )
        labels.append(label)
    return labels


def _cells(tables: Sequence[Table], column: str) -> Iterator[tuple[Table, int, object]]:
    """Every label as it is written, with its table and its row."""
    for table in tables:
        for row, value in enumerate(table.column(column, "data.label")):
            cell = unicodedata.normalize("NFC", value.strip() or value) if isinstance(value, str) else value
            yield table, row, cell


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


def _beside(
    tables: Sequence[Table], labels: Sequence[Label], column: str, values: Sequence[Label]
) -> tuple[str, ...] | None:
    """The names in the column `<label>_name`, if labels and names correspond one to one."""
    beside = f"{column}_name"
    if not all(beside in table.columns for table in tables):
        return None
    written = (str(name) for table in tables for name in table.columns[beside])
    pairs = set(zip(labels, written, strict=True))
    names = dict(pairs)
    one_to_one = len(pairs) == len(names) == len(set(names.values()))
    return tuple(names[value] for value in values) if one_to_one else None


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that a task reads; "" is none."""

    text: str
    text_b: str = ""
    label: str = ""

    def chosen(self, data: DataConfig) -> Columns:
        """The columns that the settings name; where a setting is empty, this object's column."""
        return Columns(data.text or self.text, data.text_b or self.text_b, data.label or self.label)


# The columns that each task reads by default.
_USUAL = Columns("text", "", "label")
_OWN = {
    "tokens": Columns("tokens", "", "tags"),
    "question_answering": Columns("question", "context", "answers"),
    "causal_lm": Columns("text"),
    "chat": Columns(""),  # one of several forms, which `data/chats.py` recognises by their columns
    "multiple_choice": Columns("text", "choices", "label"),
}


def columns_of(data: DataConfig) -> Columns:
    """The columns of the task `data.task`, where the settings of [data] name no others. Refuses a label that is an input.

    Needs no torch, so that a wrong column is reported at once.
    """
    found = _OWN.get(data.task, _USUAL).chosen(data)
    if found.label and found.label in (found.text, found.text_b):
        setting = "data.text" if found.label == found.text else "data.text_b"
        raise ConfigError(
            f"{setting} and data.label are both {found.label!r}, so that the model would read the answer: set one of them to "
            "another column"
        ).about(setting, found.label, "another column than data.label")
    return found


@dataclass(frozen=True, slots=True)
class Rows:
    """Examples as columns of one length, tuples or `OnDisk`. The task defines the contents of `text`, `label` and `text_b`.

    text:        the (first) text of each example, or its words
    label:       the training target of each: an index into `label_names`, several, a number, a span ...
    label_names: the classes, in the order of their index; empty if the task has none
    text_b:      the second text of each, or a list of them, or None
    client:      the name of the client (site, user, file) each example belongs to, or None
    person:      the name of the person each example is about, or None
    """

    text: Sequence[Any]
    label: Sequence[Any]
    label_names: tuple[str, ...]
    text_b: Sequence[Any] | None = None
    client: tuple[str, ...] | None = None
    person: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("label", "text_b", "client", "person"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.text):
                raise ValueError(f"column {name!r} has {len(column)} entries and 'text' has {len(self.text)}")

    def __len__(self) -> int:
        return len(self.text)

    @property
    def classes(self) -> Sequence[int] | None:
        """The class of each example, if every example has exactly one."""
        return self.label if self.label_names and all(isinstance(label, int) for label in self.label) else None

    def take(self, indices: Iterable[int]) -> Rows:
        """The examples at `indices`, in that order."""
        order = [int(index) for index in indices]
        columns = {name: getattr(self, name) for name in ("text", "label", "text_b", "client", "person")}
        some: dict[str, Any] = {name: column and taken(column, order) for name, column in columns.items()}
        return replace(self, **some)


@dataclass(frozen=True)
class Reads(ABC):
    """The part of a task that reads the rows of tables. By default an input is a text, or a pair of texts, and there are no
    classes.
    """

    columns: Columns

    @property
    def beside(self) -> tuple[str, ...]:
        """Columns that explain labels, read where a table has them."""
        return ()

    @property
    def learned(self) -> tuple[str, ...]:
        """The columns of which a training row needs at least one with text."""
        return tuple(name for name in (self.columns.text, self.columns.text_b) if name)

    def form(self, tables: Sequence[Table]) -> str:
        """The form in which the tables have their inputs, for the user; empty where there is only one."""
        return ""

    def texts(self, tables: Sequence[Table]) -> Texts:
        """The inputs of the tables' rows, without labels, as `kept` has them."""
        return plain_texts(tables, self.columns.text, self.columns.text_b)

    def classes(self, train: Sequence[Table]) -> Vocabulary:
        """The classes of the training data."""
        return Vocabulary((), ())

    @abstractmethod
    def labels(self, tables: Sequence[Table], classes: Vocabulary) -> Iterable[Any]:
        """The label of every row of the tables."""

    def read(self, train: Sequence[Table], test: Sequence[Table]) -> tuple[Rows, Rows]:
        """Inputs and labels of both, one table after the other; the classes are those of `train`."""
        classes = self.classes(train)
        return self.rows(train, classes), self.rows(test, classes)

    def rows(self, tables: Sequence[Table], classes: Vocabulary) -> Rows:
        """Inputs and labels of the tables, whose classes are known."""
        first, second = self.texts(tables)
        return Rows(first, kept(self.labels(tables, classes)), classes.names, second)


K = TypeVar("K", bound=Hashable)


def places_of(keys: Iterable[K]) -> dict[K, list[int]]:
    """The positions of each key, in the order of first occurrence."""
    places: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places
