"""Labels as numbers of classes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from secure_fed.errors import DataError
from secure_fed.learning.data.rows import Table, vocabulary_of
from tests.cells import every
from tests.golden import refused


def table(labels: Sequence[object], names: Sequence[object] | None = None, source: str = "x.jsonl") -> Table:
    columns = {"label": list(labels)} | ({} if names is None else {"label_name": list(names)})
    return Table(source, columns, tuple(columns), range(1, len(labels) + 1))


def learned(*tables: Table) -> tuple[tuple[str, ...], tuple[int, ...]]:
    vocabulary = vocabulary_of(tables, "label")
    return vocabulary.names, vocabulary.encode(tables, "label")


@every(
    ("labels", "names", "numbers"),
    [
        (["b", "a", "b"], ("a", "b"), (1, 0, 1)),
        ([10, 2, -1], ("-1", "2", "10"), (2, 1, 0)),  # sorted as numbers, with gaps
        (["10", "2", "10"], ("2", "10"), (1, 0, 1)),  # texts that all are integers
        (["007", "7"], ("007", "7"), (0, 1)),  # codes stay names
        ([" ham", "spam ", "ham"], ("ham", "spam"), (0, 1, 0)),
        ([" 10", "2 "], ("2", "10"), (1, 0)),
        ([True, False], ("false", "true"), (1, 0)),
        (["yes", "nan"], ("nan", "yes"), (1, 0)),
    ],
)
def test_labels_are_numbered_in_order(labels: list[object], names: tuple[str, ...], numbers: tuple[int, ...]) -> None:
    assert learned(table(labels)) == (names, numbers)


def test_names_that_the_source_gives() -> None:
    """Names beside integers are used if they are one to one; declared classes keep their index even where one is absent."""
    assert learned(table([1, 0, 1], ["yes", "no", "yes"])) == (("no", "yes"), (1, 0, 1))
    assert learned(table([1, 0, 1], ["yes", "no", "maybe"]))[0] == ("0", "1")
    assert learned(table([1, 0, 1], ["yes", "yes", "yes"]))[0] == ("0", "1")
    declared = Table("d", {"label": [2, 0]}, ("label",), range(1, 3), "row", (("label", ("a", "b", "c")),))
    assert learned(declared) == (("a", "b", "c"), (2, 0))
    assert vocabulary_of([table(["10", "2"])], "label").encode([table([2])], "label") == (0,)


@every(
    "labels",
    [
        [0, 1.5, 1],
        [[1], 0],
        ["a", " "],
        ["1", "9" * 5000],
        ["0", "1.0"],
        [{"id": 1}, 0],
        ["ham"] * 3,
        *(["0", "1", word, "1"] for word in ("nan", "NA", "null", "None")),
    ],
)
def test_labels_of_no_classes_are_refused(labels: list[object]) -> None:
    with refused(DataError):
        learned(table(labels))


@every("missing", [None, math.nan])
def test_a_missing_label_is_named_before_the_numbers_that_it_has_changed(missing: object) -> None:
    """pandas stores integers as 0.0, 1.0, ... if one in their column is missing."""
    with refused(DataError):
        learned(table([0.0, 1.0]), table([1.0, missing], source="y.jsonl"))


def test_files_whose_labels_do_not_fit_together_are_refused() -> None:
    with refused(DataError):
        learned(table([0, 1]), table(["a", "b"], source="y.jsonl"))
    with refused(DataError):
        vocabulary_of([table(["a", "b"])], "label").encode([table(["a", "c"], source="test.jsonl")], "label")
