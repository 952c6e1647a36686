"""Pushes to the Hub: the files, their visibility, and the messages of failed pushes. The Hub is a fake."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from secure_fed.commands.cli import main
from tests.golden import golden


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


def last(capsys: pytest.CaptureFixture[str]) -> str:
    """The last line on standard error."""
    return capsys.readouterr().err.splitlines()[-1] + "\n"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, small_model: Path, small_data: Path) -> Path:
    out = tmp_path_factory.mktemp("hub") / "run"
    settings = [f"model.name={small_model}", f"data.name={small_data}", "federation.rounds=1", "method.name=fedlora"]
    assert main(["train", *(word for text in settings for word in ("--set", text)), "--out", str(out), "--json"]) == 0
    return out


def test_a_push_is_private_and_carries_the_card(
    played: Played, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["export", str(run_dir), str(tmp_path / "out"), "--merged", "--push-to-hub", "me/notes"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "out"), "https://hub/me/notes"]
    assert played.private["me/notes"]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= played.uploaded["me/notes"]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert str(tmp_path.parent) not in card
    assert "base_model:" not in card.split("---")[1]  # the Hub refuses a card that names a folder


@pytest.mark.parametrize("name", ["me/open", "me/new"])
def test_only_public_publishes(
    name: str, played: Played, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push = ["export", str(run_dir), "--merged", "--push-to-hub", name]
    assert main([*push, str(tmp_path / "first")]) == (2 if name == "me/open" else 0)
    if name == "me/open":
        golden("hub/public.txt", last(capsys))
    assert (name in played.uploaded) is (name == "me/new")
    assert main([*push, str(tmp_path / "second"), "--public"]) == 0
    assert name in played.uploaded


def test_a_push_that_fails_is_one_sentence_and_leaves_the_folder(
    played: Played, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played.error = OSError("no route to host\nand a page of more")
    assert main(["export", str(run_dir), str(tmp_path / "out"), "--merged", "--push-to-hub", "me/notes"]) == 1
    golden("hub/failed.txt", last(capsys))
    assert (tmp_path / "out" / "README.md").exists()


REFUSED: dict[str, tuple[list[str], bool, str | None]] = {
    "no name": (["--merged", "--push-to-hub", "a/b/c"], False, "t"),
    "a base of this machine": (["--push-to-hub", "me/notes"], False, "t"),
    "offline": (["--merged", "--push-to-hub", "me/notes"], True, "t"),
    "nobody": (["--merged", "--push-to-hub", "me/notes"], False, None),
    "public": (["--public"], False, "t"),
}


def test_a_push_that_must_fail_writes_nothing(
    played: Played,
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = []
    for case, (options, offline, token) in REFUSED.items():
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(huggingface_hub, "get_token", lambda token=token: token)
        assert main(["export", str(run_dir), str(tmp_path / "out"), *options]) == 2
        told.append(f"{case}: {last(capsys)}")
        assert not (tmp_path / "out").exists()
        assert not played.uploaded
    golden("hub/refused.txt", "".join(told))
