import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.learning import tasks
from secure_fed.learning.data import hub, sources
from secure_fed.learning.data.sources import Source
from tests.golden import refused


def load(seed: int = 0, person: str = "", **settings: object) -> Source:
    data = DataConfig(**{"examples": 60, "test_examples": 30, "test_fraction": 0.2, **settings})  # type: ignore[arg-type]
    return sources.load(data, tasks.build(data), seed=seed, person=person)


def examples(count: int, classes: int = 2, tag: str = "note") -> list[dict[str, object]]:
    return [
        {"text": f"{tag} {i}", "label": f"c{i % classes}", "site": f"s{i % 3}", "other": f"pair {i}"}
        for i in range(count)
    ]


def jsonl(path: Path, rows: Sequence[Mapping[str, object]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_builtin_notes_follow_the_settings_and_are_keyed_by_site_on_request() -> None:
    source = load(seed=3)
    assert (len(source.train), len(source.test), source.keyed) == (60, 30, False)
    assert source == load(seed=3)
    assert source.train != load(seed=4).train
    assert load(client="site").keyed
    with refused(DataError):
        load(client="ward")


def test_train_and_test_files(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "train.jsonl", examples(5))
    test = jsonl(tmp_path / "test.jsonl", [{"text": "unseen", "label": "c1"}])
    source = load(train=train, test=test, name="ignored")
    assert source.train.text == tuple(f"note {i}" for i in range(5))
    assert source.train.label == (0, 1, 0, 1, 0)
    assert source.train.label_names == source.test.label_names == ("c0", "c1")
    assert (source.test.text, source.test.label) == (("unseen",), (1,))
    assert not source.keyed


def test_columns_are_nameable_and_the_test_file_needs_no_client(tmp_path: Path) -> None:
    rows = [{"a": f"x{i}", "b": f"y{i}", "gold": i % 2, "who": f" {i % 3} "} for i in range(6)]
    train = jsonl(tmp_path / "a.jsonl", rows)
    test = jsonl(tmp_path / "b.jsonl", [{"a": "p", "b": "q", "gold": 1}])
    source = load(train=train, test=test, text="a", text_b="b", label="gold", client="who")
    assert source.train.text_b == tuple(f"y{i}" for i in range(6))
    assert source.train.client == ("0", "1", "2", "0", "1", "2")
    assert source.keyed
    assert (source.test.text_b, source.test.client) == (("q",), None)


def test_each_file_of_a_list_is_one_client_with_a_name_of_its_own(tmp_path: Path) -> None:
    paths = [jsonl(tmp_path / name, examples(4, tag=name)) for name in ("a/x.jsonl", "b/x.jsonl", "c/y.jsonl")]
    test = jsonl(tmp_path / "test.jsonl", examples(2))
    source = load(train=paths, test=test)
    assert source.train.client == ("x",) * 4 + ("x-2",) * 4 + ("y",) * 4
    assert source.keyed
    assert load(train=tuple(paths[:1]), test=test).train.client == ("x",) * 4
    assert load(train=paths[:2], test=test, client="site").train.client == ("s0", "s1", "s2", "s0") * 2


@pytest.mark.parametrize(("setting", "held_out"), [("train", "test"), ("name", "validation")])
def test_a_folder_of_splits(tmp_path: Path, setting: str, held_out: str) -> None:
    jsonl(tmp_path / "train-0.jsonl", examples(4))
    jsonl(tmp_path / "train-1.jsonl", examples(2))
    jsonl(tmp_path / f"{held_out}.jsonl", examples(3))
    source = load(**{setting: str(tmp_path)})
    assert (len(source.train), len(source.test), source.keyed) == (6, 3, False)


def test_a_folder_given_as_test(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "mine.jsonl", examples(4))
    jsonl(tmp_path / "held/test.jsonl", examples(3))
    assert len(load(train=train, test=str(tmp_path / "held")).test) == 3
    with refused(DataError):
        load(train=train, test=str(tmp_path))


def test_without_test_data_a_fraction_is_held_out_by_seed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "all.jsonl", examples(50))
    source = load(train=path)
    assert (len(source.train), len(source.test)) == (40, 10)
    assert sorted(source.train.text + source.test.text) == sorted(f"note {i}" for i in range(50))
    assert source == load(train=path)
    assert source.test != load(train=path, seed=1).test


def test_held_out_rows_leave_each_class_and_client_one_in_training(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "all.jsonl", examples(12, classes=4))
    for seed in range(10):
        source = load(train=path, client="site", test_fraction=0.9, seed=seed)
        assert set(source.train.label) == {0, 1, 2, 3}
        assert set(source.train.client or ()) == {"s0", "s1", "s2"}
        assert len(source.test) >= 1


@pytest.mark.parametrize("blank", ["", " \t", "\u200b\ufeff"])
def test_an_empty_training_text_is_refused_by_its_line_and_an_empty_test_text_stays(tmp_path: Path, blank: str) -> None:
    path, full = jsonl(tmp_path / "x.jsonl", change(2, text=blank)), jsonl(tmp_path / "full.jsonl", examples(6))
    for files in ({"train": path, "test": full}, {"train": path}):
        with refused(DataError, "data.text"):
            load(**files)
    assert load(train=full, test=path).test.text[2] == blank
    every = jsonl(tmp_path / "every.jsonl", [row | {"text": blank} for row in examples(6)])
    for files in ({"train": every}, {"train": full, "test": every}):  # a wrong column
        with refused(DataError):
            load(**files)


def test_one_text_of_a_pair_may_be_empty_and_not_both(tmp_path: Path) -> None:
    rows = [row | {"other": "" if number else "b"} for number, row in enumerate(examples(6))]
    assert load(train=jsonl(tmp_path / "pairs.jsonl", rows), text_b="other")
    rows[4]["text"] = ""
    with refused(DataError, "data.text_b"):
        load(train=jsonl(tmp_path / "both.jsonl", rows), text_b="other")


def change(row: int, **cells: object) -> list[dict[str, object]]:
    rows = examples(6)
    rows[row] |= cells
    return rows


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (examples(6), {"label": "gold"}),
        (examples(6), {"text": "body"}),
        (examples(6), {"text_b": "second"}),
        (examples(6), {"client": "ward"}),
        (change(2, text=None), {}),
        (change(2, text=7), {}),
        (change(4, text="\ud800"), {}),
        (change(3, other=None), {"text_b": "other"}),
        (change(1, site=None), {"client": "site"}),
        (change(1, label=0.5), {}),
        ([row | {"label": 3} for row in examples(6)], {}),
    ],
)
def test_bad_columns_are_refused_by_name(
    tmp_path: Path, rows: list[dict[str, object]], settings: dict[str, str]
) -> None:
    with refused(DataError):
        load(train=jsonl(tmp_path / "bad.jsonl", rows), **settings)


