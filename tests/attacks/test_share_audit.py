"""`secure-fed audit RUN --share WORD`: a finding if updates reveal the share, none for an unrelated word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attacks.inference.share import Shares, facts
from secure_fed.commands.cli import main
from secure_fed.config import RunConfig
from secure_fed.federation import Federation

CLIENTS, EACH = 16, 12


def rows(client: int, share: float, count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Texts with label "b" say fever, those with label "a" cough; mother is said by every third, whatever the label."""
    made = []
    for number in range(count):
        ill = rng.random() < share
        words = [
            "patient has",
            "fever" if ill else "cough",
            f"since {number} days",
            "mother" if rng.random() < 1 / 3 else "old",
        ]
        made.append({"text": " ".join(words), "label": "b" if ill else "a", "client": f"site-{client}"})
    return made


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp, rng = tmp_path_factory.mktemp("share"), np.random.default_rng(0)
    train = [row for i in range(CLIENTS) for row in rows(i, i / (CLIENTS - 1), EACH, rng)]
    for name, some in (("train", train), ("test", rows(0, 0.5, 160, rng))):
        (tmp / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    settings = {
        "data": {"train": str(tmp / "train.jsonl"), "test": str(tmp / "test.jsonl"), "client": "client"},
        "federation": {"rounds": 2, "cohort": 8},
        "model": {"max_length": 16},
        "method": {"name": "head"},
        "training": {"batch_size": 4},
        "evaluation": {"audit_fraction": 0.0},
    }
    Federation(RunConfig.from_dict(settings)).run(tmp / "run")
    return tmp / "run"


@pytest.mark.nightly
def test_a_word_that_goes_with_the_label_is_read_from_answers(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run_dir), "--share", "fever", "--json", "--fail-above", "gain=0.3"]) == 4
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert found["verdict"] == "leak", found
    assert found["error"] < 0.5 * found["baseline"]
    assert found["p_value"] < 0.01
    assert found["clients"] == CLIENTS
    assert "is above --fail-above gain=0.3" in told.err
    assert main(["audit", str(run_dir), "--share", "mother"]) == 0
    assert "nothing found" in capsys.readouterr().out


@pytest.mark.nightly
def test_guesses_that_luck_explains_are_no_leak() -> None:
    """Shuffled guesses over 200 audits; and exact ones, which are one."""
    rng, leaks = np.random.default_rng(0), 0
    for _ in range(200):
        true = rng.random(20)
        leaks += facts(Path("run"), "word", Shares(rng.permutation(true), 0.5), true, 0.5)["verdict"] == "leak"
    assert leaks <= 200 * 0.05 + 3 * (200 * 0.05) ** 0.5
    true = rng.random(20)
    assert facts(Path("run"), "word", Shares(true, 0.5), true, 0.5)["verdict"] == "leak"
    worse = facts(Path("run"), "word", Shares(0.5 + 4 * (true - 0.5), 0.5), true, 0.5)
    assert worse["verdict"] == "nothing", "in the right order, and further away than the share that is public"


def test_what_does_not_fit_is_one_sentence(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    masked = {
        "data": {"examples": 200, "test_examples": 60},
        "federation": {"clients": 8, "cohort": 4, "rounds": 1},
        "secure_aggregation": {"enabled": True},
        "evaluation": {"audit_fraction": 0.0},
    }
    Federation(RunConfig.from_dict(masked)).run(tmp_path / "masked")
    for arguments, said in (
        (["audit", "--share", "fever"], "--share is for the audit of a run"),
        (["audit", str(run_dir), "--share", "zebra"], "0 of 160 test texts contain 'zebra'"),
        (["audit", str(run_dir), "--share", ""], "--share is ''"),
        (["audit", str(run_dir), "--share", "fever", "--fail-above", "auc=1"], "with --share give gain="),
        (["audit", str(run_dir), "--share", "fever", "--model", "x"], "--model goes with"),
        (["audit", str(tmp_path / "masked"), "--share", "patient"], "reads sums behind masks"),
    ):
        assert main(arguments) == 2, arguments
        told = capsys.readouterr().err
        assert said in told, told
