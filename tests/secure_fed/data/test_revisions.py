"""Revisions of the Hub that do not exist are refused before anything is loaded; the Hub and the cache are made up here."""

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import RevisionNotFoundError

from secure_fed.commands import train
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, ModelError
from secure_fed.learning import problem, tasks
from secure_fed.learning.data import hub, sources
from secure_fed.learning.data.sources import overlaps
from tests.golden import refused

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, on a machine without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    for asked in (hub.commit, hub.require_reachable):
        asked.cache_clear()
    yield tmp_path
    for asked in (hub.commit, hub.require_reachable):
        asked.cache_clear()


def named(cache: Path, folder: str, revision: str, commit: str) -> None:
    note = cache / "hub" / folder / "refs" / revision
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(commit)


def prepared(cache: Path, commit: str) -> None:
    """The rows of somebody/MyRows, whose texts are the commit, as `datasets` leaves them in its cache."""
    source = cache / "rows.jsonl"
    source.write_text("".join(f'{{"text": "{commit} {i}", "label": {i % 2}}}\n' for i in range(20)))
    made = datasets.load_dataset("json", data_files=str(source), cache_dir=str(cache / "made"))
    arrow = Path(made["train"].cache_files[0]["filename"])
    place = cache / "datasets" / "somebody___my_rows" / "default" / "0.0.0" / commit
    shutil.copytree(arrow.parent, place)
    (place / arrow.name).rename(place / "my_rows-train.arrow")
    info = (place / "dataset_info.json").read_text()
    told = datasets.DatasetInfo.from_directory(str(place))
    assert told.config_name in info
    (place / "dataset_info.json").write_text(info.replace(f'"{told.config_name}"', '"default"'))


def refused_twice(settings: dict[str, dict[str, str]], setting: str) -> None:
    """Both the check ahead and the run itself refuse this setting."""
    for check in (train.check_ahead, problem.configured):
        with refused(ConfigError, setting):
            check(RunConfig.from_dict(settings))


def test_a_revision_that_the_cache_lacks_is_refused_offline(cache: Path) -> None:
    named(cache, "models--somebody--mine", "v1", OLD)
    named(cache, "datasets--somebody--MyRows", "v1", OLD)
    refused_twice({"model": {"name": "somebody/mine", "revision": "v1"}}, "model.revision")  # no files
    refused_twice({"data": {"name": "somebody/MyRows", "revision": "v1"}}, "data.revision")
    (cache / "hub" / "models--somebody--mine" / "snapshots" / OLD).mkdir(parents=True)
    prepared(cache, OLD)
    for revision in ("v9", NEW, "../v1"):
        refused_twice({"model": {"name": "somebody/mine", "revision": revision}}, "model.revision")
        refused_twice({"data": {"name": "somebody/MyRows", "revision": revision}}, "data.revision")


@pytest.mark.parametrize("revision", ["v1", OLD])
def test_a_cached_revision_is_read_offline_and_never_another(revision: str, cache: Path) -> None:
    (cache / "hub" / "models--somebody--mine" / "snapshots" / OLD).mkdir(parents=True)
    named(cache, "models--somebody--mine", "v1", OLD)
    named(cache, "datasets--somebody--MyRows", "v1", OLD)
    prepared(cache, OLD)
    settings = {
        "data": {"name": "somebody/MyRows:default", "revision": revision},
        "model": {"name": "somebody/mine", "revision": revision},
    }
    config = RunConfig.from_dict(settings)
    train.check_ahead(config)
    rows = sources.load(config.data, tasks.build(config.data), seed=0).whole
    assert rows.text[0] == f"{OLD} 0"
    prepared(cache, NEW)  # `datasets` reads the newest copy, whatever the revision
    with refused(ConfigError, "data.revision"):
        sources.load(config.data, tasks.build(config.data), seed=0)


@pytest.mark.parametrize("kind", ["model", "data"])
def test_a_revision_that_the_hub_lacks_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def repo_info(self: object, repository: str, **settings: Any) -> Any:
        asked.append((repository, settings["revision"], settings["repo_type"]))
        if settings["revision"] == "v9":
            raise RevisionNotFoundError("404", response=SimpleNamespace(headers={}, request=None))  # type: ignore[arg-type]
        if settings["revision"] == "v8":
            raise ConnectionError("no network")
        return SimpleNamespace(sha=OLD)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    refused_twice({kind: {"name": "somebody/mine", "revision": "v9"}}, f"{kind}.revision")
    assert set(asked) == {("somebody/mine", "v9", {"model": "model", "data": "dataset"}[kind])}
    train.check_ahead(RunConfig.from_dict({kind: {"name": "somebody/mine", "revision": "v1"}}))
    unknown = RunConfig.from_dict({kind: {"name": "somebody/mine", "revision": "v8"}})
    with refused(ModelError, "model.name") if kind == "model" else nullcontext():  # of data loading will tell
        train.check_ahead(unknown)


def test_one_split_for_training_and_test_is_warned_of(tmp_path: Path) -> None:
    def warned(**settings: str) -> list[str]:
        return list(overlaps(RunConfig.from_dict({"data": {"name": "somebody/MyRows", **settings}}).data))

    assert len(warned(split="train", test_split="train")) == 1
    assert len(warned(test_split="train")) == 1
    assert warned(split="train", test_split="test") == warned(split="test") == []
    rows = datasets.Dataset.from_list([{"text": f"t{i}", "label": i % 2} for i in range(20)])
    datasets.DatasetDict({"all": rows}).save_to_disk(tmp_path / "saved")
    data = {"name": str(tmp_path / "saved"), "split": "all", "test_split": "all"}
    made = problem.configured(RunConfig.from_dict({"data": data, "federation": {"clients": 2}}))
    assert "data.test_split" in made.warning
