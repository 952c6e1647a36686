"""`secure-fed audit` and the scripts of single attacks, as a user runs them."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attacks.catalogue import ATTACKS
from attacks.cli import SUBCOMMANDS, with_subcommand
from attacks.command import REFERENCES, affordable, main, side_by_side, written
from attacks.inference.share import CLIENTS
from attacks.options import ABOVE_LIMIT, CANNOT_TELL
from attacks.report import curves
from attacks.report.display import Audited
from attacks.report.sweep import sentence, swept
from secure_fed.commands import cli
from secure_fed.errors import UsageError
from secure_fed.runs.store import locked
from tests.attacks import samples

SMALL = [
    *("federation.clients=4", "federation.rounds=2", "training.steps=2", "training.together=1"),
    *("evaluation.audit_fraction=0.5", "evaluation.record=models", "method.name=bitfit", "evaluation.every=2"),
]
MOODS = ("calm", "wild")
FEW = {name: ATTACKS[name] for name in ("loss", "round_losses", "canary_cosine")}  # where it matters not which all are


@pytest.fixture(scope="module")
def train_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty texts, no two alike."""
    rows = [{"text": f"{MOODS[i % 2]} word{i % 40} word{i // 40}", "label": MOODS[i % 2]} for i in range(60)]
    path = tmp_path_factory.mktemp("texts") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, train_rows: Path, small_model: Path, small_data: Path) -> Path:
    out = tmp_path_factory.mktemp("audited") / "run"
    own = [f"model.name={small_model}", f"data.train={train_rows}", f"data.test={small_data / 'test.jsonl'}"]
    settings = [part for setting in [*SMALL, *own] for part in ("--set", setting)]
    assert cli.main(["train", *settings, "--out", str(out), "--json"]) == 0
    return out


