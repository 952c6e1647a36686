"""What the tasks share that judge a text, or a pair of texts, as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from secure_fed.learning.data import texts
from secure_fed.learning.data.columns import Columns, Texts
from secure_fed.learning.data.files import Table
from secure_fed.learning.data.rows import Rows

USUAL = Columns("text", "", "label")


def read_texts(tables: Sequence[Table], columns: Columns) -> Texts:
    """The texts, and the second ones of pairs."""
    return texts.plain(tables, columns.text, columns.text_b)


def labelled(
    tables: Sequence[Table], columns: Columns, labels: Sequence[Any], label_names: tuple[str, ...] = ()
) -> Rows:
    """The texts of the tables with these labels."""
    first, second = read_texts(tables, columns)
    return Rows(tuple(first), tuple(labels), label_names, None if second is None else tuple(second))


def named(label_names: Sequence[str]) -> dict[str, Any]:
    """A model's outputs by name."""
    return {"id2label": dict(enumerate(label_names)), "label2id": {name: i for i, name in enumerate(label_names)}}
