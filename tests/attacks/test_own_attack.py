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
from tests.attacks.refusals import Capsys, refusals
from tests.golden import refused

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_an_attack.md"
SMALL = (
    *("data.examples=120", "data.test_examples=40", "federation.clients=4", "federation.rounds=1"),
    *("method.name=bitfit", "training.together=1"),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "my_attack.py"
    path.write_text(code, encoding="utf-8")
    return path


@pytest.mark.nightly
def test_the_attack_of_the_page_is_made_beside_a_listed_one(file: Path, tmp_path: Path, capsys: Capsys) -> None:
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


def test_a_wrong_file_is_refused(file: Path, tmp_path: Path, capsys: Capsys) -> None:
    """Before the run is read. The page is short."""
    text = file.read_text(encoding="utf-8")
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) < 60
    for found, instead in (
        ("ATTACK =", "OTHER ="),
        ("def run(", "def runs("),
        ('"calibrated_loss"', '"loss"'),
        ('"calibrated_loss"', '"../loss"'),
        ('"outsider"', '"insider"'),
        ("from attacks.catalogue", "from attacks.catalog"),
    ):
        assert text.count(found) == 1
        file.write_text(text.replace(found, instead), encoding="utf-8")
        with refused(ConfigError):
            from_file(file)
    file.write_text(text.replace('"""Calibrated', '(("Calibrated'), encoding="utf-8")
    with refused(ConfigError, hide=r"(?<=SyntaxError).*"):  # Python's own words
        from_file(file)
    refusals("own_attack", [["audit", tmp_path, "--attack", tmp_path / "none.py"]], capsys)


def of(file: Path, body: str) -> Any:
    """What an attack of this body finds, in a case of three units; the file is named from where it lies."""
    head, _ = file.read_text(encoding="utf-8").split("    before = ")
    file.write_text(f"{head}    {body}\n", encoding="utf-8")
    run = from_file(Path(file.name)).function
    assert run is not None
    case: Any = SimpleNamespace(units=(1, 2, 3), seen=Seen("outsider", Tensors({"w": torch.zeros(2)})))
    return run(case, Settings())


def test_an_attack_that_fails_or_finds_nothing_is_one_sentence(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do as it likes with a copy of a tensor."""
    monkeypatch.chdir(file.parent)
    text = file.read_text(encoding="utf-8")
    for body in (
        "return 1 / 0",
        "raise SystemExit(0)",
        "return None",
        "return Finding(scores=[1.0, 2.0, 3.0])",
        "import numpy as np; return Finding(scores=np.ones(2))",
        "import numpy as np; return Finding(scores=np.array(['a', 'b', 'c']))",
        "import numpy as np; return Finding(measured={'a': np.float32(1)})",
        "return Finding()",
        *(
            f"case.seen.final.tensor('w'){write}; return Finding(measured={{'a': 1}})"
            for write in (".fill_(7.0)", ".numpy()[0] = 7", ".data.fill_(3)")
        ),
    ):
        file.write_text(text, encoding="utf-8")
        with refused(ConfigError):
            of(file, body)
    file.write_text(text, encoding="utf-8")
    copied = "case.seen.final.tensor('w').clone().fill_(7.0); return Finding(measured={'a': 1})"
    assert of(file, copied).measured == {"a": 1}


def test_an_attack_of_ones_own_is_never_the_main_one_beside_a_listed_one() -> None:
    scored = [AttackAt("aaa", "outsider"), AttackAt("label_counts", "server")]
    assert main_of(scored, ["outsider", "server"]) == scored[1]
    assert main_of(scored[:1], ["outsider", "server"]) == scored[0]
