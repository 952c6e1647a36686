"""The noise that a run would end with, and the probe that measures its harm before anything is paid for.

The noise: its standard deviation by hand, and that of runs whose clients send nothing. The probe: its figures, its verdict, the
refusal of hopeless runs that others pay for, and its reports.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from privacy.correlation import square_root
from privacy.entropy import SeededEntropy, Stream
from privacy.ledger import Ledger
from secure_fed.commands.cli import main
from secure_fed.errors import ConfigError
from secure_fed.export.trained import load_run
from secure_fed.federation import Federation
from secure_fed.learning.data.holdout import HELD_OUT
from secure_fed.report.page import write_report
from secure_fed.report.terminal import rows
from secure_fed.rounds.noise_alone import NoiseAlone, StepNoise
from secure_fed.runs.hopeless import Probe, probe
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.contracts.runs import KilledAfter, KilledError
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.private_toys import CLIENT, EXAMPLE, NOISE, TARGET, charges, federation

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
    settings = {**LOUD, "privacy.delta": 1e-3, "training.steps": 1, "training.together": 1}
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


ROUNDS, C, Z = 6, 0.1, 2.0
PLAIN = {
    **CLIENT,
    "privacy.noise_multiplier": Z,
    "method.name": "fedlora",
    "federation.rounds": ROUNDS,
    "federation.cohort": 3,
    "federation.server_lr": 0.5,
}


class Wide(nn.Module):
    """The toy's layers, and one that is averaged as it is: wide enough to show the spread of its noise to a few per cent."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 64)
        self.value = nn.Linear(64, 64)
        self.middle = nn.Linear(64, 64)
        self.classifier = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.middle(self.value(self.query(x).tanh()).tanh()).tanh())
        return scores


def wide(settings: Mapping[str, Any], **own: Any) -> Federation:
    return federation({"method.modules_to_save": ["middle", "classifier"], **settings}, model=Wide(), **own)


def alone(built: Federation, steps: StepNoise | None = None) -> NoiseAlone:
    assembly = built.assembly
    return NoiseAlone(assembly.server, assembly.initial, built.config.federation.rounds, steps)


def moved(built: Federation, tensors: Tensors) -> float:
    """The standard deviation of the noise on each number of the layer that is averaged as it is."""
    start = built.assembly.initial.tensors
    return float((tensors.tensor("middle.weight") - start.tensor("middle.weight")).std())


# The standard deviation on each number, in units of the clip norm times the noise multiplier and the server's rate of 0.5.
MOMENTUM = np.array([[0.5 ** (t - s) if s <= t else 0.0 for s in range(ROUNDS)] for t in range(ROUNDS)])
LAST_MODELS = np.linalg.norm((np.tril(np.ones((ROUNDS, ROUNDS))) @ MOMENTUM)[-3:].mean(0)) / 3
MOVING = {"federation.server_optimizer": "momentum", "federation.server_momentum": 0.5, "federation.average_last": 3}
BANDED = {"federation.sampling": "schedule", "privacy.correlation": "banded", "privacy.band": 2, "federation.cohort": 1}
FORMULAS: dict[str, tuple[dict[str, Any], float]] = {
    "the sum of all rounds": ({}, math.sqrt(ROUNDS) / 3),
    "momentum, and the mean of the last models": (MOVING, LAST_MODELS),
    "correlated noise cancels": (BANDED, square_root(2).errors(ROUNDS)[-1]),
    "noise of the clients": (
        {"privacy.noise": "local", "federation.sampling": "schedule"},
        math.sqrt(ROUNDS) / math.sqrt(3),
    ),
    "many rounds, by fewer with the same sum": ({"federation.rounds": 500}, math.sqrt(500) / 3),
}


@pytest.mark.parametrize("case", FORMULAS)
def test_the_noise_is_that_of_the_whole_run(case: str) -> None:
    settings, factor = FORMULAS[case]
    built = wide({**PLAIN, **settings})
    protection = built.assembly.protection
    found, mechanism = alone(built), protection.plan if protection.correlated is not None else protection.mechanism
    assert mechanism is not None
    expected = 0.5 * mechanism.noise_multiplier * C * factor
    assert found.made < 500
    assert moved(built, found.ended().tensors) == pytest.approx(expected, rel=0.04)
    if not settings:
        assert moved(built, found.ended(times=0.1).tensors) == pytest.approx(0.1 * expected, rel=0.04)
        assert moved(built, found.ended(rate=1.0).tensors) == pytest.approx(2 * expected, rel=0.04)


