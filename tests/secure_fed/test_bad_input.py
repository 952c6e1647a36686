"""Bad input ends a command with one sentence that names the fault, and leaves no files behind."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from secure_fed.commands.cli import main
from secure_fed.methods import METHODS

Refused = Callable[..., str]
FACTS = tuple[str, ...]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must end with status 2, one sentence on standard error and nothing else anywhere."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        before = everything(tmp_path)
        capsys.readouterr()
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        *announced, sentence = printed.err.strip().splitlines()
        assert all(line.startswith("secure-fed: ") for line in announced if line)
        assert sentence.startswith("secure-fed: ")
        assert everything(tmp_path) == before
        return sentence

    return run


@pytest.fixture
def training(refused: Refused, small_model: Path, small_data: Path) -> Refused:
    """`refused` for `train` on a small model and small data, changed by the given settings."""

    def run(*settings: str, options: tuple[str, ...] = ()) -> str:
        files = {
            "model.name": small_model,
            "data.train": small_data / "train.jsonl",
            "data.test": small_data / "test.jsonl",
        }
        chosen = [f"{name}={value}" for name, value in files.items()] + ["federation.clients=4", *settings]
        return refused("train", "--json", *options, *(part for text in chosen for part in ("--set", text)))

    return run


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def says(sentence: str, facts: FACTS) -> None:
    assert [fact for fact in facts if fact not in sentence] == [], sentence


SETTINGS: dict[str, tuple[tuple[str, ...], FACTS]] = {
    "unknown method": (("method.name=ffalora",), ("method.name", "'ffalora'", "did you mean 'ffa_lora'?")),
    "method like no other": (("method.name=xyzzy",), ("'xyzzy'", ", ".join(METHODS))),
    "unknown key": (("federation.round=3",), ("federation.round;", "did you mean 'rounds'?")),
    "key of another section": (("data.max_length=3",), ("data.max_length;", "did you mean model.max_length?")),
    "key of two other sections": (
        ("training.alpha=3",),
        ("training.alpha;", "did you mean data.alpha or method.alpha?"),
    ),
    "key as elsewhere": (("method.lora_r=8",), ("method.lora_r;", "did you mean method.rank?")),
    "key without a section": (
        ("max_length=3",),
        ("not of the form section.key=value", "did you mean model.max_length?"),
    ),
    "key of no section": (("xyz.learning_rate=1",), ("[xyz]", "did you mean training.lr?")),
    "method as elsewhere": (("method.name=lora",), ("'lora'", "did you mean 'fedlora'?")),
    "unknown section": (("traning.lr=1",), ("[traning]", "did you mean training.lr?")),
    "unknown section and key": (("traning.speed=1",), ("[traning]", "did you mean 'training'?")),
    "section like no other": (("xyz.speed=1",), ("[xyz]", "known are model, data, federation")),
    "zero rounds": (("federation.rounds=0",), ("federation.rounds", "is 0,", "at least 1")),
    "zero clients": (("federation.clients=0",), ("federation.clients", "is 0,", "at least 1")),
    "negative learning rate": (("training.lr=-0.1",), ("training.lr", "-0.1", "above 0")),
    "learning rate zero": (("training.lr=0",), ("training.lr", "0.0", "above 0")),
    "learning rate not a number": (("training.lr=nan",), ("training.lr", "nan", "finite")),
    "infinite learning rate": (("training.lr=inf",), ("training.lr", "inf", "finite")),
    "a word for a number": (("training.lr=fast",), ("training.lr", "'fast'", "a number")),
    "nothing for a number": (("training.lr=",), ("training.lr", "''", "a number")),
    "a part of a round": (("federation.rounds=2.5",), ("federation.rounds", "2.5", "a whole number")),
    "a number for a truth value": (("method.rslora=1",), ("method.rslora", "'1'", "true or false")),
    "numbers for texts": (("method.personal=[1]",), ("method.personal", "[1]", "a list of texts")),
    "no such choice": (("training.optimizer=adam",), ("training.optimizer", "'adam'", "adamw, sgd")),
    "privacy of nobody known": (
        ("privacy.unit=patient",),
        ("privacy.unit", "'patient'", "none, client, example, group"),
    ),
    "privacy without a guarantee": (("privacy.unit=client",), ("privacy.unit is 'client'", "privacy.epsilon")),
    "a guarantee for nobody": (("privacy.epsilon=3",), ("privacy.epsilon = 3.0", "privacy.unit")),
    "a ledger for nobody": (("privacy.ledger=here.sqlite",), ("privacy.ledger", "privacy.unit")),
    "share of one": (("data.test=", "data.test_fraction=1.0"), ("data.test_fraction", "1.0", "below 1")),
    "more rounds than anybody has": (("federation.rounds=10000000",), ("federation.rounds", "at most 1000000")),
    "a batch of septillions": (("training.batch_size=" + "9" * 24,), ("training.batch_size", "at most 1,000,000,000")),
    "an adapter wider than any layer": (
        ("method.name=adapter_houlsby", "method.bottleneck=100000000"),
        ("method.bottleneck is 100000000", "at most 65536"),
    ),
    "the label for a text": (("data.text=label",), ("data.text and data.label are both 'label'", "read the answer")),
    "seed too large": (("federation.seed=4294967296",), ("federation.seed", "4294967296", "at most 4294967295")),
    "a number of thousands of digits": (("training.lr=" + "9" * 5000,), ("training.lr is '999", "a number")),
    "a list too deep": (("training.lr=" + "[" * 5000,), ("training.lr is '[[[", "a number")),
    "more notes than there are": (
        ("data.train=", "data.test=", "data.test_examples=10000001"),
        ("data.test_examples is 10000001", "at most 10000000"),
    ),
    "no files": (("data.train=[]",), ("data.train is a list without a file", "leave the setting out")),
    "a name beside files": (("data.name=someone/reviews",), ("data.name = 'someone/reviews'", "no data.train")),
    "a client column that nothing reads": (
        ("data.client=site", "data.partition=iid"),
        ("data.client = 'site'", "data.partition = 'natural'"),
    ),
    "no equals sign": (("federation.rounds",), ("'federation.rounds'", "section.key=value")),
    "no section": (("rounds=3",), ("'rounds=3'", "section.key=value")),
    "cohort above clients": (
        ("federation.cohort=5",),
        ("federation.cohort is 5", "federation.clients = 4", "federation.clients"),
    ),
    "momentum of AdamW": (("training.momentum=0.9",), ("training.momentum = 0.9", "training.optimizer = 'sgd'")),
    "momentum of the mean": (
        ("federation.server_momentum=0.5",),
        ("federation.server_momentum = 0.5", "federation.server_optimizer"),
    ),
    "concentration of IID": (
        ("data.partition=iid", "data.alpha=2.5"),
        ("data.alpha = 2.5", "data.partition = 'dirichlet'"),
    ),
    "epochs beside steps": (("training.epochs=3", "training.steps=5"), ("training.epochs = 3", "training.steps")),
    "examples of a file": (("data.examples=10",), ("data.examples = 10", "builtin/notes")),
    "held out beside a test set": (("data.test_fraction=0.5",), ("data.test_fraction = 0.5", "no data.test")),
    "columns of the built-in notes": (
        ("data.train=", "data.test=", "data.text=note"),
        ("data.text = 'note'", "data of your own"),
    ),
    "natural without a client": (("data.partition=natural",), ("data.partition", "'natural'", "data.client")),
    "another method's option": (
        ("method.name=fedlora", "method.double_rank=true"),
        ("method.double_rank = True", "method.name = 'fedlora'", "ffa_lora"),
    ),
    "a scale of next to nothing": (("method.alpha=1e-45",), ("method.alpha is 1e-45", "at least 1e-06")),
    "test without train": (("data.train=",), ("data.test", "data.train is not set")),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(training: Refused, case: str) -> None:
    settings, facts = SETTINGS[case]
    says(training(*settings), facts)


MODELS: dict[str, tuple[tuple[str, ...], FACTS]] = {
    "rank above the layer": (("method.rank=17",), ("method.rank = 17", "16", "attention.self.query")),
    "doubled rank above the layer": (
        ("method.name=ffa_lora", "method.rank=9", "method.double_rank=true"),
        ("method.rank", "18", "16"),
    ),
    "no such module": (
        ('method.target_modules=["q_proj"]',),
        ("method.target_modules", "'q_proj'", "BertForSequenceClassification", "'query'"),
    ),
    "no module matches": (("method.target_modules=.*q_proj",), ("method.target_modules", "'.*q_proj'", "'query'")),
    "no such module to save": (
        ("method.modules_to_save=scorer",),
        ("method.modules_to_save", "'scorer'", "classifier"),
    ),
    "no such personal tensor": (("method.personal=scorer.*",), ("method.personal", "'scorer.*'", "lora_B")),
    "longer than the model": (("model.max_length=129",), ("model.max_length is 129", "128 positions", "at most 128")),
    "only special tokens": (("model.max_length=2",), ("model.max_length is 2", "at least 3")),
    "no such device": (("model.device=cuda:99",), ("model.device", "'cuda:99'", "cpu or auto")),
    "no kind of device": (("model.device=gpu",), ("model.device", "'gpu'", "cpu or auto")),
    "unknown builtin": (("model.name=builtin/large",), ("model.name", "'builtin/large'", "builtin/tiny")),
    "no such folder": (("model.name=./none/here",), ("model.name", "'./none/here'", "no such folder")),
    "not on the hub's copy here": (("model.name=nobody/nothing",), ("model.name", "'nobody/nothing'", "folder")),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(training: Refused, case: str) -> None:
    settings, facts = MODELS[case]
    says(training(*settings), facts)


def test_offline_no_connection_is_tried(training: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def connect(self: socket.socket, address: Any) -> None:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", connect)
    says(training("model.name=nobody/nothing"), ("'nobody/nothing'", "cannot be loaded"))
    assert asked == []


def test_a_model_folder_without_a_configuration(training: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    says(training("model.name=empty"), ("model.name", "empty'", "config.json"))


def test_a_model_folder_without_weights_or_with_broken_ones(
    training: Refused, tmp_path: Path, small_model: Path
) -> None:
    shutil.copytree(small_model, tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").write_bytes(b"not tensors" * 9)
    says(training("model.name=./copy"), ("model.name", "copy'", "cannot be loaded"))
    (tmp_path / "copy" / "model.safetensors").unlink()
    says(training("model.name=./copy"), ("model.name", "copy'", "model.safetensors"))


def line(text: Any, label: Any) -> str:
    return json.dumps({"text": text, "label": label}) + "\n"


TWO = line("calm", "calm") + line("wild", "wild")

FILES: dict[str, tuple[str, tuple[str, ...], FACTS]] = {
    "no label column": (
        '{"text": "calm", "kind": 1}\n',
        (),
        ("bad.jsonl", "no column 'label'", "'text', 'kind'", "data.label"),
    ),
    "no text column": (
        '{"note": "calm", "label": 1}\n{"note": "wild", "label": 2}\n',
        (),
        ("bad.jsonl", "no column 'text'", "'note', 'label'", "data.text"),
    ),
    "no client column": (TWO, ("data.client=site",), ("bad.jsonl", "no column 'site'", "data.client")),
    "labels that are neither": (
        TWO + line("calm", 0.5),
        (),
        ("bad.jsonl, line 3", "0.5", "integer nor a name", "data.label"),
    ),
    "no label": (TWO + line("calm", None), (), ("bad.jsonl, line 3: a label is missing", "data.label")),
    "names beside integers": (TWO + line("calm", 3), (), ("bad.jsonl, line 3", "3", "'calm'", "mixes")),
    "one class": (line("calm", "a") * 5, (), ("all 5 labels", "'a'", "at least two", "data.label")),
    "an empty file": ("", (), ("bad.jsonl", "is empty", "data.train")),
    "blank texts": (line(" ", "a") + line("", "b"), (), ("every 'text'", "bad.jsonl", "is empty", "data.text")),
    "a number for a text": (TWO + line(7, "a"), (), ("bad.jsonl, line 3", "7", "not text", "data.text")),
    "a broken line": (TWO + '{"text": "calm", "la\n' + TWO, (), ("bad.jsonl, line 3", "not JSON")),
    "a key twice": (TWO + '{"text": "a", "label": 1, "text": "b"}\n', (), ("bad.jsonl, line 3", "'text'", "twice")),
    "a number of thousands of digits": (
        line("a", 1) + f'{{"text": "b", "label": {"9" * 5000}}}',
        (),
        ("line 2", "digits"),
    ),
    "nested too deeply": (TWO + "[" * 100_000, (), ("bad.jsonl, line 3", "nested too deeply")),
    "a list for an object": (TWO + "[1, 2]\n", (), ("bad.jsonl, line 3", "list", "one object a line")),
    "fewer examples than clients": (TWO, (), ("2 training examples", "4 clients", "federation.clients", "at most 2")),
}


@pytest.mark.parametrize("case", FILES)
def test_files(training: Refused, tmp_path: Path, case: str) -> None:
    content, settings, facts = FILES[case]
    (tmp_path / "bad.jsonl").write_text(content, encoding="utf-8")
    says(training("data.train=bad.jsonl", *settings), facts)


def test_no_such_file(training: Refused) -> None:
    says(training("data.train=none.jsonl"), ("none.jsonl", "data.train"))


def test_a_test_label_that_training_never_saw(training: Refused, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(TWO + line("calm", "a"), encoding="utf-8")
    says(training("data.test=bad.jsonl"), ("bad.jsonl, line 3", "'a'", "'calm', 'wild'"))


def test_a_cohort_above_the_clients_that_the_data_decide(refused: Refused, small_model: Path, small_data: Path) -> None:
    settings = [f"model.name={small_model}", f"data.train={small_data / 'train.jsonl'}", "data.client=site"]
    arguments = [part for text in settings for part in ("--set", text)]
    says(
        refused("train", *arguments, "--set", "federation.cohort=7"),
        ("federation.cohort is 7", "the 6 clients"),
    )
    says(refused("train", *arguments, "--set", "federation.clients=5"), ("6 clients", "federation.clients is 5"))


def test_configuration_files(refused: Refused, tmp_path: Path) -> None:
    says(refused("train", "none.toml"), ("none.toml", "cannot be read"))
    (tmp_path / "run.toml").write_text("[training]\nlr = \n", encoding="utf-8")
    says(refused("train", "run.toml"), ("run.toml", "not valid TOML", "line 2"))
    (tmp_path / "run.toml").write_bytes(b"[model]\nname = '\xff'\n")
    says(refused("train", "run.toml"), ("run.toml", "not UTF-8", "0xff"))
    (tmp_path / "run.toml").write_text("lr = 3\n", encoding="utf-8")
    says(refused("train", "run.toml"), ("lr = 3", "[section]"))
    (tmp_path / "run.toml").write_text("[training]\nlearning_rate = 3\n", encoding="utf-8")
    says(refused("train", "run.toml"), ("training.learning_rate", "did you mean"))


def test_config_init_over_a_file(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("mine", encoding="utf-8")
    says(refused("config", "init", "run.toml"), ("run.toml", "exists"))


def test_tensorboard_that_is_not_installed(training: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    says(training("evaluation.tensorboard=true"), ("evaluation.tensorboard", "pip install 'secure-fed[tensorboard]'"))


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed(training: Refused, tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    said = training(f"evaluation.{tracker}=true")
    says(said, (f"evaluation.{tracker}", f"pip install 'secure-fed[{tracker}]'"))


def test_a_directory_that_is_taken(training: Refused, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("done", encoding="utf-8")
    says(training(options=("--out", "mine")), ("mine", "not an empty directory", "--out"))
    says(training(options=("--out", "mine/thesis.txt")), ("thesis.txt", "not an empty directory", "--out"))
    (tmp_path / "mine" / "config.json").write_text("{}", encoding="utf-8")
    says(training(options=("--out", "mine")), ("mine", "already holds a run", "--resume"))


LONG = "x" * 300


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ((f"model.name={LONG}",), ("model.name",)),
        ((f"data.train={LONG}",), ("data.train",)),
        ((f"data.train=['{LONG}', 'b.jsonl']",), ("data.train",)),
        ((f"data.test={LONG}",), ("data.test",)),
        (("data.train=", "data.test=", f"data.name={LONG}"), ("data.name",)),
    ],
)
def test_a_name_that_no_file_can_have(training: Refused, settings: tuple[str, ...], facts: FACTS) -> None:
    says(training(*settings), (LONG, "File name too long", *facts))


def test_a_directory_that_cannot_be(training: Refused, refused: Refused) -> None:
    says(training(options=("--out", "")), ("--out is empty", "name a folder"))
    says(training(options=("--out", LONG)), (LONG, "File name too long", "--out"))
    says(refused("train", "--resume", "--out", LONG), (LONG, "File name too long"))
    says(refused("train", LONG), (LONG, "File name too long"))
    says(refused("report", LONG), (LONG, "File name too long"))
    says(refused("predict", LONG), (LONG, "File name too long"))
    says(refused("export", LONG, "adapter"), (LONG, "File name too long"))


def test_config_init_where_nothing_can_be_written(refused: Refused) -> None:
    for name, reason in ((LONG, "too long"), ("none/run.toml", "No such file")):
        sentence = refused("config", "init", "--all", name)
        says(sentence, (name, reason, "name another file"))
        assert "--out" not in sentence
        assert "--resume" not in sentence


def test_the_home_of_nobody(training: Refused) -> None:
    says(training("data.train=~nobody-of-that-name/x.jsonl"), ("~nobody-of-that-name", "data.train"))


def test_going_on_with_a_configuration_where_nothing_was_begun(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[federation]\nrounds = 2\n", encoding="utf-8")
    says(refused("train", "run.toml", "--resume", "--out", "none"), ("none", "no run", "without --resume"))


@pytest.mark.parametrize("command", ["report", "predict", "export"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("config.json", '{"data": 5}'),
        ("config.json", '{"federation": {"rounds": "many"}}'),
        ("config.json", "[" * 100_000),
        ("run.json", "{}"),
        ("run.json", '{"label_names": 3, "clients": []}'),
        ("run.json", '{"label_names": ["a", 1], "clients": []}'),
        ("run.json", "\udcff"),
    ],
)
def test_a_damaged_run(refused: Refused, tmp_path: Path, command: str, name: str, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "run" / "run.json").write_text('{"label_names": ["a", "b"], "clients": ["c"]}', encoding="utf-8")
    (tmp_path / "run" / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    says(refused(command, "run", *(["adapter"] if command == "export" else [])), (name,))


def test_resuming_without_a_run(refused: Refused) -> None:
    says(refused("train", "--resume"), ("--resume", "--out"))
    says(refused("train", "--resume", "--out", "none"), ("none", "no run", "config.json"))


@pytest.mark.parametrize("command", [("report",), ("export",), ("predict",)])
def test_what_is_no_run(refused: Refused, small_model: Path, command: tuple[str]) -> None:
    more = ("adapter",) if command == ("export",) else ()
    says(refused(*command, "none", *more), ("none", "run"))
    says(refused(*command, str(small_model), *more), (str(small_model), "run", "run.json"))


def test_methods_of_no_model(refused: Refused) -> None:
    says(refused("methods", "--model", "builtin/large"), ("'builtin/large'", "builtin/tiny"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("train", "--set", "federation.rounds=0"), ("federation.rounds is 0", "at least 1")),
        pytest.param(
            ("train", "--set", "model.name=builtin/large", "--set", "data.examples=100"),
            ("'builtin/large'",),
            marks=pytest.mark.nightly,
        ),
        pytest.param(("predict", "none"), ("none holds no run",), marks=pytest.mark.weekly),
    ],
)
def test_a_process_of_its_own(tmp_path: Path, arguments: tuple[str, ...], facts: FACTS) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "secure_fed", *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    says(done.stderr.splitlines()[-1], facts)
    assert everything(tmp_path) == {}
