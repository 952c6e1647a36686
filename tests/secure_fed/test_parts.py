"""The parts of a federation: their defaults, which parts are refused, and the paths of files."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader

from secure_fed import Federation, RunConfig
from secure_fed.config import with_absolute_paths
from secure_fed.errors import ConfigError, DataError, MethodError
from secure_fed.learning.models.loading import head_of
from secure_fed.learning.problem import configured
from tests.secure_fed import small_models, toys


@pytest.mark.parametrize(("client", "names"), [("site", "site-0"), ("", "client-0")])
def test_auto_is_natural_where_the_data_say_whose_a_row_is(
    client: str, names: str, small_model: Path, small_data: Path
) -> None:
    settings = [f"model.name={small_model}", f"data.train={small_data}", f"data.client={client}"]
    parts = configured(RunConfig.load(None, [*settings, *([] if client else ["federation.clients=4"])]))
    assert parts.names[0] == names
    assert len(parts.names) == (6 if client else 4)


def test_paths_hold_in_every_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "builtin" / "tiny").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("", encoding="utf-8")
    given = RunConfig().replace(
        {
            ("model", "name"): "model",
            ("data", "train"): ["a.csv", "b.csv", "missing.csv"],
            ("data", "test"): "a.csv",
        }
    )
    found = with_absolute_paths(given)
    assert found.model.name == str(tmp_path / "model")
    assert with_absolute_paths(RunConfig().replace({("data", "name"): "some/hub-id"})).data.name == "some/hub-id"
    assert with_absolute_paths(RunConfig().replace({("data", "name"): "model"})).data.name == str(tmp_path / "model")
    assert found.data.train == (str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "missing.csv")
    assert found.data.test == str(tmp_path / "a.csv")
    assert with_absolute_paths(found) == found
    assert with_absolute_paths(RunConfig()) == RunConfig()  # built-in names stay, even if folders have these names


DATA = toys.examples(1, 6)
BAD_DATA: dict[str, tuple[dict[str, Any], str]] = {
    "dict": ({"train": {"clinic": DATA}}, "train is a dict; give a list with one data set per client"),
    "generator": ({"train": (data for data in [DATA])}, "train is a generator"),
    "flat": ({"train": DATA}, "client 0 of train is a dict; give a data set"),
    "client": ({"train": [DATA, iter(DATA)]}, "client 1 of train is a list_iterator; give a data set"),
    "test": ({"test": (item for item in DATA)}, "test is a generator; give a data set with a length"),
    "loader": ({"test": DataLoader(DATA)}, "test is a DataLoader"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_what_is_no_data_set_is_named(case: str) -> None:
    parts, fact = BAD_DATA[case]
    with pytest.raises(ConfigError, match=fact):
        toys.federation(**parts)


def test_tuples_need_a_loss_and_metrics() -> None:
    pairs = [(item["x"], item["labels"]) for item in DATA]
    with pytest.raises(ConfigError, match="is a list without 'labels', which classification needs: give loss="):
        toys.federation(train=[pairs], test=pairs)
    with pytest.raises(ConfigError, match="give metrics="):
        toys.federation(train=[pairs], test=pairs, loss=lambda model, batch: model(batch[0]).sum(1))


@pytest.mark.parametrize(
    ("name", "value"),
    [("model.name", "org/model"), ("model.dtype", "bfloat16"), ("data.alpha", 0.5), ("data.examples", 9)],
)
def test_settings_of_a_model_and_data_that_are_not_loaded(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = {value!r} has no effect on a model and data of yours"):
        toys.federation({name: value})


@pytest.mark.parametrize("where", ["train", "test"])
@pytest.mark.parametrize("label", [3, -1])
def test_a_label_that_is_no_class_of_the_model_is_refused(where: str, label: int) -> None:
    right = [{"input_ids": [5, 6, 7], "labels": index % 3} for index in range(4)]
    wrong = [*right[:3], {"input_ids": [5, 6, 7], "labels": label}]
    data = {"train": [right], "test": right} | {where: [wrong] if where == "train" else wrong}
    config = RunConfig.from_dict({"federation": {"rounds": 1}})
    with pytest.raises(
        DataError, match=rf"'labels' of an item is {label}, and the model's 3 classes are 0 to 2; correct"
    ):
        Federation(config, model=small_models.make("bert"), **data).run()


def test_a_configuration_is_a_run_config() -> None:
    with pytest.raises(ConfigError, match=r"config is a dict; make a RunConfig, with RunConfig\.from_dict"):
        Federation({"federation": {"rounds": 1}})  # type: ignore[arg-type]


def test_a_tied_layer_is_named_by_both_its_names() -> None:
    model = nn.ModuleDict({"e": nn.Linear(4, 4), "o": nn.Linear(4, 4), "empty": nn.Dropout()})
    model["o"].weight = model["e"].weight
    with pytest.raises(MethodError, match=r"names 'o', whose o\.weight is e\.weight too: leave it out, or name 'e'"):
        head_of(model, (), ["o"])
    assert head_of(model, (), ["e"]) == ("e.weight", "e.bias")
    with pytest.raises(MethodError, match="names 'empty', but the model has no such module with parameters"):
        head_of(model, (), ["empty"])


def test_a_text_the_tokenizer_does_not_know_is_said(small_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    strange = [{"text": "日本語 ключ", "label": index % 2} for index in range(8)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in strange), encoding="utf-8")
    settings = [f"model.name={small_model}", f"data.train={rows}", "data.partition=iid"]
    warning = configured(RunConfig.load(None, settings)).warning
    assert "unknown to the tokenizer" in warning
    assert "set model.name" in warning


def test_an_unknown_token_that_ends_texts_too_is_not_counted(
    small_model: Path, small_tokenizer: Any, tmp_path: Path
) -> None:
    """As with GPT-2's tokenizer, which knows every text."""
    shutil.copytree(small_model, tmp_path / "model")
    tokenizer = copy.deepcopy(small_tokenizer)
    tokenizer.eos_token = tokenizer.unk_token
    tokenizer.save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "strange", "label": index % 2}) + "\n" for index in range(8)))
    assert configured(RunConfig.load(None, [f"model.name={tmp_path / 'model'}", f"data.train={rows}"])).warning == ""