def test_settings_that_do_not_fit_together_or_name_what_is_not_there(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", examples(4))
    with refused(DataError):
        load(test=path)
    with refused(DataError):
        load(name=path)
    (tmp_path / "none").mkdir()
    with refused(DataError):
        load(train=str(tmp_path / "none"))
    with refused(DataError):
        load(train=jsonl(tmp_path / "two.jsonl", examples(2)))
    jsonl(tmp_path / "train.jsonl", examples(4))
    with refused(ConfigError, "data.revision"):
        load(name=str(tmp_path), revision="v2")
    train = jsonl(tmp_path / "train.jsonl", examples(4))
    with refused(DataError):
        load(train=train, test=train, person="patient")
    with refused(DataError):
        load(person="patient")


def test_a_hub_data_set_uses_declared_classes_and_the_first_labelled_test_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )

    def split(text: str, *labels: int) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"text": [text] * len(labels), "label": labels}, features)

    stored = {"train": split("train", 1, 0, 1), "test": split("unlabelled", -1, -1), "validation": split("v", 0)}
    asked: list[object] = []

    def load_dataset(*arguments: object, revision: object) -> object:
        asked.append((*arguments, revision))
        return stored

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "commit", lambda *asked: "")
    source = load(name="someone/reviews:english")
    assert asked == [("someone/reviews", "english", None)]
    assert source.train.label_names == ("bad", "good")
    assert source.train.label == (1, 0, 1)
    assert source.test.text == ("v",)
    chosen = load(name="someone/reviews", revision="v2", test_split="train")
    assert asked[1] == ("someone/reviews", None, "v2")
    assert chosen.test.text == source.train.text


