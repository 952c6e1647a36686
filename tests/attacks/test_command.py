"""`secure-fed audit`, the scripts of single attacks, and an attack in a user's file, as a user runs them."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attacks.adversary.case import Seen, Settings
from attacks.catalogue import ATTACKS, from_file
from attacks.cli import SUBCOMMANDS, with_subcommand
from attacks.command import REFERENCES, affordable, main, side_by_side, written
from attacks.evidence.verdict import main_of
from attacks.inference.share import CLIENTS
from attacks.options import ABOVE_LIMIT, CANNOT_TELL
from attacks.record import AttackAt
from attacks.report import curves
from attacks.report.display import Audited
from attacks.report.sweep import sentence, swept
from secure_fed.commands import cli
from secure_fed.errors import ConfigError, UsageError
from secure_fed.runs.store import locked
from secure_fed.tensors.tensors import Tensors
from tests.attacks import samples
from tests.attacks.refusals import Capsys, facts_of, refusals
from tests.golden import golden, refused

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


def audit(run_dir: Path, capsys: Capsys, *more: str) -> dict[str, Any]:
    return facts_of(["audit", run_dir, *more], capsys)


def private(folder: Path) -> dict[str, bytes]:
    """The files of the run's private folder, but for its recording."""
    return {one.name: one.read_bytes() for one in (folder / "private").iterdir() if one.is_file()}


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without plots, because plots take most of the time."""
    monkeypatch.setattr(curves, "drawing", lambda *args, **named: "<svg></svg>")


@pytest.mark.usefixtures("undrawn")
def test_an_audit_is_one_json_object_and_two_files(run_dir: Path, capsys: Capsys) -> None:
    found = audit(run_dir, capsys, "--references", "0")
    assert {cell["attack"] for cell in found["cells"]} == set(ATTACKS)
    for cell in found["cells"]:
        assert {"attack", "vantage", "applicable", "auc", "auc_interval", "epsilon_lower"} <= set(cell)
    assert found["epsilon_accounted"] is None
    assert json.loads((run_dir / "private" / "audit.json").read_text()) == found
    assert "Nothing was found" in (run_dir / "private" / "audit.html").read_text()
    assert_for_its_owner_alone(run_dir)


def assert_for_its_owner_alone(folder: Path) -> None:
    assert stat.S_IMODE((folder / "private").stat().st_mode) == 0o700
    assert {stat.S_IMODE((folder / "private" / name).stat().st_mode) for name in private(folder)} == {0o600}


@pytest.fixture(scope="module")
def audited_once(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in another folder, audited; tests only copy it."""
    other = shutil.copytree(run_dir, tmp_path_factory.mktemp("once") / "audited")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attacks.catalogue.ATTACKS", FEW)
        assert cli.main(["audit", str(other), "--json", "--references", "0"]) == 0
    return other


@pytest.fixture
def copied(audited_once: Path, tmp_path: Path) -> Path:
    """A copy of the audited run for one test."""
    return shutil.copytree(audited_once, tmp_path / "copied")


@pytest.mark.usefixtures("undrawn")
def test_some_attacks_alone_do_not_take_the_place_of_an_audit_by_all(
    copied: Path, train_rows: Path, capsys: Capsys
) -> None:
    """An attack named twice is made once; a script writes nothing. Texts are shown only when asked for."""
    before = private(copied)
    found = audit(copied, capsys, "--attack", "loss", "--attack", "round_losses", "--attack", "loss", "--show-texts")
    rows = [json.loads(line)["text"] for line in train_rows.read_text(encoding="utf-8").splitlines()]
    assert {one["text"] for one in found["exposed"]} <= set(rows)
    assert {one["text"] for one in json.loads(before["audit.json"])["exposed"]} == {None}
    assert found["asked_for"] == ["loss", "round_losses"]
    assert len(found["attacks"]) == 2
    assert len(found["cells"]) == 8
    after = private(copied)
    assert before.items() < after.items()
    assert after.keys() - before.keys() == {f"audit-loss-round_losses.{kind}" for kind in ("json", "html")}
    assert json.loads(after["audit-loss-round_losses.json"]) == found
    assert_for_its_owner_alone(copied)
    assert main("loss", [str(copied), "--json"]) == 0
    assert {cell["attack"] for cell in json.loads(capsys.readouterr().out)["cells"]} == {"loss"}
    assert private(copied) == after


