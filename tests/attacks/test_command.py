"""`secure-fed audit` and the scripts of single attacks, as a user runs them."""

from __future__ import annotations

import json
import runpy
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attacks.catalogue import ATTACKS
from attacks.command import REFERENCES, affordable, main
from secure_fed import cli
from secure_fed.errors import UsageError

SMALL = [
    *("data.examples=240", "data.test_examples=60", "federation.clients=4", "federation.rounds=2"),
    *("evaluation.audit_fraction=0.5", "evaluation.record=models", "method.name=bitfit", "evaluation.every=2"),
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("audited") / "run"
    settings = [part for setting in SMALL for part in ("--set", setting)]
    assert cli.main(["train", *settings, "--out", str(out), "--json"]) == 0
    return out


def audit(run_dir: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["audit", str(run_dir), "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    return found


def test_an_audit_is_one_json_object_and_two_files(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = audit(run_dir, capsys, "--attack", "loss", "--attack", "round_losses")
    assert {cell["attack"] for cell in found["cells"]} == {"loss", "round_losses"}
    for cell in found["cells"]:
        assert {"attack", "vantage", "applicable", "auc", "auc_interval", "epsilon_lower"} <= set(cell)
    assert found["epsilon_accounted"] is None
    assert json.loads((run_dir / "audit.json").read_text()) == found
    for name in ("audit.json", "audit.html", "membership.json"):
        assert stat.S_IMODE((run_dir / name).stat().st_mode) == 0o600
    assert "No leak was found" in (run_dir / "audit.html").read_text()


def test_texts_are_shown_only_when_asked(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert all(one["text"] is None for one in audit(run_dir, capsys, "--attack", "loss")["exposed"])
    shown = audit(run_dir, capsys, "--attack", "loss", "--show-texts")["exposed"]
    assert all(len(one["text"]) > 20 for one in shown)


def test_runs_stand_beside_each_other(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit(run_dir, capsys, "--attack", "loss")
    found = audit(run_dir, capsys, "--attack", "loss", "--beside", str(run_dir))
    assert [row["label"] for row in found["sweep"]] == ["without privacy"] * 2
    assert all(row["accuracy"] is not None for row in found["sweep"])


def test_an_attack_alone_writes_nothing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "audit.json").unlink(missing_ok=True)
    assert main("loss", [str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {cell["attack"] for cell in found["cells"]} == {"loss"}
    assert not (run_dir / "audit.json").exists()


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        (["--attack", "lyra"], "'lyra'"),
        (["--references", "1"], "--references is 1"),
        (["--references", "-3"], "--references is -3"),
        (["--attack", "loss", "--beside", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_sentence(
    run_dir: Path, more: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in run_dir.iterdir())
    capsys.readouterr()
    assert cli.main(["audit", str(run_dir), *more]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert fault in said
    assert sorted(path.name for path in run_dir.iterdir()) == before


def test_what_is_no_finished_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_other_data_than_it_was_trained_on_are_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = json.loads((run_dir / "run.json").read_text())
    for name in ("data_digest", "audit"):
        (run_dir / "run.json").write_text(json.dumps({**facts, name: "another"}))
        assert cli.main(["audit", str(run_dir), "--attack", "loss"]) == 2
        assert f"{name} in run.json differs" in capsys.readouterr().err
    (run_dir / "run.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("result", [{}, {"seconds": 1.0, "unit": "client"}, {"seconds": "long", "unit": "none"}])
def test_a_damaged_result_is_named(result: dict[str, Any], run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = (run_dir / "result.json").read_text()
    (run_dir / "result.json").write_text(json.dumps(result))
    try:
        assert cli.main(["audit", str(run_dir), "--attack", "loss"]) == 2
    finally:
        (run_dir / "result.json").write_text(kept)
    assert "result.json is damaged" in capsys.readouterr().err


def test_a_run_that_has_not_ended_is_to_be_ended_first(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = (run_dir / "result.json").read_text()
    (run_dir / "result.json").unlink()
    assert cli.main(["audit", str(run_dir)]) == 2
    (run_dir / "result.json").write_text(kept)
    assert "--resume" in capsys.readouterr().err


def test_an_attack_that_fails_is_an_error_if_it_was_asked_for_and_else_a_cell(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(case: Any, settings: Any) -> Any:
        raise UsageError("the confidences are no numbers")

    monkeypatch.setattr("attacks.loss.run", fails)
    assert cli.main(["audit", str(run_dir), "--attack", "loss"]) == 2
    assert "the confidences are no numbers" in capsys.readouterr().err
    found = audit(run_dir, capsys, "--references", "0")
    failed = [cell for cell in found["cells"] if cell["attack"] == "loss"]
    assert {cell["why"] for cell in failed} == {"it failed: the confidences are no numbers"}
    assert not any(cell["applicable"] for cell in failed)


def test_an_attack_asked_for_twice_is_made_once(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = audit(run_dir, capsys, "--attack", "loss", "--attack", "loss")
    assert len(found["attacks"]) == 1
    assert len(found["cells"]) == 4


def test_references_are_trained_unasked_only_while_that_is_quick() -> None:
    assert affordable(1.0) == REFERENCES
    assert affordable(46.0) == 6
    assert affordable(100.0) == 0


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", sorted({attack.module for attack in ATTACKS.values()}))
def test_every_attack_is_a_script(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert not ended.value.code
    assert f"python -m {module}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_script_from_a_shell(run_dir: Path) -> None:
    command = [sys.executable, "-m", "attacks.loss", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attacks"][0]["name"] == "loss"