def audit(run_dir: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["audit", str(run_dir), "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    return found


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without plots, because plots take most of the time."""
    monkeypatch.setattr(curves, "drawing", lambda *args, **named: "<svg></svg>")


def test_an_audit_is_one_json_object_and_two_files(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = audit(run_dir, capsys, "--references", "0")
    assert {cell["attack"] for cell in found["cells"]} == set(ATTACKS)
    for cell in found["cells"]:
        assert {"attack", "vantage", "applicable", "auc", "auc_interval", "epsilon_lower"} <= set(cell)
    assert found["epsilon_accounted"] is None
    assert json.loads((run_dir / "private" / "audit.json").read_text()) == found
    assert stat.S_IMODE((run_dir / "private").stat().st_mode) == 0o700
    for name in ("audit.json", "audit.html", "membership.json"):
        assert stat.S_IMODE((run_dir / "private" / name).stat().st_mode) == 0o600
    assert "Nothing was found" in (run_dir / "private" / "audit.html").read_text()


@pytest.mark.usefixtures("undrawn")
def test_texts_are_shown_only_when_asked(run_dir: Path, train_rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = audit(run_dir, capsys, "--attack", "loss")["exposed"]
    assert without
    assert all(one["text"] is None for one in without)
    shown = audit(run_dir, capsys, "--attack", "loss", "--show-texts")["exposed"]
    rows = [json.loads(line)["text"] for line in train_rows.read_text(encoding="utf-8").splitlines()]
    assert {one["text"] for one in shown} <= set(rows)


@pytest.fixture(scope="module")
def audited_once(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in another folder, audited; tests only copy it."""
    other = shutil.copytree(run_dir, tmp_path_factory.mktemp("once") / "audited")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attacks.audit.ATTACKS", FEW)
        assert cli.main(["audit", str(other), "--json", "--references", "0"]) == 0
    return other


@pytest.fixture
def copied(audited_once: Path, tmp_path: Path) -> Path:
    """A copy of the audited run for one test."""
    return shutil.copytree(audited_once, tmp_path / "copied")


@pytest.mark.usefixtures("undrawn")
def test_some_attacks_alone_do_not_take_the_place_of_an_audit_by_all(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [(copied / "private" / name).read_text() for name in ("audit.json", "audit.html")]
    found = audit(copied, capsys, "--attack", "loss", "--attack", "round_losses")
    assert found["asked_for"] == ["loss", "round_losses"]
    assert [(copied / "private" / name).read_text() for name in ("audit.json", "audit.html")] == before
    assert json.loads((copied / "private" / "audit-loss-round_losses.json").read_text()) == found
    for name in ("audit-loss-round_losses.json", "audit-loss-round_losses.html"):
        assert stat.S_IMODE((copied / "private" / name).stat().st_mode) == 0o600


def test_what_was_asked_for_and_does_not_apply_is_said_and_nothing_is_written(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in run_dir.iterdir())
    for attempt in (["canary_cosine"], ["update_score"], ["lira", "--references", "0"]):
        assert cli.main(["audit", str(run_dir), "--attack", *attempt]) == 2
        assert f"do not apply to this run. {attempt[0]} (" in capsys.readouterr().err
    assert main("canary_cosine", [str(run_dir)]) == 2, "a script says it too"
    assert "do not apply to this run. canary_cosine (" in capsys.readouterr().err
    assert sorted(path.name for path in run_dir.iterdir()) == before


@pytest.mark.nightly
def test_runs_stand_beside_each_other(
    run_dir: Path, copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("attacks.audit.ATTACKS", FEW)
    found = audit(run_dir, capsys, "--attack", "loss", "--beside", str(copied), str(run_dir), str(copied))
    assert [row["label"] for row in found["sweep"]] == ["without privacy, run", "without privacy, copied"]
    assert all(row["accuracy"] is not None for row in found["sweep"])
    first, second, page = side_by_side(run_dir, copied)
    assert first.removeprefix("without privacy, run: ") == second.removeprefix("without privacy, copied: ")
    assert first.startswith("without privacy, run: accuracy ")
    assert page == f"audit: {run_dir / 'private' / 'audit.html'}"


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda audit, result: audit.update(rounds=1), "was audited after 1 rounds and has 2 now: audit it again"),
        (lambda audit, result: result.update(rounds=9), "was audited after 2 rounds and has 9 now: audit it again"),
    ],
)
def test_an_audit_of_another_state_does_not_stand_beside(
    run_dir: Path, copied: Path, damage: Any, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told, result = (json.loads((copied / name).read_text()) for name in ("private/audit.json", "result.json"))
    damage(told, result)
    (copied / "private" / "audit.json").write_text(json.dumps(told))
    (copied / "result.json").write_text(json.dumps(result))
    assert cli.main(["audit", str(run_dir), "--attack", "loss", "--beside", str(copied)]) == 2
    assert fault in capsys.readouterr().err


def test_damaged_audits_beside_are_refused_in_one_sentence(
    run_dir: Path, audited_once: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads((audited_once / "private" / "audit.json").read_text())
    other = shutil.copytree(audited_once, tmp_path / "damaged")
    for cells in ("x", None, [1], [{"auc": "x"}]):
        (other / "private" / "audit.json").write_text(json.dumps({**told, "cells": cells}))
        assert cli.main(["audit", str(run_dir), "--attack", "loss", "--beside", str(other)]) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert f"{other / 'private' / 'audit.json'} is damaged, or of another version (cells" in said
        assert said.endswith("): audit the run again")


def test_an_audit_beside_one_that_writes_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(run_dir):
        assert cli.main(["audit", str(run_dir), "--attack", "loss"]) == 2
    assert "in use by another process" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said_before_the_audit(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(**named: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("attacks.command.TemporaryFile", refused)
    monkeypatch.setattr("attacks.audit.audited", lambda *args, **named: pytest.fail("the audit was made"))
    assert cli.main(["audit", str(run_dir), "--attack", "loss"]) == 2
    assert "cannot be written (Permission denied)" in capsys.readouterr().err


def test_a_recording_of_another_run_is_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(run_dir, tmp_path / "other")
    max((other / "private" / "recording").glob("round-*")).unlink()
    assert cli.main(["audit", str(other), "--attack", "loss"]) == 2
    assert "is of another run, or lacks rounds" in capsys.readouterr().err


def kept(folder: Path, cells: list[dict[str, Any]], **result: Any) -> Path:
    """A run that was audited, as far as a row of a sweep reads it."""
    (folder / "private").mkdir(parents=True)
    (folder / "private" / "audit.json").write_text(json.dumps(samples.whole({"cells": cells})))
    (folder / "result.json").write_text(json.dumps({"accuracy": 0.8, "rounds": 2, **result}))
    return folder


def cell(attack: str, vantage: str, auc: float, lower: float | None, accounted: float | None) -> dict[str, Any]:
    return {
        **{"attack": attack, "vantage": vantage, "applicable": True, "auc": auc, "auc_interval": [auc, auc]},
        **{"epsilon_lower": lower, "epsilon_accounted": accounted},
    }


def test_a_row_says_of_which_attack_and_adversary_each_number_is(tmp_path: Path) -> None:
    cells = [
        cell("canary_cosine", "server", 0.62, 0.9, None),  # the guarantee does not cover the server
        cell("canary_cosine", "fellow_client", 0.60, 0.1, 8.0),
        cell("canary_likelihood", "fellow_client", 0.58, 0.809, 8.0),
    ]
    private = kept(tmp_path / "private", cells, epsilon=8.0, delta=1e-5)
    open_ = kept(tmp_path / "open", [cell("loss", "outsider", 0.9, None, None)])
    nothing = kept(
        tmp_path / "nothing", [{"attack": "loss", "vantage": "outsider", "applicable": False}], accuracy=None
    )
    first, second, third = swept(samples.audit({"cells": cells}), private, [open_, nothing])
    names = ("attack", "vantage", "auc", "epsilon_lower", "epsilon_lower_attack", "epsilon_lower_vantage", "delta")
    assert [getattr(first, name) for name in names] == [
        *("canary_cosine", "server", 0.62, 0.809, "canary_likelihood", "fellow_client", 1e-5)
    ]
    assert [getattr(second, name) for name in names] == ["loss", "outsider", 0.9, None, None, None, 0.0]
    assert [getattr(third, name) for name in names] == [None] * 6 + [0.0]
    titles = {name: ATTACKS[name].title for name in ("canary_cosine", "canary_likelihood")}
    assert sentence(first) == (
        "epsilon 8: accuracy 80.0%; AUC 0.62 on membership (.5 is a coin) by "
        f'"{titles["canary_cosine"]}" (server without secure aggregation); epsilon at least 0.80 at delta 1e-05 by '
        f'"{titles["canary_likelihood"]}" (fellow client)'
    )
    assert sentence(second).endswith('by "Loss threshold" (outsider); no lower bound on epsilon')
    assert sentence(third) == (
        "without privacy, nothing: no attack on membership gave a result; no lower bound on epsilon"
    )


def test_a_number_that_is_none_is_null_in_json(run_dir: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A model that gives one class all probability has an infinite phi; standard JSON has no Infinity."""
    odd = replace(samples.audit({"cells": [{"attack": "loss"}]}), accuracy=math.nan, delta=-math.inf)
    odd = replace(odd, cells=(replace(odd.cells[0], measured={"phi": math.inf, "ends": (1.0, math.inf)}),))
    monkeypatch.setattr("attacks.report.page.write", lambda audit, path: path)
    written(odd, tmp_path, ())
    shown = json.loads((tmp_path / "private" / "audit.json").read_text(), parse_constant=pytest.fail)
    assert (shown["accuracy"], shown["delta"]) == (None, None)
    assert shown["cells"][0]["measured"] == {"phi": None, "ends": [1.0, None]}
    monkeypatch.setattr("attacks.audit.audited", lambda *args, **named: Audited(odd))
    capsys.readouterr()
    assert main("loss", [str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == shown


def test_an_attack_alone_writes_nothing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "private" / "audit.json").unlink(missing_ok=True)
    assert main("loss", [str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {cell["attack"] for cell in found["cells"]} == {"loss"}
    assert not (run_dir / "private" / "audit.json").exists()


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        (["--attack", "lyra"], "'lyra'"),
        (["--references", "1"], "--references is 1"),
        (["--references", "-3"], "--references is -3"),
        (
            ["--attack", "loss", "--attack", "round_losses", "--references", "8"],
            "--references is 8, but no reference is trained for loss, round_losses: leave it out",
        ),
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
    noted = run_dir / "private" / "facts.json"
    facts = json.loads(noted.read_text())
    for name in ("data_digest", "audit"):
        noted.write_text(json.dumps({**facts, name: "another"}))
        assert cli.main(["audit", str(run_dir), "--attack", "loss"]) == 2
        assert f"{name} differs" in capsys.readouterr().err
    noted.write_text(json.dumps(facts))


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


@pytest.mark.usefixtures("undrawn")
def test_an_attack_that_fails_is_an_error_if_it_was_asked_for_and_else_a_cell(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(case: Any, settings: Any) -> Any:
        raise UsageError("the confidences are no numbers")

    monkeypatch.setattr("attacks.loss.run", fails)
    monkeypatch.setattr("attacks.audit.ATTACKS", FEW)
    assert cli.main(["audit", str(run_dir), "--attack", "loss"]) == 2
    assert "the confidences are no numbers" in capsys.readouterr().err
    found = audit(run_dir, capsys, "--references", "0")
    failed = [cell for cell in found["cells"] if cell["attack"] == "loss"]
    assert {cell["why"] for cell in failed} == {"it failed: the confidences are no numbers"}
    assert not any(cell["applicable"] for cell in failed)
    assert {cell["attack"] for cell in found["cells"] if cell["applicable"]} == {"round_losses"}, "the others are made"


@pytest.mark.usefixtures("undrawn")
def test_an_attack_asked_for_twice_is_made_once(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = audit(run_dir, capsys, "--attack", "loss", "--attack", "loss")
    assert len(found["attacks"]) == 1
    assert len(found["cells"]) == 4


def help_of(subcommand: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as ended:
        cli.main(["audit", subcommand, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_the_help_of_a_subcommand_is_one_screen_and_names_its_limit(
    subcommand: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(help_of(subcommand, 80, monkeypatch, capsys).splitlines()) <= 40
    shown = help_of(subcommand, 1000, monkeypatch, capsys)
    figures = {"model": "auc", "prepared": "epsilon", "extract": "extracted", "share": "gain", "lying": "rate"}
    if subcommand in figures:
        assert f"--fail-above {figures[subcommand]}=X" in shown
        assert f"exit with status {ABOVE_LIMIT} above X" in shown
    assert (f"{CANNOT_TELL} if " in shown) == (subcommand in ("model", "prepared", "lying"))


def test_the_help_names_every_default(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"from an update of each of at most {CLIENTS} clients" in help_of("share", 1000, monkeypatch, capsys)
    defaults = "at most 16, and 0 if these are fewer than 4; 16 where --attack names an attack with references; 0: none"
    assert defaults in help_of("run", 1000, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("runs/b", "run runs/b"),
        ("--attack loss runs/b --json", "run --attack loss runs/b --json"),
        ("./model --json", "run ./model --json"),
        ("run model", "run model"),
        ("model m --members a", "model m --members a"),
        ("prepare --help", "prepare --help"),
        ("--help", "--help"),
        ("", ""),
    ],
)
def test_a_run_alone_is_the_short_form(given: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert with_subcommand(given.split()) == meant.split()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--model m --members a --non-members b", "model m --members a --non-members b"),
        ("--members a --model=m --attribute town", "model m --members a --attribute town"),
        ("--model m --prepared p --exposure", "prepared m p --exposure"),
        ("--adapter d --model m --extract f --json", "extract m f --adapter d --json"),
        ("runs/b --share fever --fail-above gain=0.2", "share runs/b --fail-above gain=0.2 fever"),
        ("--lying run.toml --trials 8", "lying run.toml --trials 8"),
    ],
)
def test_a_call_of_the_earlier_version_works_and_names_the_new_one(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert with_subcommand(given.split()) == meant.split()
    said = capsys.readouterr().err
    assert said.startswith("secure-fed: this call is from an earlier version")
    assert said.endswith(f": secure-fed audit {meant}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--lying"],
        ["model", "m", "--members", "x"],
        ["model", "m", "--members", "x", "--non-members", "y", "--delta", "0.1"],
        ["model", "m", "--members", "x", "--non-members", "y", "--references", "4"],
        ["extract", "m"],
        ["extract", "m", "x", "--task", "tokens"],
        ["extract", "m", "x", "--members", "y"],
        ["prepared", "m", "p", "--task", "tokens"],
        ["share", "runs/b", "fever", "--adapter", "a"],
        ["lying", "run.toml", "--references", "4"],
        ["run", "runs/b", "--stride", "8"],
    ],
)
def test_an_argument_that_a_subcommand_does_not_have_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["audit", *arguments])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


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


@pytest.mark.nightly
def test_a_script_from_a_shell(run_dir: Path) -> None:
    command = [sys.executable, "-m", "attacks.loss", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attacks"][0]["name"] == "loss"
