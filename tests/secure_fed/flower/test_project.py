"""`secure-fed flower init`: the files it writes, how Flower reads them, and the inputs it refuses."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

from secure_fed.commands.cli import main
from secure_fed.deployment.coordinator import Settings
from secure_fed.deployment.home import ENDED
from secure_fed.flower.coordinator_app import of_run_config
from secure_fed.flower.project import Connection, FlowerProjectError, write_project


@pytest.fixture
def coordinator(tmp_path: Path) -> Path:
    folder = tmp_path / 'the "coordinator"'
    folder.mkdir()
    return folder


def test_flower_takes_the_project_and_bundles_two_files_whatever_lies_beside_them(
    tmp_path: Path, coordinator: Path
) -> None:
    (tmp_path / "app").mkdir()  # an empty folder is used
    folder = write_project(tmp_path / "app", coordinator, Connection())
    config, warnings = load_and_validate(folder / "pyproject.toml", check_module=False)
    assert warnings == []
    assert of_run_config(config["tool"]["flwr"]["app"]["config"]) == (coordinator, Settings())
    for name in ("notes.jsonl", "charter.json", "identity.key", "more.py", "keys.toml", ".flwr/other.toml"):
        (folder / name).write_text("SECRET", encoding="utf-8")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(folder))) as bundle:
        assert set(bundle.namelist()) == {"pyproject.toml", "README.md", ".info/CONTENT"}
        assert not [name for name in bundle.namelist() if b"SECRET" in bundle.read(name)]


@pytest.mark.parametrize("insecure", [False, True])
def test_the_connection_is_the_one_asked_for(tmp_path: Path, coordinator: Path, insecure: bool) -> None:
    certificate = tmp_path / "ca.pem"
    certificate.write_text("", encoding="utf-8")
    connection = Connection("localhost:8443", None if insecure else certificate, insecure)
    folder = write_project(tmp_path / "app", coordinator, connection)
    found = tomllib.loads((folder / ".flwr/config.toml").read_text(encoding="utf-8"))["superlink"]
    secured = {"insecure": True} if insecure else {"root-certificates": str(certificate)}
    assert found["default"] == "secure-fed"
    assert found["secure-fed"] == {"address": "localhost:8443", **secured}


def test_a_folder_that_is_not_empty_stays_as_it_is(tmp_path: Path, coordinator: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "mine").write_text("mine", encoding="utf-8")
    with pytest.raises(FlowerProjectError, match="is not empty"):
        write_project(tmp_path / "app", coordinator, Connection())
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([coordinator.name, "app", "mine"])


def test_a_full_disk_leaves_nothing(tmp_path: Path, coordinator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refused)
    with pytest.raises(FlowerProjectError, match="No space left"):
        write_project(tmp_path / "app", coordinator, Connection())
    assert list(tmp_path.iterdir()) == [coordinator]


@pytest.mark.parametrize(
    "address", ["", "host", ":80", "host:", "host:0", "host:65536", "host:8000000000", "host:\uff18\uff10"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(FlowerProjectError, match="HOST:PORT"):
        Connection(address)


@pytest.mark.parametrize(
    "host", ["fed.example.org", "0.0.0.0", "192.168.1.5", "[::]", "localhost.example.org", "127.0.0.1.example.org"]
)
def test_a_superlink_that_others_reach_is_refused(
    host: str, tmp_path: Path, coordinator: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`flwr run` reaches the interface that starts apps: where it does from elsewhere, so does everybody."""
    with pytest.raises(FlowerProjectError) as raised:
        Connection(f"{host}:8000")
    assert (raised.value.setting, raised.value.value) == ("--superlink", f"{host}:8000")
    given = ["--coordinator", str(coordinator), "--superlink", f"{host}:8000"]
    assert main(["flower", "init", str(tmp_path / "app"), *given]) == 2
    assert "ssh -L" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.9", "[::1]"])
def test_a_superlink_of_this_machine_is_taken(host: str) -> None:
    assert Connection(f"{host}:8000").superlink == f"{host}:8000"


@pytest.mark.parametrize("noted", [(0, ""), (0, "south did not confirm"), (3, "epsilon 8 is spent"), None])
@pytest.mark.parametrize("going", [False, True])
def test_a_run_ends_with_the_status_that_the_coordinators_app_noted(
    noted: tuple[int, str] | None,
    going: bool,
    tmp_path: Path,
    coordinator: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Keys are registered before the run starts. A run that goes on is not started again, nor one whose model all have."""
    asked = list[str]()

    def flower(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(" ".join(command[1:3]))
        if command[1] in ("run", "log") and noted:
            (coordinator / ENDED).write_text(json.dumps({"status": noted[0], "sentence": noted[1]}), encoding="utf-8")
        runs = {
            "runs": [{"run-id": "7", "status": "finished:failed"}, {"run-id": "8", "status": "running"}][: 1 + going]
        }
        return subprocess.CompletedProcess(command, 0, f"runs: {json.dumps(runs)}" if command[1] == "ls" else "")

    monkeypatch.setattr(subprocess, "run", flower)
    (coordinator / ENDED).write_text('{"status": 1, "sentence": "too few members"}', encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as superlink:
        link = Connection(f"127.0.0.1:{superlink.getsockname()[1]}", insecure=True)
        folder = write_project(tmp_path / "app", coordinator, link)
        (folder / "supernodes" / "north.pub").write_text("key", encoding="utf-8")
        for _ in range(2):
            status, sentence = noted or (1, "came to no end")
            assert main(["flower", "run", str(folder)]) == status
            assert (sentence or str(coordinator / "run")) in "".join(capsys.readouterr())
        (folder / "supernodes" / "south").write_text("key", encoding="utf-8")
        assert main(["flower", "run", str(folder)]) == (0 if noted == (0, "") else 2), "whose name does not end in .pub"
    once = ["supernode register", "ls secure-fed", "log 8" if going else f"run {folder}"]
    assert asked == (once if noted == (0, "") else once * 2)
    if noted != (0, ""):
        capsys.readouterr()
        assert main(["flower", "run", str(folder)]) == 1
        assert "does not answer" in capsys.readouterr().err


def test_the_command(tmp_path: Path, coordinator: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init = ["flower", "init", str(tmp_path / "app"), "--coordinator", str(coordinator)]
    assert main([*init, "--insecure"]) == 0
    assert f"secure-fed flower run {tmp_path / 'app'}" in capsys.readouterr().out
    for wrong, sentence in {
        "": "is not empty",
        "--insecure --root-certificates /ca.pem": "leave one of them out",
        "--root-certificates /ca.pem": "is not there",
        "--coordinator /nowhere": "is not empty",
        "--superlink nowhere": "no HOST:PORT",
    }.items():
        assert main([*init, *wrong.split()]) == 2, wrong
        assert sentence in capsys.readouterr().err
    assert main(["flower", "init", str(tmp_path / "other"), "--coordinator", "/nowhere"]) == 2
    assert "is not a folder" in capsys.readouterr().err