@pytest.mark.usefixtures("undrawn")
def test_a_quick_audit_is_the_cheapest_attack_and_names_what_it_leaves_out(copied: Path, capsys: Capsys) -> None:
    assert cli.main(["audit", str(copied), "--quick"]) == 0
    found = json.loads(private(copied)["audit-loss.json"])
    assert (found["asked_for"], found["references"]) == (["loss"], 0)
    assert "Not tried: One-run audit of canaries; Likelihood ratio, online" in " ".join(capsys.readouterr().out.split())
    refusals(
        "command_quick",
        [["audit", copied, "--quick", *more] for more in (["--attack", "loss"], ["--references", 4])],
        capsys,
    )


def test_bad_input_is_one_sentence_and_nothing_is_written(run_dir: Path, tmp_path: Path, capsys: Capsys) -> None:
    """Also what was requested by name and does not apply."""
    before = private(run_dir)
    calls = (
        ["--attack", "canary_cosine"],
        ["--attack", "update_score"],
        ["--attack", "lira", "--references", "0"],
        ["--attack", "lyra"],
        ["--references", "1"],
        ["--references", "-3"],
        ["--attack", "loss", "--attack", "round_losses", "--references", "8"],
        ["--attack", "loss", "--beside", "nowhere"],
    )
    refusals("command", [*(["audit", run_dir, *call] for call in calls), ["audit", tmp_path]], capsys)
    assert main("canary_cosine", [str(run_dir)]) == 2, "a script says it too"
    assert "do not apply to this run. canary_cosine (" in capsys.readouterr().err
    assert private(run_dir) == before


