"""Bad input ends a command with one sentence that names the fault, and leaves no files behind."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cells import every
from tests.secure_fed.conftest import Refuses

LIBRARIES = r"(here|loaded) \(.*\)|TOML: .*|(Invalid|Exceeds)[^;]*"  # the words of Python and of libraries


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> Refuses:
    """`refuses` in an empty folder, in which the command may change nothing."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> str:
        before = everything(tmp_path)
        sentence = refuses(*arguments, hide=LIBRARIES)
        assert sentence.startswith("secure-fed: ")
        assert everything(tmp_path) == before
        return sentence

    return run


@pytest.fixture
def training(refused: Refuses, small_model: Path, small_data: Path) -> Refuses:
    """`refused` for `train` on a small model and small data, changed by the given settings."""

    def run(*settings: str, options: tuple[str, ...] = ()) -> str:
        files = [f"data.{split}={small_data / split}.jsonl" for split in ("train", "test")]
        chosen = [f"model.name={small_model}", *files, "federation.clients=4", *settings]
        return refused("train", "--json", *options, *(part for text in chosen for part in ("--set", text)))

    return run


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# Divided by "|"; settings that are wrong together are divided by a space.
SETTINGS = """
method.name=ffalora | method.name=xyzzy | method.name=lora | federation.round=3 | data.max_length=3 |
training.alpha=3 | method.lora_r=8 | max_length=3 | xyz.learning_rate=1 | traning.lr=1 | traning.speed=1 |
xyz.speed=1 | federation.rounds=0 | training.lr=-0.1 | training.lr=nan |
training.lr=fast | training.lr= | federation.rounds=2.5 | method.rslora=1 | method.personal=[1] |
training.optimizer=adam | privacy.unit=patient | privacy.unit=client | privacy.epsilon=3 |
data.test= data.test_fraction=1.0 | federation.rounds=10000000 |
training.batch_size=999999999999999999999999 | data.text=label |
training.lr=NINES | training.lr=DEEP |
data.train=[] | data.name=someone/reviews |
data.client=site data.partition=iid | federation.rounds | rounds=3 | federation.cohort=5 | training.momentum=0.9 |
federation.server_momentum=0.5 | data.partition=iid data.alpha=2.5 | training.epochs=3 training.steps=5 |
data.examples=10 | data.test_fraction=0.5 | data.train= data.test= data.text=note | data.partition=natural |
method.name=fedlora method.double_rank=true | method.alpha=1e-45 | data.train= |
method.name=ffa_lora method.rank=9 method.double_rank=true | method.target_modules=.*q_proj |
method.modules_to_save=scorer | method.personal=scorer.* | model.max_length=129 |
model.device=cuda:99 | model.name=builtin/large | model.name=./none/here |
data.train=none.jsonl | data.train=~nobody-of-that-name/x.jsonl
"""


@every("settings", SETTINGS.strip().replace("|\n", "| ").split(" | "))
def test_settings(training: Refuses, settings: str) -> None:
    training(*settings.replace("NINES", "9" * 5000).replace("DEEP", "[" * 5000).split(" "))