def test_texts_that_are_cut_are_said(small_model: Path, small_data: Path) -> None:
    settings = [f"model.name={small_model}", f"data.train={small_data}", "federation.clients=4", "model.max_length=3"]
    warning = configured(RunConfig.load(None, settings)).warning
    assert "100% of the training texts reach model.max_length = 3 and are cut there" in warning


def test_a_test_file_that_trains_too_is_said(small_model: Path, small_data: Path) -> None:
    file = small_data / "train.jsonl"
    settings = [f"model.name={small_model}", f"data.train={file}", f"data.test={file}", "federation.clients=4"]
    assert f"data.test names {file}, which data.train names too" in configured(RunConfig.load(None, settings)).warning


def test_known_text_gives_no_warning(small_model: Path, small_data: Path) -> None:
    settings = [f"model.name={small_model}", f"data.train={small_data}", "federation.clients=4"]
    assert configured(RunConfig.load(None, settings)).warning == ""


def test_several_test_files_are_one_test_set(small_model: Path, small_data: Path) -> None:
    tests = json.dumps([str(small_data), str(small_data)])
    settings = [f"model.name={small_model}", f"data.train={small_data}", "federation.clients=4"]
    parts = configured(RunConfig.load(None, [*settings, f"data.test={tests}"]))
    once = configured(RunConfig.load(None, [*settings, f"data.test={small_data}"]))
    assert len(parts.test) == 2 * len(once.test)


def test_what_protects_a_person_keeps_their_examples_at_one_client(tmp_path: Path) -> None:
    rows = [
        {"text": f"note {i} says {'yes' if i % 2 else 'no'}", "label": i % 2, "who": f"p{i % 13}"} for i in range(78)
    ]
    file = tmp_path / "notes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = {"train": str(file), "test": str(file)}
    privacy = {"unit": "group", "group_column": "who", "noise_multiplier": 1.0}
    config = RunConfig.from_dict({"data": settings, "federation": {"clients": 4}, "privacy": privacy})
    parts = configured(config)
    assert parts.groups is not None
    held = [set(own) for own in parts.groups]
    assert len(held) == 4
    assert sum(map(len, held)) == 13, "nobody is at two clients"
    assert [len(own) for own in parts.groups] == [len(own) for own in parts.train]
    assert sum(map(len, parts.train)) == 78
