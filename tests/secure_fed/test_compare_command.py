"""`secure-fed compare`: its output, its files, its errors and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from secure_fed.report import progress
from tests.cells import every
from tests.secure_fed.conftest import Ran, Refuses

pytestmark = pytest.mark.usefixtures("never_drawn")


@pytest.fixture
def told(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Runs `secure-fed compare`."""
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: ran("compare", *arguments)


@pytest.fixture
def configs(small_model: Path, small_data: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two configuration files, of one round each."""
    names = [f"model.name = {json.dumps(str(small_model))}", f"data.name = {json.dumps(str(small_data))}"]
    numbers = ["federation.clients = 4", "federation.cohort = 2", "federation.rounds = 1", "training.steps = 1"]
    files = tmp_path / "ours.toml", tmp_path / "theirs.toml"
    for file, method in zip(files, ("fra_lora", "fedlora"), strict=True):
        file.write_text("\n".join([*names, *numbers, f'method.name = "{method}"']))
    return files


def test_a_comparison_is_shown_and_written(told: Ran, configs: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, shown, progressed = told(*configs, "--seeds", "3,5", "--out", out, "--target", "0.01")
    assert status == 0
    lines = {line.split("│")[1].strip(): line for line in shown.splitlines() if line.startswith("│")}
    assert {"accuracy", "up a round", "rounds to 1.0 %", "epsilon of all seeds together", "membership AUC"} <= set(
        lines
    )
    assert lines["rounds to 1.0 %"].count("2 of 2 reached it") == 2
    assert max(len(line) for line in shown.splitlines() if "│" in line) <= 100
    assert f"table: {out / 'compare.md'}" in shown
    assert "run 1 of 4: ours (fra_lora), seed 3" in progressed
    assert "run 4 of 4: theirs (fedlora), seed 5" in progressed
    assert "round 1/1" in progressed
    names = {path.relative_to(out).as_posix() for path in out.glob("*/*")}
    assert names == {f"{name}/seed-{seed}" for name in ("ours", "theirs") for seed in (3, 5)}
    assert (out / "compare.md").read_text(encoding="utf-8").count("2 of 2 reached it") == 2

    status, again, progressed = told(*configs, "--seeds", "3,5", "--out", out, "--target", "0.01", "--json")
    facts = json.loads(again)
    assert (status, progressed, again.count("\n")) == (0, "", 1), "finished runs are read"
    assert facts["out"] == str(out)
    assert [row["name"] for row in facts["rows"]] == ["ours", "theirs"]
    assert facts["rows"][0]["seeds"] == [3, 5]
    assert facts["rows"][0]["rounds_to_target"] == 1.0

    status, _, error = told(*configs, "--seeds", "3,5", "--out", out, "--set", "training.lr=0.5")
    assert status == 2
    assert "training.lr: 0.5, not 0.005" in error


def test_a_comparison_that_is_interrupted_says_how_to_go_on(
    told: Ran, configs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, ended = tmp_path / "out", []
    usual = progress.ConsoleProgress.on_round_end

    def interrupting(self: Any, record: Any, state: Any) -> None:
        usual(self, record, state)
        ended.append(record)
        if len(ended) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.ConsoleProgress, "on_round_end", interrupting)
    status, _, error = told(*configs, "--seeds", "0", "--out", out)
    assert status == 130
    assert f"the same command with --out {out} goes on" in error
    status, shown, error = told(*configs, "--seeds", "0", "--out", out, "--json")
    assert (status, len(ended)) == (0, 2), "both rounds had been saved"
    assert [row["reached"] for row in json.loads(shown)["rows"]] == [0, 0]


def test_without_a_place_it_goes_under_runs_and_states_the_cost_before_and_after(
    told: Ran, configs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    private = [f"privacy.{setting}" for setting in ("unit=client", "noise_multiplier=2", "epsilon=3", "delta=1e-3")]
    chosen = [f"--set={one}" for one in ("federation.sampling=poisson", "evaluation.dummies=0", *private)]
    status, shown, progressed = told(configs[0], "--seeds", "0", "--json", *chosen)
    assert status == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.endswith("-compare")
    said = json.loads(shown)
    assert said["out"] == str(Path("runs") / made.name)
    (total,) = said["together"]
    assert (total["runs"], total["seeds"], total["configurations"], total["delta"]) == (1, [0], ["ours"], 1e-3)
    assert total["epsilon"] == total["epsilon_basic"] == said["rows"][0]["epsilon_one_run"]
    assert "1 private run will cost at most epsilon 3 (delta 0.001)" in progressed.splitlines()[0]


REFUSED = {
    "--seeds": ("0,x", "", "0,0", "-1"),
    "--target": ("80",),
    "--set": ("method.rank=x", "federation.seed=7", "method.sketch=3"),
}


@every("option", [f"{name}={value}" for name, values in REFUSED.items() for value in values])
def test_refusals(refuses: Refuses, configs: tuple[Path, Path], option: str) -> None:
    out = configs[0].parent / "out"
    refuses("compare", *configs, option, "--out", out)
    assert not out.exists()


def test_two_files_of_one_name_one_that_is_none_and_a_spent_budget(
    refuses: Refuses, configs: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / "ours.toml"
    twin.write_text(configs[1].read_text())
    refuses("compare", *configs, twin, "--out", tmp_path / "out")
    refuses("compare", configs[0], tmp_path / "none.toml", "--out", tmp_path / "out")
    settings = ["unit=client", "noise_multiplier=0.5", "epsilon=0.5", "delta=1e-3"]
    options = [f"--set=privacy.{setting}" for setting in settings]
    hidden = r"cost epsilon [\d.]+"
    refuses("compare", configs[0], *options, "--seeds", "0", "--out", tmp_path / "out", status=3, hide=hidden)
    assert not (tmp_path / "out").exists()
