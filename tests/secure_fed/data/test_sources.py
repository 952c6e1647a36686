import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from secure_fed.errors import ConfigError, DataError
from secure_fed.learning import tasks
from secure_fed.learning.data import hub, sources
from secure_fed.learning.data.sources import Source

DEFAULTS = {
    "revision": "",
    "split": "train",
    "test_split": "",
    "name": "builtin/notes",
    "train": "",
    "test": "",
    "task": "classification",
    "text": "",
    "text_b": "",
    "label": "",
    "class_priors": (),
    "client": "",
    "examples": 60,
    "test_examples": 30,
    "test_fraction": 0.2,
    "partition": "auto",
    "language": "",
}


def load(seed: int = 0, group: str = "", **settings: object) -> Source:
    data: Any = SimpleNamespace(**(DEFAULTS | settings))
    return sources.load(data, tasks.build(data), seed=seed, group=group)


def examples(count: int, classes: int = 2, tag: str = "note") -> list[dict[str, object]]:
    return [
        {"text": f"{tag} {i}", "label": f"c{i % classes}", "site": f"s{i % 3}", "other": f"pair {i}"}
        for i in range(count)
    ]


def jsonl(path: Path, rows: Sequence[Mapping[str, object]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_builtin_notes_follow_the_settings() -> None:
    source = load(seed=3)
    assert (len(source.train), len(source.test), source.keyed) == (60, 30, False)
    assert source == load(seed=3)
    assert source.train != load(seed=4).train


def test_builtin_notes_are_keyed_by_site_on_request() -> None:
    assert load(client="site").keyed
    with pytest.raises(DataError, match=r"data\.client is 'ward'.*'site'"):
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
    rows = [{"a": f"x{i}", "b": f"y{i}", "gold": i % 2, "who": i % 3} for i in range(6)]
    train = jsonl(tmp_path / "a.jsonl", rows)
    test = jsonl(tmp_path / "b.jsonl", [{"a": "p", "b": "q", "gold": 1}])
    source = load(train=train, test=test, text="a", text_b="b", label="gold", client="who")
    assert source.train.text_b == tuple(f"y{i}" for i in range(6))
    assert source.train.client == ("0", "1", "2", "0", "1", "2")
    assert source.keyed
    assert (source.test.text_b, source.test.client) == (("q",), None)


def test_spaces_around_a_client_do_not_make_another(tmp_path: Path) -> None:
    rows = [row | {"site": f" s{i % 2}" if i < 3 else f"s{i % 2} "} for i, row in enumerate(examples(6))]
    path = jsonl(tmp_path / "x.jsonl", rows)
    assert load(train=path, test=path, client="site").train.client == ("s0", "s1") * 3


def test_each_file_of_a_list_is_one_client_with_a_name_of_its_own(tmp_path: Path) -> None:
    paths = [jsonl(tmp_path / name, examples(4, tag=name)) for name in ("a/x.jsonl", "b/x.jsonl", "c/y.jsonl")]
    test = jsonl(tmp_path / "test.jsonl", examples(2))
    source = load(train=paths, test=test)
    assert source.train.client == ("x",) * 4 + ("x-2",) * 4 + ("y",) * 4
    assert source.keyed
    assert load(train=tuple(paths[:1]), test=test).train.client == ("x",) * 4


def test_a_named_client_column_overrides_the_files_of_a_list(tmp_path: Path) -> None:
    paths = [jsonl(tmp_path / f"{i}.jsonl", examples(3)) for i in range(2)]
    assert load(train=paths, test=paths[0], client="site").train.client == ("s0", "s1", "s2") * 2


@pytest.mark.parametrize("held_out", ["test", "validation"])
@pytest.mark.parametrize("setting", ["train", "name"])
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
    with pytest.raises(DataError, match=r"holds no test examples.*data\.test"):
        load(train=train, test=str(tmp_path))


def test_without_test_data_a_fraction_is_held_out_by_seed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "all.jsonl", examples(50))
    source = load(train=path)
    assert (len(source.train), len(source.test)) == (40, 10)
    assert sorted(source.train.text + source.test.text) == sorted(f"note {i}" for i in range(50))
    assert source == load(train=path)
    assert source.test != load(train=path, seed=1).test


@pytest.mark.parametrize("seed", range(10))
def test_held_out_rows_leave_each_class_and_client_one_in_training(tmp_path: Path, seed: int) -> None:
    path = jsonl(tmp_path / "all.jsonl", examples(12, classes=4))
    source = load(train=path, client="site", test_fraction=0.9, seed=seed)
    assert set(source.train.label) == {0, 1, 2, 3}
    assert Counter(source.train.client).keys() == {"s0", "s1", "s2"}
    assert len(source.test) >= 1


def test_too_few_rows_to_hold_any_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 training examples are too few .*0\.2.*data\.test"):
        load(train=jsonl(tmp_path / "two.jsonl", examples(2)))


@pytest.mark.parametrize("blank", ["", " \t", "\u200b\ufeff"])
def test_an_empty_training_text_is_refused_by_its_line_and_an_empty_test_text_stays(tmp_path: Path, blank: str) -> None:
    path, full = jsonl(tmp_path / "x.jsonl", change(2, text=blank)), jsonl(tmp_path / "full.jsonl", examples(6))
    for files in ({"train": path, "test": full}, {"train": path}):
        with pytest.raises(DataError, match=r"x\.jsonl, line 3") as refused:
            load(**files)
        assert refused.value.setting == "data.text"
    assert load(train=full, test=path).test.text[2] == blank
    every = jsonl(tmp_path / "every.jsonl", [row | {"text": blank} for row in examples(6)])
    for files in ({"train": every}, {"train": full, "test": every}):  # a wrong column
        with pytest.raises(DataError, match=r"every 'text' of .*every\.jsonl"):
            load(**files)


def test_one_text_of_a_pair_may_be_empty_and_not_both(tmp_path: Path) -> None:
    rows = [row | {"other": "" if number else "b"} for number, row in enumerate(examples(6))]
    assert load(train=jsonl(tmp_path / "pairs.jsonl", rows), text_b="other")
    rows[4]["text"] = ""
    with pytest.raises(DataError, match=r"line 5") as refused:
        load(train=jsonl(tmp_path / "both.jsonl", rows), text_b="other")
    assert refused.value.setting == "data.text_b"


def change(row: int, **cells: object) -> list[dict[str, object]]:
    rows = examples(6)
    rows[row] |= cells
    return rows


@pytest.mark.parametrize(
    ("rows", "settings", "facts"),
    [
        (examples(6), {"label": "gold"}, ["'gold'", "'text', 'label', 'site', 'other'", "data.label"]),
        (examples(6), {"text": "body"}, ["'body'", "'text'", "data.text"]),
        (examples(6), {"text_b": "second"}, ["'second'", "data.text_b"]),
        (examples(6), {"client": "ward"}, ["'ward'", "data.client"]),
        (change(2, text=None), {}, ["line 3", "'text' is missing", "data.text"]),
        (change(2, text=7), {}, ["line 3", "'text' is 7", "not text"]),
        (change(4, text="\ud800"), {}, ["line 5", "not text"]),
        (change(3, other=None), {"text_b": "other"}, ["line 4", "'other' is missing", "data.text_b"]),
        (change(1, site=None), {"client": "site"}, ["line 2", "'site' is None", "data.client"]),
        (change(1, label=0.5), {}, ["line 2", "label 0.5", "neither an integer nor a name"]),
        ([row | {"label": 3} for row in examples(6)], {}, ["all 6 labels", "are 3", "data.label"]),
    ],
)
def test_bad_columns_are_refused_by_name(
    tmp_path: Path, rows: list[dict[str, object]], settings: dict[str, str], facts: list[str]
) -> None:
    path = jsonl(tmp_path / "bad.jsonl", rows)
    with pytest.raises(DataError) as refused:
        load(train=path, **settings)
    for fact in ("bad.jsonl", *facts):
        assert fact in str(refused.value)


def test_settings_that_do_not_fit_together(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", examples(4))
    with pytest.raises(DataError, match=r"data\.test is .*x\.jsonl.*data\.train is not set"):
        load(test=path)
    with pytest.raises(DataError, match=r"data\.name is the file .*set data\.train"):
        load(name=path)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"none holds no training examples.*data\.train"):
        load(train=str(tmp_path / "none"))


def test_a_hub_data_set_uses_declared_classes_and_the_first_labelled_test_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )

    def split(text: str, *labels: int) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"text": [text] * len(labels), "label": labels}, features)

    stored = {
        "train": split("train", 1, 0, 1),
        "test": split("unlabelled", -1, -1),
        "validation": split("v", 0),
    }
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
    rows = datasets.Dataset.from_list(examples(6))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    assert load(name=str(tmp_path / "saved"), client="site").train.client == ("s0", "s1", "s2") * 2


