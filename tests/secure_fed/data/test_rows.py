"""The cells of rows: labels as numbers of classes, and conversations in all their forms."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.learning import tasks
from secure_fed.learning.data import sources
from secure_fed.learning.data.rows import Table, columns_of, vocabulary_of
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


# Conversations: their forms, their order of turns, and what is refused.


ASKED, ANSWERED = ("user", "q"), ("assistant", "a")


def messages(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": said} for role, said in turns]}


def read(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> tuple[list[Any], str]:
    """The conversations of a file's rows, and the form that was found."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = DataConfig(train=str(file), test=str(file), task="chat", **settings)
    sources.require_columns(data, columns_of(data))
    source = sources.load(data, tasks.build(data), seed=0)
    return list(source.train.text), source.form


@pytest.mark.parametrize(
    ("row", "turns", "form"),
    [
        (messages(("system", "s"), ASKED, ANSWERED), (("system", "s"), ASKED, ANSWERED), "messages"),
        (
            messages(ASKED, ANSWERED, ("tool", "4"), ("assistant", "4")),
            (ASKED, ANSWERED, ("tool", "4"), ("assistant", "4")),
            "m",
        ),
        (messages(ASKED, ("assistant", [{"type": "text", "text": "a"}])), (ASKED, ANSWERED), "messages"),
        ({"messages": json.dumps(messages(ASKED, ANSWERED)["messages"])}, (ASKED, ANSWERED), "messages"),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            (ASKED, ANSWERED),
            "ShareGPT",
        ),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            (("system", "s"), ASKED, ANSWERED),
            "ShareGPT",
        ),
        ({"instruction": "q", "input": "", "output": "a"}, (ASKED, ANSWERED), "Alpaca"),
        ({"instruction": "q", "output": "a"}, (ASKED, ANSWERED), "Alpaca"),
        ({"instruction": "q", "input": "i", "output": "a"}, (("user", "q\n\ni"), ANSWERED), "Alpaca"),
        ({"instruction": "", "input": "i", "output": "a"}, (("user", "i"), ANSWERED), "Alpaca"),
        (
            {"instruction": "q", "input": float("nan"), "output": "a", "system": float("nan")},
            (ASKED, ANSWERED),
            "Alpaca",
        ),
        ({"system": "linux", **messages(ASKED, ANSWERED)}, (ASKED, ANSWERED), "messages"),
    ],
)
def test_a_form_is_recognised_by_its_columns(row: dict[str, Any], turns: Any, form: str, tmp_path: Path) -> None:
    found, said = read(tmp_path, [row, row])
    assert found == [turns, turns]
    assert said.startswith(form)


def test_a_column_can_be_named(tmp_path: Path) -> None:
    row = {"talk": messages(ASKED, ANSWERED)["messages"], "messages": "other"}
    assert read(tmp_path, [row], text="talk")[0] == [(ASKED, ANSWERED)]


@pytest.mark.parametrize(
    "row",
    [
        messages(ANSWERED, ASKED),
        messages(ASKED, ASKED, ANSWERED),
        messages(ASKED, ("system", "s"), ANSWERED),
        messages(ASKED, ANSWERED, ANSWERED),
        messages(ASKED, ("tool", "4")),
        messages(ASKED),
        messages(ASKED, ("assistant", " \n")),
        messages(ASKED, ("assistant", None)),
        messages(ASKED, ("narrator", "x")),
        {"messages": []},
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [1]}]},
        {"instruction": "q", "output": 3},
        {"instruction": "q"},
        {"messages": "[" * 100_000},
        {"instruction": None, "input": "i", "output": "a"},
        {"instruction": "q", "input": {"i": 1}, "output": "a"},
    ],
)
def test_a_conversation_of_another_form_is_refused_by_its_line(row: dict[str, Any], tmp_path: Path) -> None:
    good = messages(ASKED, ANSWERED) if "messages" in row else {"instruction": "q", "output": "a"}
    with refused(DataError, "data.text"):
        read(tmp_path, [good, row])


def test_columns_of_no_form_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n', encoding="utf-8")
    for chosen in ("", "talk"):
        data = DataConfig(train=str(file), task="chat", text=chosen)
        with refused(DataError, "data.text"):
            sources.require_columns(data, columns_of(data))


def test_a_template_is_a_file_or_itself(tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(text, encoding="utf-8")
    for chosen in (text, str(tmp_path / "own.jinja")):
        assert tasks.build(DataConfig(task="chat", chat_template=chosen)).template == text  # type: ignore[attr-defined]
    (tmp_path / "none.jinja").write_text("hello", encoding="utf-8")
    for wrong in ("missing.jinja", "none.jinja"):
        with refused(ConfigError):
            tasks.build(DataConfig(task="chat", chat_template=str(tmp_path / wrong)))
