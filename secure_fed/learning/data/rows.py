"""Labelled examples as columns, returned by every source and divided by every partition; and the columns of a task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from secure_fed.config import DataConfig
from secure_fed.learning.data.labels import Vocabulary
from secure_fed.learning.data.on_disk import taken
from secure_fed.learning.data.table import Table

Texts = tuple[Sequence[Any], Sequence[Any] | None]  # the first input of every row, and the second if the task has one


@dataclass(frozen=True, slots=True)
class Rows:
    """Examples as columns of one length, tuples or `OnDisk`. The task defines the contents of `text`, `label` and `text_b`.

    text:        the (first) text of each example, or its words
    label:       the training target of each: an index into `label_names`, several, a number, a span ...
    label_names: the classes, in the order of their index; empty if the task has none
    text_b:      the second text of each, or a list of them, or None
    client:      the name of the client (site, user, file) each example belongs to, or None
    group:       the name of the person each example is about, or None
    """

    text: Sequence[Any]
    label: Sequence[Any]
    label_names: tuple[str, ...]
    text_b: Sequence[Any] | None = None
    client: tuple[str, ...] | None = None
    group: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("label", "text_b", "client", "group"):
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
        columns = {name: getattr(self, name) for name in ("text", "label", "text_b", "client", "group")}
        some: dict[str, Any] = {name: column and taken(column, order) for name, column in columns.items()}
        return replace(self, **some)


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that a task reads; "" is none."""

    text: str
    text_b: str = ""
    label: str = ""

    def chosen(self, data: DataConfig) -> Columns:
        """The columns that the settings name; where a setting is empty, this object's column."""
        return Columns(data.text or self.text, data.text_b or self.text_b, data.label or self.label)


class Reads(Protocol):
    """The part of a task that reads the rows of tables."""

    @property
    def columns(self) -> Columns:
        """The columns of inputs and labels."""

    @property
    def beside(self) -> tuple[str, ...]:
        """Columns that explain labels, read where a table has them."""

    @property
    def learned(self) -> tuple[str, ...]:
        """The columns of which a training row needs at least one with text."""

    def form(self, tables: Sequence[Table]) -> str:
        """The form in which the tables have their inputs, for the user; empty where there is only one."""

    def texts(self, tables: Sequence[Table]) -> Texts:
        """The inputs of the tables' rows, without labels."""

    def read(self, train: Sequence[Table], test: Sequence[Table]) -> tuple[Rows, Rows]:
        """Inputs and labels of both, one table after the other; the classes are those of `train`."""


class OfClasses(Reads, Protocol):
    """The part of a task that reads rows of given classes."""

    def classes(self, train: Sequence[Table]) -> Vocabulary:
        """The classes of the training data."""

    def rows(self, tables: Sequence[Table], classes: Vocabulary) -> Rows:
        """Inputs and labels of the tables, whose classes are known."""