def test_offline_no_connection_is_tried(training: Refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def connect(self: socket.socket, address: Any) -> None:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", connect)
    training("model.name=nobody/nothing")
    assert asked == []


def test_model_folders_without_a_configuration_or_weights_or_with_broken_ones(
    training: Refuses, tmp_path: Path, small_model: Path
) -> None:
    (tmp_path / "empty").mkdir()
    training("model.name=empty")
    shutil.copytree(small_model, tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").write_bytes(b"not tensors" * 9)
    training("model.name=./copy")
    (tmp_path / "copy" / "model.safetensors").unlink()
    training("model.name=./copy")


def line(text: Any, label: Any) -> str:
    return json.dumps({"text": text, "label": label}) + "\n"


TWO = line("calm", "calm") + line("wild", "wild")
FILES: dict[str, tuple[str, ...]] = {  # of columns, of their cells, of lines, and of rows; all others: `data/`
    "no label column": ('{"text": "calm", "kind": 1}\n',),
    "blank texts": (line(" ", "a") + line("", "b"),),
    "names beside integers": (TWO + line("calm", 3),),
    "a broken line": (TWO + '{"text": "calm", "la\n' + TWO,),
    "fewer examples than clients": (TWO,),
    "a test label that training never saw": (TWO + line("calm", "a"), "data.test=bad.jsonl"),
}


@pytest.mark.parametrize("case", FILES)
def test_files(training: Refuses, tmp_path: Path, case: str) -> None:
    content, *settings = FILES[case]
    (tmp_path / "bad.jsonl").write_text(content, encoding="utf-8")
    training(*([] if "data.test=bad.jsonl" in settings else ["data.train=bad.jsonl"]), *settings)


def test_a_cohort_above_the_clients_that_the_data_decide(refused: Refuses, small_model: Path, small_data: Path) -> None:
    settings = [f"model.name={small_model}", f"data.train={small_data / 'train.jsonl'}", "data.client=site"]
    arguments = [part for text in settings for part in ("--set", text)]
    refused("train", *arguments, "--set", "federation.cohort=7")
    refused("train", *arguments, "--set", "federation.clients=5")


def test_configuration_files(refused: Refuses, tmp_path: Path) -> None:
    refused("train", "none.toml")
    refused("train", "--resume")
    refused("train", "--resume", "--out", "none")
    refused("methods", "--model", "builtin/large")
    for content in (
        b"[training]\nlr = \n",
        b"[model]\nname = '\xff'\n",
        b"lr = 3\n",
        b"[training]\nlearning_rate = 3\n",
    ):
        (tmp_path / "run.toml").write_bytes(content)
        refused("train", "run.toml")
    refused("config", "init", "--all", "run.toml")
    (tmp_path / "run.toml").write_text("[federation]\nrounds = 2\n", encoding="utf-8")
    refused("train", "run.toml", "--resume", "--out", "none")


def test_tensorboard_that_is_not_installed(training: Refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    training("evaluation.tensorboard=true")


def test_a_directory_that_is_taken(training: Refuses, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("done", encoding="utf-8")
    training(options=("--out", "mine"))
    training(options=("--out", "mine/thesis.txt"))
    (tmp_path / "mine" / "config.json").write_text("{}", encoding="utf-8")
    training(options=("--out", "mine"))


LONG = "x" * 300


def test_names_that_no_file_can_have(training: Refuses, refused: Refuses) -> None:
    for settings in (
        [f"model.name={LONG}"],
        [f"data.train={LONG}"],
        [f"data.train=['{LONG}', 'b.jsonl']"],
        [f"data.test={LONG}"],
        ["data.train=", "data.test=", f"data.name={LONG}"],
    ):
        training(*settings)
    for out in ("", LONG):
        training(options=("--out", out))
    for command in (
        ["train", "--resume", "--out", LONG],
        ["train", LONG],
        ["report", LONG],
        ["predict", LONG],
        ["export", LONG, "adapter"],
        ["config", "init", "--all", LONG],
        ["config", "init", "--all", "none/run.toml"],
    ):
        refused(*command)


DAMAGED = [
    ("config.json", "[]"),
    ("config.json", '{"data": 5}'),
    ("config.json", '{"federation": {"rounds": "many"}}'),
    ("config.json", "[" * 100_000),
    ("run.json", "{}"),
    ("run.json", '{"label_names": 3, "clients": []}'),
    ("run.json", '{"label_names": ["a", 1], "clients": []}'),
    ("run.json", "\udcff"),
]
COMMANDS = {"report": (), "predict": (), "export": ("adapter",)}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_run_or_a_damaged_one(refused: Refuses, small_model: Path, tmp_path: Path, command: str) -> None:
    for place in ("none", small_model):
        refused(command, place, *COMMANDS[command])
    (tmp_path / "run").mkdir()
    for name, content in DAMAGED:
        (tmp_path / "run" / "config.json").write_text("{}", encoding="utf-8")
        (tmp_path / "run" / "run.json").write_text('{"label_names": ["a", "b"], "clients": ["c"]}', encoding="utf-8")
        (tmp_path / "run" / name).write_text(content, encoding="utf-8", errors="surrogateescape")
        assert name in refused(command, "run", *COMMANDS[command])
