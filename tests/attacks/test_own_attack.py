"""An attack in a user's file: the page's example runs, and a wrong file is refused in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attacks.adversary.case import Seen, Settings
from attacks.catalogue import from_file
from attacks.record import AttackAt
from attacks.report.verdict import main_of
from secure_fed.commands import cli
from secure_fed.errors import ConfigError
from secure_fed.tensors.tensors import Tensors

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


def of(file: Path, body: str) -> Any:
    """What an attack of this body finds, in a case of three units; the file is named from where it lies."""
    head, _ = file.read_text(encoding="utf-8").split("    before = ")
    file.write_text(f"{head}    {body}\n", encoding="utf-8")
    run = from_file(Path(file.name)).function
    assert run is not None
    case: Any = SimpleNamespace(units=(1, 2, 3), seen=Seen("outsider", Tensors({"w": torch.zeros(2)})))
    return run(case, Settings())


WRONG = {
    "return 1 / 0": "failed at line 11 (ZeroDivisionError",
    "raise SystemExit(0)": "failed at line 11 (SystemExit",
    "return None": "returned NoneType, and not a Finding",
    "return Finding(scores=[1.0, 2.0, 3.0])": "returned scores that are list: they are an array of 3 numbers",
    "import numpy as np; return Finding(scores=np.ones(2))": "returned scores that are float64 of shape (2,)",
    "import numpy as np; return Finding(scores=np.array(['a', 'b', 'c']))": "returned scores that are <U1",
    "import numpy as np; return Finding(measured={'a': np.float32(1)})": "returned measured that is no JSON",
    "return Finding()": "returned a Finding without scores and without measured",
    **{
        f"case.seen.final.tensor('w'){write}; return Finding(measured={{'a': 1}})": "writes into tensors of case.seen"
        for write in (".fill_(7.0)", ".numpy()[0] = 7", ".data.fill_(3)")
    },
}


@pytest.mark.parametrize("body", WRONG)
def test_an_attack_that_fails_or_finds_nothing_is_one_sentence(
    file: Path, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    with pytest.raises(ConfigError, match=re.escape(f"--attack {file.name} {WRONG[body]}")):
        of(file, body)


def test_an_attack_may_do_as_it_likes_with_a_copy(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert of(file, "case.seen.final.tensor('w').clone().fill_(7.0); return Finding(measured={'a': 1})").measured == {
        "a": 1
    }


def test_a_missing_file_is_refused_before_the_run_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", str(tmp_path), "--attack", str(tmp_path / "none.py")]) == 2
    assert "is no file" in capsys.readouterr().err


def test_an_attack_of_ones_own_is_never_the_main_one_beside_a_listed_one() -> None:
    scored = [AttackAt("aaa", "outsider"), AttackAt("label_counts", "server")]
    assert main_of(scored, ["outsider", "server"]) == scored[1]
    assert main_of(scored[:1], ["outsider", "server"]) == scored[0]
