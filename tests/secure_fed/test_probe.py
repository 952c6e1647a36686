"""The probe of a private run: its figures, its verdict, the refusal of hopeless runs that others pay for, and its reports."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from privacy.ledger import Ledger
from secure_fed.commands.cli import main
from secure_fed.errors import ConfigError
from secure_fed.export.trained import load_run
from secure_fed.learning.data.holdout import HELD_OUT
from secure_fed.report.page import write_report
from secure_fed.report.terminal import rows
from secure_fed.runs.probe import Probe, probe
from tests.cells import every
from tests.contracts.runs import KilledAfter, KilledError
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.private_toys import NOISE, TARGET, charges, federation

LOUD = {**NOISE, "privacy.noise_multiplier": 3000.0, "federation.rounds": 1}
QUIET = {**NOISE, "privacy.noise_multiplier": 0.01, "federation.rounds": 1}


def shared(path: Path) -> dict[str, Any]:
    Ledger.create(path, data_set="wards", epsilon=1e9, delta=0.9)
    return {"privacy.ledger": str(path)}


def test_chance_is_the_loss_of_equal_scores_and_the_start_is_the_run_s() -> None:
    built = federation(QUIET)
    found = probe(built.assembly)
    assert found is not None
    assert found.chance == pytest.approx(math.log(3))
    test = toys.examples(99, 20)
    scores = toys.model()(torch.stack([item["x"] for item in test]))
    losses = torch.nn.functional.cross_entropy(scores, torch.tensor([item["labels"] for item in test]))
    assert found.start == pytest.approx(losses.item(), rel=1e-5)
    assert found.noised == pytest.approx(found.start, rel=0.05)
    assert not found.hopeless
    loaded = dict(built.assembly.objective.model.named_parameters())
    initial = built.assembly.initial.tensors
    assert all(torch.equal(loaded[name], initial.tensor(name)) for name in initial), "the start is back in the model"


def test_without_a_guarantee_there_is_no_probe() -> None:
    built = toys.federation()
    assert probe(built.assembly) is None
    assert built.run().summary["noise_alone"] is None


@every(
    ("chance", "start", "noised", "full", "hopeless"),
    [
        (10.8, 1.762, 1.8, None, False),  # SmolLM2, 60 clients a round
        (10.8, 1.762, 1.8, 40.0, False),  # the same, whose server shortens its steps, and so loses little
        (10.8, 1.762, 10.9, None, True),
        (10.8, 1.762, math.inf, None, True),
        (10.8, 10.5, 11.0, None, False),  # a start at chance knows nothing that noise could take
        (10.8, 10.5, 11.0, 400.0, True),
        (10.8, 9.0, 9.8, None, False),  # a start that is hardly better loses hardly anything
        (None, 1.0, 500.0, None, False),  # an unknown chance is never reached
        (None, 1.0, math.inf, None, True),
    ],
)
def test_noise_is_hopeless_where_it_takes_the_model_to_chance(
    chance: float | None, start: float, noised: float, full: float | None, hopeless: bool
) -> None:
    assert Probe("client", 32, True, chance, start, noised, full).hopeless is hopeless


@pytest.mark.parametrize("name", HELD_OUT.values())
def test_rows_held_out_of_private_ones_are_not_read(name: str) -> None:
    """A loss on them would be a release without noise. The toy's numbers cannot be made up, so there is no probe."""

    class Closed(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("read")

    assembly = federation(LOUD).assembly
    facts = {**assembly.problem.facts, "test": {"from": name, "rows": None}}
    problem = replace(assembly.problem, facts=facts, test=Closed(assembly.problem.test))
    assert probe(replace(assembly, problem=problem)) is None


def test_a_shared_ledger_pays_for_no_hopeless_run(tmp_path: Path) -> None:
    paid = shared(tmp_path / "wards.sqlite")
    with refused(ConfigError, "privacy.even_if_hopeless", worded=False):
        federation({**LOUD, **paid}).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not [row for row in Ledger.open(tmp_path / "wards.sqlite").rows() if row.kind == "reserve"]
    federation({**QUIET, **paid}).run(tmp_path / "quiet")
    done = federation({**LOUD, **paid, "privacy.even_if_hopeless": True}).run(tmp_path / "run")
    assert done.summary["noise_alone"]["hopeless"]
    assert len(charges(tmp_path / "wards.sqlite")) == 2


def listening(told: list[Any], run: Path) -> Any:
    def on_probe(figures: dict[str, Any]) -> None:
        assert not run.exists()
        told.append(figures)

    return SimpleNamespace(on_probe=on_probe)


@pytest.mark.usefixtures("never_drawn")
def test_a_run_with_its_own_ledger_goes_on_and_says_so_everywhere(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    built = federation(LOUD, callbacks=[listening(told, tmp_path / "run")])
    result = built.run(tmp_path / "run")
    found = result.summary["noise_alone"]
    assert told == [found]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["noise_alone"] == found
    shown = dict(rows(result.whole))
    alone, reached = f"from {found['start']:.4g} before training to {found['noised']:.4g}", result.summary["loss"]
    assert alone in shown["  noise alone"]
    assert f"this run ended at {reached:.4g}" in shown["  noise alone"]
    assert "privacy.unit = 'example'" in shown["  HOPELESS"]
    page = write_report(tmp_path / "run").read_text()
    assert f"takes the loss {alone}" in page
    assert f"this run ended at {reached:.4g}" in page
    built.export(result.state, tmp_path / "export")
    assert "HOPELESS" in (tmp_path / "export" / "README.md").read_text()


def test_a_resumed_run_keeps_the_figures_of_its_start(tmp_path: Path) -> None:
    settings = {**TARGET, "federation.rounds": 2}
    with pytest.raises(KilledError):
        federation(settings, callbacks=[KilledAfter(1)]).run(tmp_path / "run")
    noted = json.loads((tmp_path / "run" / "run.json").read_text())["noise_alone"]
    told: list[Any] = []
    resumed = federation(settings, callbacks=[listening(told, tmp_path)]).run(tmp_path / "run", resume=True)
    assert resumed.summary["noise_alone"] == noted
    assert not told


def test_the_command_line_says_the_figures_first_and_refuses_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small_model: Path, small_data: Path
) -> None:
    """Without a ledger of others it only warns."""
    Ledger.create(tmp_path / "wards.sqlite", data_set="notes", epsilon=1e9, delta=0.9)
    settings = {**LOUD, "privacy.delta": 1e-3, "training.steps": 1}
    settings |= {"model.name": small_model, "data.name": small_data, "data.client": "site"}
    run = [f"--set={name}={value}" for name, value in settings.items()]
    run = ["train", *run, "--out", str(tmp_path / "run")]
    assert main([*run, f"--set=privacy.ledger={tmp_path / 'wards.sqlite'}"]) == 2
    errors = capsys.readouterr().err
    assert "this noise alone takes the loss from" in errors
    assert "privacy.even_if_hopeless" in errors
    assert not (tmp_path / "run").exists()
    assert main(run) == 0
    printed = capsys.readouterr()
    assert "warning: the noise alone takes the model to chance" in printed.err
    assert "noise alone" in printed.out
    assert "noise alone" in load_run(tmp_path / "run").card.facts