def test_a_folder_saved_by_datasets_without_splits_is_training_data(tmp_path: Path) -> None:
    datasets.Dataset.from_list(examples(10)).save_to_disk(tmp_path / "saved")
    source = load(name=str(tmp_path / "saved"))
    assert (len(source.train), len(source.test)) == (8, 2)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("setting", ["train", "test"])
def test_a_folder_saved_by_datasets_is_no_file(setting: str, splits: bool, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(examples(6))
    (datasets.DatasetDict({"train": rows}) if splits else rows).save_to_disk(tmp_path / "saved")
    files = {"train": jsonl(tmp_path / "rows.jsonl", examples(6)), setting: str(tmp_path / "saved")}
    with pytest.raises(
        DataError, match=rf"saved was written by save_to_disk .* data\.{setting} .*: set data\.name to it"
    ):
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
    with pytest.raises(DataError) as refused:
        load(name="someone/missing")
    for fact in ("'someone/missing'", "Couldn't reach it", "data.name", "data.train", "network"):
        assert fact in str(refused.value)
    assert "\n" not in str(refused.value)


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
        with pytest.raises(DataError) as refused:
            load(name=name, **chosen | {setting: "never"})
        assert refused.value.setting == f"data.{setting}"


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", examples(4))
    with pytest.raises(ConfigError) as refused:
        load(name=str(tmp_path), revision="v2")
    assert refused.value.setting == "data.revision"


# The person or other group that an example is about.


def of_patients(path: Path, patients: Sequence[object]) -> str:
    return jsonl(path, [row | {"patient": who} for row, who in zip(examples(len(patients)), patients, strict=True)])


def test_a_group_column_says_whom_an_example_is_about(tmp_path: Path) -> None:
    train = of_patients(tmp_path / "train.jsonl", ["ann", " ann ", 7, "7", "ben", "ann"])
    test = jsonl(tmp_path / "test.jsonl", examples(4))
    source = load(train=train, test=test, client="site", group="patient")
    assert source.train.group == ("ann", "ann", "7", "7", "ben", "ann")
    assert source.train.client == ("s0", "s1", "s2", "s0", "s1", "s2")
    assert source.test.group is None
    assert load(train=train, test=test).train.group is None


def test_a_name_in_two_forms_of_unicode_is_one_name(tmp_path: Path) -> None:
    """One person under two spellings would be protected as two, and one class would be two."""
    composed, decomposed = "Jos\u00e9", "Jose\u0301"
    rows = [
        row | {"label": name, "patient": name}
        for row, name in zip(examples(4), [composed, decomposed] * 2, strict=True)
    ]
    rows += [row | {"label": "other", "patient": "ann"} for row in examples(2)]
    train = jsonl(tmp_path / "train.jsonl", rows)
    source = load(train=train, test=train, client="patient", group="patient")
    assert set(source.train.group or ()) == set(source.train.client or ()) == {composed, "ann"}
    assert sorted(source.train.label_names) == sorted([composed, "other"])


def test_a_group_stays_with_its_example_when_rows_are_held_out(tmp_path: Path) -> None:
    train = of_patients(tmp_path / "train.jsonl", [f"patient {row}" for row in range(20)])
    source = load(train=train, group="patient")
    assert 0 < len(source.test) < 20
    assert source.train.group is not None
    for text, who in zip(source.train.text, source.train.group, strict=True):
        assert text.removeprefix("note ") == who.removeprefix("patient ")


@pytest.mark.parametrize("nobody", [None, "", "  ", 1.5])
def test_an_example_about_nobody_is_refused_with_its_place(tmp_path: Path, nobody: object) -> None:
    train = of_patients(tmp_path / "train.jsonl", ["ann", "ben", nobody, "ann"])
    with pytest.raises(DataError, match=r"train\.jsonl.*3.*the group in 'patient'.*privacy\.group_column"):
        load(train=train, test=train, group="patient")


def test_a_group_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "train.jsonl", examples(4))
    with pytest.raises(DataError, match=r"'patient'.*") as refused:
        load(train=train, test=train, group="patient")
    assert "privacy.group_column" in str(refused.value)
    with pytest.raises(DataError, match=r"privacy\.group_column is 'patient', but builtin/notes has no such column"):
        load(group="patient")
