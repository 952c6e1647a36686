"""tests.secure_fed.data.test_rows"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from secure_fed.errors import DataError
from secure_fed.learning.data.rows import Table, vocabulary_of


def table(labels: Sequence[object], names: Sequence[object] | None = None, source: str = "x.jsonl") -> Table:
    columns = {"label": list(labels)} | ({} if names is None else {"label_name": list(names)})
    return Table(source, columns, tuple(columns), range(1, len(labels) + 1))


def learned(*tables: Table) -> tuple[tuple[str, ...], tuple[int, ...]]:
    vocabulary = vocabulary_of(tables, "label")
    return vocabulary.names, vocabulary.encode(tables, "label")


def test_names_are_sorted() -> None:
    assert learned(table(["b", "a", "b"])) == (("a", "b"), (1, 0, 1))


def test_integers_are_sorted_as_numbers_and_may_have_gaps() -> None:
    assert learned(table([10, 2, -1])) == (("-1", "2", "10"), (2, 1, 0))


def test_text_that_is_all_integers_counts_as_integers() -> None:
    assert learned(table(["10", "2", "10"])) == (("2", "10"), (1, 0, 1))
    assert vocabulary_of([table(["10", "2"])], "label").encode([table([2])], "label") == (0,)


def test_codes_with_leading_zeros_stay_names() -> None:
    assert learned(table(["007", "7"])) == (("007", "7"), (0, 1))


def test_spaces_around_a_label_do_not_count() -> None:
    assert learned(table([" ham", "spam ", "ham"])) == (("ham", "spam"), (0, 1, 0))
    assert learned(table([" 10", "2 "])) == (("2", "10"), (1, 0))


def test_truth_values_are_names() -> None:
    assert learned(table([True, False])) == (("false", "true"), (1, 0))


def test_label_names_beside_integers_are_used() -> None:
    assert learned(table([1, 0, 1], ["yes", "no", "yes"])) == (("no", "yes"), (1, 0, 1))


def test_label_names_that_are_not_one_to_one_are_left_alone() -> None:
    assert learned(table([1, 0, 1], ["yes", "no", "maybe"]))[0] == ("0", "1")
    assert learned(table([1, 0, 1], ["yes", "yes", "yes"]))[0] == ("0", "1")


def test_declared_classes_keep_their_index_even_where_one_is_absent() -> None:
    declared = Table("d", {"label": [2, 0]}, ("label",), range(1, 3), "row", (("label", ("a", "b", "c")),))
    assert learned(declared) == (("a", "b", "c"), (2, 0))


@pytest.mark.parametrize(
    ("labels", "value", "place"),
    [
        ([0, 1.5, 1], "1.5", "line 2"),
        ([[1], 0], "[1]", "line 1"),
        (["a", " "], "' '", "line 2"),
        (["1", "9" * 5000], "'" + "9" * 59, "line 2"),
        (["0", "1.0"], "'1.0'", "line 2"),
        ([{"id": 1}, 0], "{'id': 1}", "line 1"),
    ],
)
def test_a_label_that_is_neither_is_refused(labels: list[object], value: str, place: str) -> None:
    with pytest.raises(DataError) as refused:
        learned(table(labels))
    for fact in (f"label {value}", f"x.jsonl, {place}", "neither an integer nor a name", "data.label"):
        assert fact in str(refused.value)


@pytest.mark.parametrize("missing", [None, math.nan])
def test_a_missing_label_is_named_before_the_numbers_that_it_has_changed(missing: object) -> None:
    """pandas stores integers as 0.0, 1.0, ... if one in their column is missing."""
    with pytest.raises(DataError, match=r"y\.jsonl, line 2: a label is missing; add it, or set data.label"):
        learned(table([0.0, 1.0]), table([1.0, missing], source="y.jsonl"))


def test_integers_beside_names_are_refused_across_files_too() -> None:
    with pytest.raises(DataError, match=r"y\.jsonl, line 1: label 'a' beside label 0 \(x\.jsonl, line 1\)"):
        learned(table([0, 1]), table(["a", "b"], source="y.jsonl"))


def test_one_class_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"all 3 labels of x\.jsonl are 'ham'.*at least two"):
        learned(table(["ham"] * 3))


def test_a_test_label_absent_from_training_is_refused() -> None:
    vocabulary = vocabulary_of([table(["a", "b"])], "label")
    with pytest.raises(DataError, match=r"test\.jsonl, line 2: label 'c' never occurs .* 'a', 'b'"):
        vocabulary.encode([table(["a", "c"], source="test.jsonl")], "label")


@pytest.mark.parametrize("word", ["nan", "NA", "null", "None"])
def test_a_word_for_a_missing_label_beside_integers_is_no_class(word: str) -> None:
    with pytest.raises(DataError, match=rf"line 3: label '{word}' beside integers says that the label is missing"):
        vocabulary_of([table(["0", "1", word, "1"])], "label")
    assert learned(table(["yes", word]))[0] == tuple(sorted(["yes", word]))
