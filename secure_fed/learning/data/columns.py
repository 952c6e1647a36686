"""The columns that a task reads, and the part of a task that sources of data depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from secure_fed.config import DataConfig
from secure_fed.learning.data.files import Table
from secure_fed.learning.data.rows import Rows

Texts = tuple[list[Any], list[Any] | None]  # the first input of every row, and the second where the task has one


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that a task reads; "" is none."""

    text: str
    text_b: str = ""
    label: str = ""

    def chosen(self, data: DataConfig) -> Columns:
        """The columns that the settings name; where a setting is empty, the column given here."""
        return Columns(data.text or self.text, data.text_b or self.text_b, data.label or self.label)


class Reads(Protocol):
    """The part of a task that reads the rows of tables."""

    @property
    def columns(self) -> Columns:
        """The columns of inputs and labels."""

    @property
    def beside(self) -> tuple[str, ...]:
        """Columns that explain labels, read where a table has them."""

    def texts(self, tables: Sequence[Table]) -> Texts:
        """The inputs of the tables' rows, without labels."""

    def read(self, train: Sequence[Table], test: Sequence[Table]) -> tuple[Rows, Rows]:
        """Inputs and labels of both, one table after the other; the classes are those of `train`."""
