"""A run read back: the clients' own tensors, the run's model and data, the README of an export, and pushes to the Hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from secure_fed import Federation, RunConfig
from secure_fed.commands.cli import main
from secure_fed.errors import ConfigError, ModelError, RunDirectoryError
from secure_fed.export import trained
from secure_fed.learning.models.locate import locate
from tests.golden import golden, refused
from tests.secure_fed import small_models, toys
from tests.secure_fed.conftest import Ran
from tests.secure_fed.test_per_example import texts

SMALL = (
    *("federation.clients=4", "federation.cohort=2", "federation.rounds=1", "method.rank=2"),
    *("training.lr=0.02", "training.steps=2", "training.together=1"),
)


def federation_of(model: Path | str, data: Path, *settings: str) -> Federation:
    files = [f"model.name={model}", f"data.train={data / 'train.jsonl'}", f"data.test={data / 'test.jsonl'}"]
    return Federation(RunConfig.load(None, [*files, *SMALL, *settings]))


def run(model: Path | str, data: Path, out: Path, *settings: str) -> Federation:
    federation = federation_of(model, data, *settings)
    federation.run(out)
    return federation


@pytest.fixture(scope="module")
def personal(tmp_path_factory: pytest.TempPathFactory, small_model: Path, small_data: Path) -> tuple[Path, Federation]:
    """(run folder, federation): one round in which two of four clients trained personal heads."""
    out = tmp_path_factory.mktemp("runs") / "personal"
    return out, run(small_model, small_data, out, "method.personal=classifier")


def test_a_client_has_its_own_model(personal: tuple[Path, Federation]) -> None:
    out, federation = personal
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert result["personal"] == ["classifier.bias", "classifier.weight"]
    heads = []
    for client in federation.assembly.clients:
        if client.kept is None:
            with refused(ConfigError, worded=not heads):
                trained.load_run(out, client.name)
            continue
        loaded = trained.load_run(out, client.name)
        heads.append(loaded.model.get_parameter("classifier.weight").detach())
        assert torch.equal(heads[-1], client.kept.tensor("classifier.weight"))
        assert loaded.card.facts["accuracy on the test set"] == "not measured"  # the metrics belong to the shared model
        assert f"| personal tensors | classifier: here those of client '{client.name}' alone |" in loaded.card.text(
            "peft"
        )
    assert len(heads) == 2
    assert not torch.equal(*heads)


def test_personal_tensors_need_a_client(personal: tuple[Path, Federation], ran: Ran, tmp_path: Path) -> None:
    out, federation = personal
    for command in (("predict", out), ("export", out, tmp_path / "adapter")):
        status, _, error = ran(*command)
        assert status == 2
        golden("secure_fed/personal.txt", error)
    with refused(ConfigError):
        trained.load_run(out, "nobody")
    chosen = next(client.name for client in federation.assembly.clients if client.kept is not None)
    assert ran("export", out, tmp_path / "adapter", "--client", chosen)[0] == 0


def test_a_run_holds_in_another_directory(
    small_model: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(small_model, tmp_path / "one" / "model")
    shutil.copytree(small_data, tmp_path / "one" / "data")
    (tmp_path / "two").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    run("model", Path("data"), tmp_path / "run")
    monkeypatch.chdir(tmp_path / "two")
    loaded = trained.load_run(tmp_path / "run")
    assert len(list(loaded.predict(["calm word1"]))) == 1
    for wrong in ("calm", ["calm", {"text": "a"}]):
        with refused(ConfigError):
            list(loaded.predict(wrong))
    loaded.export("adapter")
    config = json.loads(Path("adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(tmp_path / "one" / "model")
    with refused(ConfigError):
        trained.load_run(tmp_path / "run", "client-0")
    again = federation_of(tmp_path / "one" / "model", tmp_path / "one" / "data")
    assert again.run(tmp_path / "run", resume=True).state.round == 1
    with torch.no_grad():
        loaded.model.get_parameter("classifier.bias").fill_(float("nan"))
    with refused(ModelError):  # predictions of a model that diverged
        list(loaded.predict(["calm"]))


def test_an_export_on_the_built_in_model_names_it_and_no_place(
    small_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("builtin/tiny", small_data, tmp_path / "run", "model.dtype=bfloat16", "model.max_length=16")
    loaded = trained.load_run(tmp_path / "run")
    loaded.export(tmp_path / "adapter")
    readme = (tmp_path / "adapter" / "README.md").read_text(encoding="utf-8")
    assert "| base model | builtin/tiny |" in readme
    assert str(Path(locate("builtin/tiny")).parent) not in readme
    assert "| precision | trained beside a base model in bfloat16" in readme
    code = readme.split("```python\n")[1].split("```")[0]
    scope: dict[str, Any] = {}
    exec(code.replace("path/to/this/folder", str(tmp_path / "adapter")), scope)
    assert scope["base"].config.id2label == {0: "calm", 1: "wild"}
    base = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert base["base_model_name_or_path"] == locate("builtin/tiny")
    capsys.readouterr()
    loaded.export(tmp_path / "whole", merged=True)
    assert capsys.readouterr() == ("", "")


def own_federation(model: Any) -> Federation:
    train = [texts(9), texts(12)]
    return Federation(toys.config({"method.modules_to_save": []}), model=model, train=train, test=texts(6))


def test_a_model_of_ones_own_is_exported_by_its_federation(tmp_path: Path) -> None:
    small_models.make("bert").save_pretrained(tmp_path / "base")  # type: ignore[operator]
    federation = own_federation(small_models.make("bert"))
    result = federation.run(tmp_path / "run")
    with refused(RunDirectoryError):
        trained.load_run(tmp_path / "run")
    federation.load(federation.assembly.initial)
    out = federation.export(result.state, tmp_path / "adapter", base_model=str(tmp_path / "base"))
    want = small_models.logits(federation.load(result.state))
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    assert torch.allclose(small_models.logits(PeftModel.from_pretrained(base, str(out))), want, atol=1e-5)
    anonymous = federation.export(result.state, tmp_path / "anonymous")
    assert "base_model:" not in (anonymous / "README.md").read_text(encoding="utf-8")
    config = json.loads((anonymous / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] is None


def test_a_pooler_that_no_checkpoint_has_is_exported_too(tmp_path: Path) -> None:
    small_models.make("bert").bert.save_pretrained(tmp_path / "base")  # type: ignore[operator, union-attr]
    weights = tmp_path / "base" / "model.safetensors"
    kept = {name: part for name, part in load_file(weights).items() if not name.startswith("pooler.")}
    save_file(kept, weights, {"format": "pt"})
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=small_models.LABELS)
    federation = own_federation(model)
    result = federation.run()
    out = federation.export(result.state, tmp_path / "adapter", base_model=str(tmp_path / "base"))
    want = small_models.logits(federation.load(result.state))
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=small_models.LABELS)
    torch.testing.assert_close(small_models.logits(PeftModel.from_pretrained(base, out)), want, rtol=1e-5, atol=1e-6)


def test_a_client_of_ones_own_federation_is_exported(tmp_path: Path) -> None:
    federation = toys.federation({"method.personal": ["classifier"]})
    result = federation.run()
    with refused(ConfigError):
        federation.export(result.state, tmp_path / "adapter")
    federation.export(result.state, tmp_path / "adapter", client="client-1")
    kept = federation.assembly.clients[1].kept
    assert kept is not None
    assert torch.equal(
        federation.assembly.problem.model.get_parameter("classifier.bias"), kept.tensor("classifier.bias")
    )


def test_another_base_model_and_changed_texts_are_refused(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    """Other weights of the same shape are another base model."""
    model, data, out = tmp_path / "model", tmp_path / "data", tmp_path / "run"
    shutil.copytree(small_model, model)
    shutil.copytree(small_data, data)
    run(model, data, out)
    rows = (data / "train.jsonl").read_text(encoding="utf-8")
    (data / "train.jsonl").write_text(rows.replace("word1", "word2", 1), encoding="utf-8")
    with refused(RunDirectoryError):
        federation_of(model, data, "federation.rounds=2").run(out, resume=True)
    (data / "train.jsonl").write_text(rows, encoding="utf-8")
    assert federation_of(model, data, "federation.rounds=2").run(out, resume=True).state.round == 2
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if name.endswith("query.weight"))
    save_file(weights | {name: weights[name] + 1e-6}, model / "model.safetensors", {"format": "pt"})
    with refused(RunDirectoryError):
        trained.load_run(out)
    with refused(RunDirectoryError):
        federation_of(model, data, "federation.rounds=3").run(out, resume=True)


class Played:
    """A fake Hub; `private` says of each repository whether it is private."""

    def __init__(self) -> None:
        self.private = {"me/open": False}
        self.uploaded: dict[str, set[str]] = {}
        self.error: Exception | None = None

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        assert exist_ok
        self.private.setdefault(repo_id, private)

    def model_info(self, repo_id: str) -> Any:
        return SimpleNamespace(private=self.private[repo_id])

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> Any:
        if self.error:
            raise self.error
        self.uploaded[repo_id] = {file.name for file in Path(folder_path).iterdir()}
        return SimpleNamespace(repo_url=f"https://hub/{repo_id}")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    hub = Played()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return hub


def last(error: str) -> str:
    return error.splitlines()[-1] + "\n"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, small_model: Path, small_data: Path) -> Path:
    out = tmp_path_factory.mktemp("hub") / "run"
    settings = [f"model.name={small_model}", f"data.name={small_data}", "federation.rounds=1", "method.name=fedlora"]
    assert main(["train", *(word for text in settings for word in ("--set", text)), "--out", str(out), "--json"]) == 0
    return out


def test_a_push_is_private_and_carries_the_card(played: Played, run_dir: Path, tmp_path: Path, ran: Ran) -> None:
    status, printed, _ = ran("export", run_dir, tmp_path / "out", "--merged", "--push-to-hub", "me/notes")
    assert (status, printed.splitlines()) == (0, [str(tmp_path / "out"), "https://hub/me/notes"])
    assert played.private["me/notes"]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= played.uploaded["me/notes"]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert str(tmp_path.parent) not in card
    assert "base_model:" not in card.split("---")[1]  # the Hub refuses a card that names a folder


@pytest.mark.parametrize("name", ["me/open", "me/new"])
def test_only_public_publishes(name: str, played: Played, run_dir: Path, tmp_path: Path, ran: Ran) -> None:
    push = ["export", run_dir, "--merged", "--push-to-hub", name]
    status, _, error = ran(*push, tmp_path / "first")
    assert status == (2 if name == "me/open" else 0)
    if name == "me/open":
        golden("hub/public.txt", last(error))
    assert (name in played.uploaded) is (name == "me/new")
    assert ran(*push, tmp_path / "second", "--public")[0] == 0
    assert name in played.uploaded


def test_a_push_that_fails_is_one_sentence_and_leaves_the_folder(
    played: Played, run_dir: Path, tmp_path: Path, ran: Ran
) -> None:
    played.error = OSError("no route to host\nand a page of more")
    status, _, error = ran("export", run_dir, tmp_path / "out", "--merged", "--push-to-hub", "me/notes")
    assert status == 1
    golden("hub/failed.txt", last(error))
    assert (tmp_path / "out" / "README.md").exists()


REFUSED: dict[str, tuple[list[str], bool, str | None]] = {
    "no name": (["--merged", "--push-to-hub", "a/b/c"], False, "t"),
    "an empty name": (["--merged", "--push-to-hub", ""], False, "t"),
    "a base of this machine": (["--push-to-hub", "me/notes"], False, "t"),
    "offline": (["--merged", "--push-to-hub", "me/notes"], True, "t"),
    "nobody": (["--merged", "--push-to-hub", "me/notes"], False, None),
    "public": (["--public"], False, "t"),
}


def test_a_push_that_must_fail_writes_nothing(
    played: Played, run_dir: Path, tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for case, (options, offline, token) in REFUSED.items():
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(huggingface_hub, "get_token", lambda token=token: token)
        status, _, error = ran("export", run_dir, tmp_path / "out", *options)
        assert status == 2
        told.append(f"{case}: {last(error)}")
        assert not (tmp_path / "out").exists()
        assert not played.uploaded
    golden("hub/refused.txt", "".join(told))
