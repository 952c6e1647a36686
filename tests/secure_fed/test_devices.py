"""Clients divided among devices, each with its own copy of the model; here every device is a name of the CPU."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.entropy import SeededEntropy
from secure_fed.config import RunConfig
from secure_fed.federation import Federation
from secure_fed.learning.training.common_passes.parallel import copies_on
from secure_fed.learning.training.common_passes.trainings import Ways, train_together
from secure_fed.learning.training.objective import Objective
from secure_fed.runs import assembly
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed.test_cohort import USUAL, Setting, require_equal, toy
from tests.secure_fed.test_cohort_public import SETTINGS, SIZES, texts, wide

CPU, ALSO = torch.device("cpu"), torch.device("cpu:0")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[Objective, int]:
    """The number of examples whose loss each objective computed."""
    counts: dict[Objective, int] = {}
    losses = Objective.losses

    def counted(own: Objective, batch: Any) -> Tensor:
        found = losses(own, batch)
        counts[own] = counts.get(own, 0) + len(found)
        return found

    monkeypatch.setattr(Objective, "losses", counted)
    return counts


def digest(tensors: Tensors) -> str:
    return hashlib.sha256(tensors.to_bytes()).hexdigest()


def trained(setting: Setting, rows: Sequence[int], *, public: bool, ways: Ways | None = None) -> list[str]:
    jobs = setting.jobs(SIZES, settings=SETTINGS)
    jobs = [replace(jobs[row], examples=texts(row, SIZES[row])) for row in rows]
    return [digest(one.after) for one in train_together(setting.objective, jobs, ways, public=public)]


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [1, 6])
def test_which_device_trains_a_client_moves_no_bit(devices: int, seen: dict[Objective, int]) -> None:
    setting = wide()
    alone = trained(setting, range(6), public=True)
    setting.objective.beside = copies_on(setting.objective, [ALSO] * devices)
    told: list[float] = []
    seen.clear()
    assert trained(setting, range(6), public=True, ways=Ways(told=told.append)) == alone
    assert trained(setting, [4, 2], public=True) == [alone[4], alone[2]]
    used = [setting.objective, *setting.objective.beside]
    assert [one in seen for one in used] == [True] * min(len(used), 6) + [False] * (len(used) - 6)
    assert told == sorted(told)
    assert told[-1] == len(SIZES)


@pytest.mark.nightly
def test_each_has_its_own_model(seen: dict[Objective, int]) -> None:
    """Each device has its own model: tensors that are loaded into one model do not change trainings on the others."""
    setting = wide()
    setting.objective.beside = copies_on(setting.objective, [ALSO])
    before = trained(setting, range(2), public=True)
    with torch.no_grad():
        for parameter in setting.objective.beside[0].model.parameters():
            parameter.mul_(1.5)
    setting.objective.forget_parameters()  # by hand, as between runs, and not by a pass
    moved = [one != other for one, other in zip(trained(setting, range(2), public=True), before, strict=True)]
    assert sum(moved) == 1


def test_results_are_those_of_one_after_the_other() -> None:
    setting, ways = wide(), Ways()
    setting.objective.beside = copies_on(setting.objective, [ALSO])
    together, alone = setting.both(replace(USUAL, optimizer="sgd", lr=0.1), ways)
    assert [trial.copies for trial in ways.trials.values()] == [True]
    require_equal(together, alone)


def test_a_model_whose_copy_works_on_the_first_one_stays_on_one_device(seen: dict[Objective, int]) -> None:
    setting = toy()
    setting.objective.beside = copies_on(setting.objective, [ALSO])
    together, alone = setting.both(replace(USUAL, optimizer="sgd", lr=0.1), Ways())
    assert set(seen).isdisjoint(setting.objective.beside)
    require_equal(together, alone)


@pytest.mark.nightly
def test_an_error_on_one_device_comes_out() -> None:
    setting = wide()
    setting.objective.beside = copies_on(setting.objective, [ALSO])
    trained(setting, range(2), public=True)
    setting.objective.beside[0].loss = lambda model, batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trained(setting, range(2), public=True)


@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_private_run_on_two_devices(
    unit: str,
    small_model: Path,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seen: dict[Objective, int],
) -> None:
    still = shutil.copytree(
        small_model, tmp_path / "still"
    )  # without dropout, which is drawn for each pass and not for each client
    known = json.loads((still / "config.json").read_text())
    known |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (still / "config.json").write_text(json.dumps(known))
    files = [f"model.name={still}", f"data.train={small_data}/train.jsonl", f"data.test={small_data}/test.jsonl"]

    def final(devices: list[torch.device]) -> str:
        monkeypatch.setattr(assembly, "find_devices", lambda names: devices)
        settings = [f"privacy.unit={unit}", "privacy.noise_multiplier=1", "privacy.delta=0.01", "evaluation.phantoms=0"]
        config = RunConfig.load(None, [*settings, *files, "federation.clients=4", "federation.rounds=2"])
        return digest(Federation(config, entropy=SeededEntropy(0)).run().state.tensors)

    alone = final([CPU])
    seen.clear()
    assert final([CPU, ALSO]) == alone
    assert sum(one.device == ALSO for one in seen) == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_round_on_two_gpus(small_model: Path, small_data: Path, seen: dict[Objective, int]) -> None:
    files = [f"model.name={small_model}", f"data.train={small_data}/train.jsonl", f"data.test={small_data}/test.jsonl"]
    config = RunConfig.load(None, [*files, "model.device=cuda:0,cuda:1", "federation.clients=4", "federation.rounds=1"])
    Federation(config).run()
    assert {objective.device for objective in seen} == {torch.device("cuda:0"), torch.device("cuda:1")}
