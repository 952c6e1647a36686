"""An attack in a file of the user's own: the page's example runs, and a file that is wrong is refused in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from attacks.catalogue import from_file
from attacks.evidence.main_attack import main_of
from secure_fed.commands import cli
from secure_fed.errors import ConfigError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_an_attack.md"
SMALL = (
    "data.examples=120",
    "data.test_examples=40",
    "federation.clients=4",
    "federation.rounds=1",
    "method.name=bitfit",
    "training.together=1",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "my_attack.py"
    path.write_text(code, encoding="utf-8")
    return path


@pytest.mark.nightly
def test_the_attack_of_the_page_is_made_beside_a_listed_one(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [part for one in (*SMALL, "evaluation.audit_fraction=0.5") for part in ("--set", one)]
    out = tmp_path / "run"
    assert cli.main(["train", *settings, "--out", str(out), "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["audit", str(out), "--json", "--attack", str(file), "--attack", "loss"]) == 0
    audit = json.loads(capsys.readouterr().out)
    assert audit["asked_for"] == ["calibrated_loss", "loss"]
    assert audit["main"]["attack"] == "loss"
    cells = {cell["attack"]: cell for cell in audit["cells"] if cell["vantage"] == "outsider"}
    assert 0 < cells["calibrated_loss"]["auc"] < 1
    assert cells["calibrated_loss"]["auc"] != cells["loss"]["auc"]
    assert "Loss, calibrated by the initial model" in (out / "private" / "audit-calibrated_loss-loss.html").read_text(
        encoding="utf-8"
    )


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize(
    ("found", "instead", "sentence"),
    [
        ("ATTACK =", "OTHER =", "has no ATTACK"),
        ("def run(", "def runs(", "has no function run"),
        ('"calibrated_loss"', '"loss"', "names its attack 'loss'"),
        ('"calibrated_loss"', '"../loss"', "names its attack '../loss'"),
        ('"outsider"', '"insider"', "has the vantage point 'insider'"),
        ("from attacks.catalogue", "from attacks.catalog", "cannot be executed (ModuleNotFoundError"),
        ('"""Calibrated', '(("Calibrated', "cannot be executed (SyntaxError"),
    ],
)
def test_a_wrong_file_is_refused(file: Path, found: str, instead: str, sentence: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(found) == 1
    file.write_text(text.replace(found, instead), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"--attack {file} {sentence}")):
        from_file(file)


def test_an_attack_that_fails_is_one_sentence(file: Path) -> None:
    run = from_file(file).function
    assert run is not None
    with pytest.raises(ConfigError, match=re.escape(f"--attack {file} failed at line ") + r"\d+ \(AttributeError: "):
        run(None, None)  # type: ignore[arg-type]


def test_a_missing_file_is_refused_before_the_run_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", str(tmp_path), "--attack", str(tmp_path / "none.py")]) == 2
    assert "is no file" in capsys.readouterr().err


def test_an_attack_of_ones_own_is_never_the_main_one_beside_a_listed_one() -> None:
    scored = [("aaa", "outsider"), ("label_counts", "server")]
    assert main_of(scored, ["outsider", "server"]) == ("label_counts", "server")
    assert main_of(scored[:1], ["outsider", "server"]) == ("aaa", "outsider")
