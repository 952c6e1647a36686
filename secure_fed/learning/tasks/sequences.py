"""The parts that tasks have in common: how the rows of tables become inputs and labels, and a model's outputs by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from secure_fed.learning.data import texts
from secure_fed.learning.data.columns import Columns, Texts
from secure_fed.learning.data.files import Table
from secure_fed.learning.data.labels import Vocabulary
from secure_fed.learning.data.rows import Rows

USUAL = Columns("text", "", "label")


@dataclass(frozen=True)
class TableTask:
    """A task whose examples are the rows of tables. By default an input is a text, or a pair, and there are no classes."""

    columns: Columns

    keeps_head = False

    @property
    def beside(self) -> tuple[str, ...]:
        return ()

    def model_settings(self, label_names: Sequence[str]) -> dict[str, Any]:
        return {}

    def texts(self, tables: Sequence[Table]) -> Texts:
        return texts.plain(tables, self.columns.text, self.columns.text_b)

    def line(self, text: Any) -> Any:
        return text

    def classes(self, train: Sequence[Table]) -> Vocabulary:
        """The classes of the training data."""
        return Vocabulary((), ())

    def labels(self, tables: Sequence[Table], classes: Vocabulary) -> Sequence[Any]:
        """The label of every row of the tables."""
        raise NotImplementedError

    def read(self, train: Sequence[Table], test: Sequence[Table]) -> tuple[Rows, Rows]:
        classes = self.classes(train)
        return self._rows(train, classes), self._rows(test, classes)

    def _rows(self, tables: Sequence[Table], classes: Vocabulary) -> Rows:
        first, second = self.texts(tables)
        labels = tuple(self.labels(tables, classes))
        return Rows(tuple(first), labels, classes.names, None if second is None else tuple(second))


def named(label_names: Sequence[str]) -> dict[str, Any]:
    """A model's outputs by name."""
    return {"id2label": dict(enumerate(label_names)), "label2id": {name: i for i, name in enumerate(label_names)}}