def test_a_folder_saved_by_datasets(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(examples(10))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    assert load(name=str(tmp_path / "saved"), client="site").train.client == (("s0", "s1", "s2") * 4)[:10]
    rows.save_to_disk(tmp_path / "whole")
    source = load(name=str(tmp_path / "whole"))
    assert (len(source.train), len(source.test)) == (8, 2)


@pytest.mark.parametrize(("setting", "splits"), [("train", True), ("test", False)])
def test_a_folder_saved_by_datasets_is_no_file(setting: str, splits: bool, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(examples(6))
    (datasets.DatasetDict({"train": rows}) if splits else rows).save_to_disk(tmp_path / "saved")
    files = {"train": jsonl(tmp_path / "rows.jsonl", examples(6)), setting: str(tmp_path / "saved")}
    with refused(DataError):
        load(**files)


@pytest.mark.parametrize("names", [["bad", "good"], None])
def test_class_names_that_datasets_keeps_in_a_parquet_file(names: list[str] | None, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"] * 4, "label": [1, 0, 1] * 4})
    kept = rows.cast_column("label", datasets.ClassLabel(names=names)) if names else rows
    kept.to_parquet(tmp_path / "train.parquet")
    source = load(train=str(tmp_path / "train.parquet"), test=str(tmp_path / "train.parquet"))
    assert source.train.label_names == tuple(names or ("0", "1"))
    assert source.test.label == (1, 0, 1) * 4


def test_class_names_of_a_column_that_has_changed_since_are_left_alone(tmp_path: Path) -> None:
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    schema = datasets.Features(features).arrow_schema
    changed = pyarrow.Table.from_pydict({"text": ["a", "b", "c"], "label": ["x", "y", "x"]})
    unknown = schema.metadata[b"huggingface"].replace(b"Value", b"Later")
    for metadata in (schema.metadata, {b"huggingface": unknown}):
        parquet.write_table(changed.replace_schema_metadata(metadata), tmp_path / "x.parquet")
        assert load(train=str(tmp_path / "x.parquet")).train.label_names == ("x", "y")


def test_a_data_set_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*arguments: object, revision: object) -> object:
        raise ConnectionError("Couldn't reach it on the Hub\nand more lines")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with refused(DataError):
        load(name="someone/missing")


@pytest.mark.parametrize("setting", ["split", "test_split"])
@pytest.mark.parametrize("kind", ["hub", "saved", "files"])
def test_splits_of_any_name_are_chosen_and_a_missing_one_is_refused(
    setting: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"early": datasets.Dataset.from_list(examples(4)), "late": datasets.Dataset.from_list(examples(2))}
    name = "x/y" if kind == "hub" else str(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, revision: rows)
    if kind == "saved":
        datasets.DatasetDict(rows).save_to_disk(tmp_path)
    if kind == "files":
        for split, own in rows.items():
            jsonl(tmp_path / f"{split}.jsonl", list(own))
    chosen = {"split": "early", "test_split": "late"}
    source = load(name=name, **chosen)
    assert (len(source.train), len(source.test)) == (4, 2)
    if (kind, setting) != ("files", "split"):  # a folder without such files is looked up as a data set
        with refused(DataError, f"data.{setting}"):
            load(name=name, **chosen | {setting: "never"})


# The person that an example is about.


def of_patients(path: Path, patients: Sequence[object]) -> str:
    return jsonl(path, [row | {"patient": who} for row, who in zip(examples(len(patients)), patients, strict=True)])


def test_a_person_column_says_whom_an_example_is_about(tmp_path: Path) -> None:
    train = of_patients(tmp_path / "train.jsonl", ["ann", " ann ", 7, "7", "ben", "ann"])
    test = jsonl(tmp_path / "test.jsonl", examples(4))
    source = load(train=train, test=test, client="site", person="patient")
    assert source.train.person == ("ann", "ann", "7", "7", "ben", "ann")
    assert source.train.client == ("s0", "s1", "s2", "s0", "s1", "s2")
    assert source.test.person is None
    assert load(train=train, test=test).train.person is None


def test_a_name_in_two_forms_of_unicode_is_one_name(tmp_path: Path) -> None:
    """One person under two spellings would be protected as two, and one class would be two."""
    composed, decomposed = "Jos\u00e9", "Jose\u0301"
    rows = [
        row | {"label": name, "patient": name}
        for row, name in zip(examples(4), [composed, decomposed] * 2, strict=True)
    ]
    rows += [row | {"label": "other", "patient": "ann"} for row in examples(2)]
    train = jsonl(tmp_path / "train.jsonl", rows)
    source = load(train=train, test=train, client="patient", person="patient")
    assert set(source.train.person or ()) == set(source.train.client or ()) == {composed, "ann"}
    assert sorted(source.train.label_names) == sorted([composed, "other"])


@pytest.mark.parametrize("nobody", [None, "", "  ", 1.5])
def test_an_example_about_nobody_is_refused_with_its_place(tmp_path: Path, nobody: object) -> None:
    train = of_patients(tmp_path / "train.jsonl", ["ann", "ben", nobody, "ann"])
    with refused(DataError):
        load(train=train, test=train, person="patient")


# Rows held out for testing: with privacy, by whole units; each person or example is held out independently of the others.


ROWS = [
    {"text": f"text {row % 50}", "label": "xy"[row % 2], "site": f"site {row % 6}", "who": f"person {row % 23}"}
    for row in range(120)
]
UNITS = {"client": "site", "person": "who", "example": "text"}


def split(tmp_path: Path, unit: str, rows: list[dict[str, Any]], fraction: float = 0.3) -> tuple[list[str], list[str]]:
    """The names of the privacy units in the training rows and in the test rows."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = DataConfig(train=str(tmp_path / "rows.jsonl"), client="site", test_fraction=fraction)
    source = sources.load(data, tasks.build(data), seed=0, person="who", unit=unit)
    assert source.tested == f"held out by {'person' if unit == 'person' else unit}"
    train, test = (
        sorted(set(getattr(part, "text" if unit == "example" else unit))) for part in (source.train, source.test)
    )
    return train, test


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_on_one_side_with_all_its_rows(tmp_path: Path, unit: str) -> None:
    train, test = split(tmp_path, unit, ROWS)
    assert train
    assert test
    assert not set(train) & set(test)
    assert sorted(train + test) == sorted({row[UNITS[unit]] for row in ROWS})


@pytest.mark.parametrize("unit", ["person", "example"])
def test_one_unit_less_moves_no_other(tmp_path: Path, unit: str) -> None:
    """Otherwise removing one unit would change which others train, and the accounting for one unit would be wrong."""
    train, test = split(tmp_path, unit, ROWS)
    for gone in [*train[:3], *test[:3]]:
        fewer = [row for row in ROWS if row[UNITS[unit]] != gone]
        assert split(tmp_path, unit, fewer) == ([u for u in train if u != gone], [u for u in test if u != gone])


def test_a_split_that_leaves_one_side_empty_is_refused(tmp_path: Path) -> None:
    with refused(DataError):
        split(tmp_path, "client", [{**row, "site": "only"} for row in ROWS])
    for fraction in (1e-9, 1 - 1e-9):
        with refused(DataError):
            split(tmp_path, "example", ROWS, fraction)