def test_a_damaged_run_is_refused(run_dir: Path, copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    def call(*more: Any) -> list[Any]:
        return ["audit", copied, "--attack", "loss", *more]

    def damaged(name: str, *changes: dict[str, Any], whole: bool = False, beside: bool = False) -> Iterator[list[Any]]:
        """A call for each change of one file, which is restored after it. whole: a change replaces the content."""
        file = copied / name
        kept = file.read_text()
        for change in changes:
            file.write_text(json.dumps(change if whole else json.loads(kept) | change))
            yield ["audit", run_dir, "--attack", "loss", "--beside", copied] if beside else call()
        file.write_text(kept)

    def calls() -> Iterator[list[Any]]:
        yield from damaged("private/facts.json", {"data_digest": "another"}, {"audit": "another"})
        results = ({}, {"seconds": 1.0, "unit": "client"}, {"seconds": "long", "unit": "none"})
        yield from damaged("result.json", *results, whole=True)
        yield from damaged("result.json", {"rounds": 9}, beside=True)
        cells = ("x", None, [1], [{"auc": "x"}])
        yield from damaged("private/audit.json", {"rounds": 1}, *({"cells": one} for one in cells), beside=True)
        with locked(copied):
            yield call()
        with monkeypatch.context() as patch:
            patch.setattr("attacks.command.TemporaryFile", forbidden)
            patch.setattr("attacks.audit.audited", lambda *args, **named: pytest.fail("the audit was made"))
            yield call()
        with monkeypatch.context() as patch:
            patch.setattr("attacks.loss.run", fails)
            yield call()
        (copied / "result.json").rename(copied / "result")
        yield call()
        (copied / "result").rename(copied / "result.json")
        max((copied / "private" / "recording").glob("round-*")).unlink()
        yield call()

    refusals("command_damaged", calls(), capsys)


def forbidden(**named: Any) -> Any:
    raise PermissionError(13, "Permission denied")


def fails(case: Any, settings: Any) -> Any:
    raise UsageError("the confidences are no numbers")


@pytest.mark.nightly
def test_runs_stand_side_by_side(run_dir: Path, copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.setattr("attacks.catalogue.ATTACKS", FEW)
    found = audit(run_dir, capsys, "--attack", "loss", "--beside", str(copied), str(run_dir), str(copied))
    assert [row["label"] for row in found["sweep"]] == ["without privacy, run", "without privacy, copied"]
    assert all(row["accuracy"] is not None for row in found["sweep"])
    first, second, page = side_by_side(run_dir, copied)
    assert first.removeprefix("without privacy, run: ") == second.removeprefix("without privacy, copied: ")
    assert first.startswith("without privacy, run: accuracy ")
    assert page == f"audit: {run_dir / 'private' / 'audit.html'}"


def kept(folder: Path, cells: list[dict[str, Any]], **result: Any) -> Path:
    """A run that was audited, as far as a row of a sweep reads it."""
    (folder / "private").mkdir(parents=True)
    (folder / "private" / "audit.json").write_text(json.dumps(samples.whole({"cells": cells})))
    (folder / "result.json").write_text(json.dumps({"accuracy": 0.8, "rounds": 2, **result}))
    return folder


def cell(attack: str, vantage: str, auc: float, lower: float | None, accounted: float | None) -> dict[str, Any]:
    return {
        **{"attack": attack, "vantage": vantage, "applicable": True, "auc": auc, "auc_interval": [auc - 0.1, auc]},
        **{"epsilon_lower": lower, "epsilon_accounted": accounted},
    }


def test_a_row_says_of_which_attack_and_adversary_each_number_is(tmp_path: Path) -> None:
    cells = [
        cell("canary_cosine", "server", 0.62, 0.9, None),  # the guarantee does not cover the server
        cell("canary_cosine", "fellow_client", 0.60, 0.1, 8.0),
        cell("canary_likelihood", "fellow_client", 0.58, 0.809, 8.0),
    ]
    none = {"attack": "loss", "vantage": "outsider", "applicable": False}
    found = swept(
        samples.audit({"cells": cells}),
        kept(tmp_path / "private", cells, epsilon=8.0, delta=1e-5),
        [
            kept(tmp_path / "open", [cell("loss", "outsider", 0.9, None, None)]),
            kept(tmp_path / "nothing", [none], accuracy=None),
        ],
    )
    names = ("attack", "vantage", "auc", "epsilon_lower", "epsilon_lower_attack", "epsilon_lower_vantage", "delta")
    assert [[getattr(one, name) for name in names] for one in found] == [
        ["canary_cosine", "server", 0.62, 0.809, "canary_likelihood", "fellow_client", 1e-5],
        ["loss", "outsider", 0.9, None, None, None, 0.0],
        [*[None] * 6, 0.0],
    ]
    assert found[0].auc_interval == (0.52, 0.62), "that of its cell, so that one AUC has one interval"
    golden("attacks/sweep.txt", "".join(f"{sentence(one)}\n" for one in found))


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


@pytest.mark.usefixtures("undrawn")
def test_an_attack_that_fails_is_a_cell(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.setattr("attacks.loss.run", fails)
    monkeypatch.setattr("attacks.catalogue.ATTACKS", FEW)
    found = audit(run_dir, capsys, "--references", "0")
    failed = [cell for cell in found["cells"] if cell["attack"] == "loss"]
    assert {cell["why"] for cell in failed} == {"it failed: the confidences are no numbers"}
    assert not any(cell["applicable"] for cell in failed)
    assert {cell["attack"] for cell in found["cells"] if cell["applicable"]} == {"round_losses"}, "the others are made"


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_help_is_one_screen(subcommand: str, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    def shown(width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        with pytest.raises(SystemExit) as ended:
            cli.main(["audit", subcommand, "--help"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    assert len(shown(80).splitlines()) <= 40
    whole = shown(1000)
    figures = {"model": "auc", "prepared": "epsilon", "extract": "extracted", "share": "gain", "lying": "rate"}
    if subcommand in figures:
        assert f"--fail-above {figures[subcommand]}=X" in whole
        assert f"exit with status {ABOVE_LIMIT} above X" in whole
    assert (f"{CANNOT_TELL} if " in whole) == (subcommand in ("model", "prepared", "lying"))
    assert (f"from an update of each of at most {CLIENTS} clients" in whole) == (subcommand == "share")
    defaults = "at most 16, and 0 if these are fewer than 4; 16 where --attack names an attack with references; 0: none"
    assert (defaults in whole) == (subcommand == "run")


@pytest.mark.parametrize(
    ("given", "meant", "earlier"),
    [
        ("runs/b", "run runs/b", False),
        ("--attack loss runs/b --json", "run --attack loss runs/b --json", False),
        ("./model --json", "run ./model --json", False),
        ("run model", "run model", False),
        ("model m --members a", "model m --members a", False),
        ("prepare --help", "prepare --help", False),
        ("--help", "--help", False),
        ("", "", False),
        ("--model m --members a --non-members b", "model m --members a --non-members b", True),
        ("--members a --model=m --attribute town", "model m --members a --attribute town", True),
        ("--model m --prepared p --exposure", "prepared m p --exposure", True),
        ("--adapter d --model m --extract f --json", "extract m f --adapter d --json", True),
        ("runs/b --share fever --fail-above gain=0.2", "share runs/b --fail-above gain=0.2 fever", True),
        ("--lying run.toml --trials 8", "lying run.toml --trials 8", True),
    ],
)
def test_the_short_form_and_earlier_calls_work(given: str, meant: str, earlier: bool, capsys: Capsys) -> None:
    assert with_subcommand(given.split()) == meant.split()
    told = f"secure-fed: this call is from an earlier version, and the next one will not know it: secure-fed audit {meant}\n"
    assert capsys.readouterr().err == (told if earlier else "")


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
def test_an_argument_that_a_subcommand_does_not_have_is_refused(arguments: list[str], capsys: Capsys) -> None:
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
def test_every_attack_is_a_script(module: str, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert not ended.value.code
    assert f"python -m {module}" in capsys.readouterr().out


# An attack in a user's file: the page's example runs, and a wrong file is refused in one sentence.


PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_an_attack.md"


@pytest.fixture
def own_attack(tmp_path: Path) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "my_attack.py"
    path.write_text(code, encoding="utf-8")
    return path


@pytest.mark.usefixtures("undrawn")
def test_the_attack_of_the_page_is_made_beside_a_listed_one(own_attack: Path, copied: Path, capsys: Capsys) -> None:
    found = audit(copied, capsys, "--attack", str(own_attack), "--attack", "loss")
    assert found["asked_for"] == ["calibrated_loss", "loss"]
    assert found["main"]["attack"] == "loss"
    cells = {cell["attack"]: cell for cell in found["cells"] if cell["vantage"] == "outsider"}
    assert 0 < cells["calibrated_loss"]["auc"] < 1
    assert cells["calibrated_loss"]["auc"] != cells["loss"]["auc"]
    page = (copied / "private" / "audit-calibrated_loss-loss.html").read_text(encoding="utf-8")
    assert "Loss, calibrated by the initial model" in page


def test_a_wrong_file_is_refused(own_attack: Path, run_dir: Path, tmp_path: Path, capsys: Capsys) -> None:
    """The page is short."""
    text = own_attack.read_text(encoding="utf-8")
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
        own_attack.write_text(text.replace(found, instead), encoding="utf-8")
        with refused(ConfigError):
            from_file(own_attack)
    own_attack.write_text(text.replace('"""Calibrated', '(("Calibrated'), encoding="utf-8")
    with refused(ConfigError, hide=r"(?<=SyntaxError).*"):  # Python's own words
        from_file(own_attack)
    refusals("own_attack", [["audit", run_dir, "--attack", tmp_path / "none.py"]], capsys)


def found_by(own_attack: Path, body: str) -> Any:
    """What an attack of this body finds, in a case of three units; the file is named from where it lies."""
    head, _ = own_attack.read_text(encoding="utf-8").split("    before = ")
    own_attack.write_text(f"{head}    {body}\n", encoding="utf-8")
    run = from_file(Path(own_attack.name)).function
    assert run is not None
    case: Any = SimpleNamespace(units=(1, 2, 3), seen=Seen("outsider", Tensors({"w": torch.zeros(2)})))
    return run(case, Settings())


def test_an_attack_that_fails_or_finds_nothing_is_one_sentence(
    own_attack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may do as it likes with a copy of a tensor."""
    monkeypatch.chdir(own_attack.parent)
    text = own_attack.read_text(encoding="utf-8")
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
        own_attack.write_text(text, encoding="utf-8")
        with refused(ConfigError):
            found_by(own_attack, body)
    own_attack.write_text(text, encoding="utf-8")
    copied = "case.seen.final.tensor('w').clone().fill_(7.0); return Finding(measured={'a': 1})"
    assert found_by(own_attack, copied).measured == {"a": 1}


def test_an_attack_of_ones_own_is_never_the_main_one_beside_a_listed_one() -> None:
    scored = [AttackAt("aaa", "outsider"), AttackAt("label_counts", "server")]
    assert main_of(scored, ["outsider", "server"]) == scored[1]
    assert main_of(scored[:1], ["outsider", "server"]) == scored[0]