@pytest.mark.parametrize(
    "settings",
    [
        {"method.name": "fra_lora", "method.denoise": "tangent"},
        {"method.name": "ffa_lora"},
        {"method.name": "fedlora", "federation.server_optimizer": "adam"},
    ],
    ids=lambda settings: str(next(iter(settings.values()))),
)
def test_a_method_gets_the_noise_of_its_own_run(settings: dict[str, Any]) -> None:
    """Clients whose rate is next to nothing send next to nothing: the run ends with its noise alone."""
    still = {**PLAIN, **settings, "training.lr": 1e-12, "training.optimizer": "sgd", "method.modules_to_save": []}
    if settings.get("federation.server_optimizer") == "adam":
        still["federation.server_lr"] = 0.01
    built = federation({**still, "method.rank": 2}, seed=3, model=Wide())
    start, real = built.assembly.initial.tensors, built.run().state.tensors
    found = alone(built).ended().tensors
    assert not toys.same(real, found), "another source of noise"

    def shift(tensors: Tensors) -> float:
        """Of the adapted matrices: their product shows what factors hide."""
        pairs = [(name, name.replace("lora_B", "lora_A")) for name in tensors if "lora_B" in name]
        products = ([one.tensor(b) @ one.tensor(a) for b, a in pairs] for one in (tensors, start))
        return math.hypot(*(float((ours - before).norm()) for ours, before in zip(*products, strict=True)))

    assert shift(found) == pytest.approx(shift(real), rel=0.2)


@pytest.mark.parametrize("optimizer", chosen(["sgd", "adamw"], ["sgd"]))
def test_noise_of_steps_goes_through_the_local_optimizer(optimizer: str) -> None:
    settings = {**EXAMPLE, "privacy.noise_multiplier": 4.0, "federation.rounds": 2, "method.name": "fedlora"}
    settings |= {"training.optimizer": optimizer, "training.lr": 0.05, "training.steps": 5}

    def silent(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        scores: Tensor = model(batch["x"])
        return 0.0 * scores.sum(1)

    sizes = (8, 8)
    built = wide(settings, sizes=sizes, seed=1, loss=silent, metrics=lambda model, batches: {"loss": 0.0})
    problem = built.assembly.problem
    steps = StepNoise(built.config.training, 2, problem.units, problem.last)
    found = moved(built, alone(built, steps).ended().tensors)
    real = moved(built, built.run().state.tensors)
    if optimizer == "sgd":
        assert real == pytest.approx(0.05 * 4.0 * C / 4 * math.sqrt(5 * 2 / len(sizes)), rel=0.05)
        assert found == pytest.approx(real, rel=0.05)
    else:  # the probe has the longest gradient beside the noise, of which there is little here
        assert 0.7 * real < found < 1.05 * real


def test_little_noise_in_steps_moves_adamw_little() -> None:
    """AdamW divides by the size of a gradient: noise without any gradient would move it equally far, however little it is."""
    ends = []
    for z in (0.01, 1.0):
        built = wide({**EXAMPLE, "privacy.noise_multiplier": z, "training.steps": 4, "method.name": "fedlora"})
        problem = built.assembly.problem
        steps = StepNoise(built.config.training, built.config.federation.rounds, problem.units, problem.last)
        ends.append(moved(built, alone(built, steps).ended().tensors))
    assert ends[0] < 0.1 * ends[1]


def test_none_of_its_numbers_is_a_number_of_the_released_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same at every call, and takes nothing from the run's source of noise."""
    built = wide(PLAIN)
    real = built.assembly.protection.entropy
    asked: list[tuple[str | int, ...]] = []

    def noted(self: Any, *label: str | int) -> Stream:
        asked.append(label)
        return SeededEntropy(0).stream(*label)

    monkeypatch.setattr(type(real), "stream", noted)
    first, again = (alone(built).ended().tensors for _ in range(2))
    assert toys.same(first, again)
    assert not asked
