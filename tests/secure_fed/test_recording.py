"""Recordings of messages for audits: made only on request, readable only by the owner, equal to the messages."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from secure_fed.errors import ConfigError, RunDirectoryError
from secure_fed.federation import Federation
from secure_fed.methods.method import State
from secure_fed.runs import recording
from secure_fed.runs.store import read_checkpoint
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed import private_toys, toys

UPDATES = {"evaluation.record": "updates"}
MASKED = {"secure_aggregation.enabled": True, "secure_aggregation.dropout": 0.0, "secure_aggregation.corrupt": 0.0}


def recorded(tmp_path: Path, settings: dict[str, Any], **own: Any) -> tuple[recording.Recorded, Federation, Any]:
    federation = toys.federation(settings, **own)
    result = federation.run(tmp_path / "run")
    found = recording.read(tmp_path / "run")
    assert found is not None
    return found, federation, result


def test_nothing_is_kept_unless_asked(tmp_path: Path) -> None:
    toys.federation().run(tmp_path / "run")
    assert not (tmp_path / "run" / "private" / recording.FOLDER).exists()
    assert recording.read(tmp_path / "run") is None


@pytest.mark.parametrize("method", ["fedlora", "fra_lora"])
def test_updates_and_states_are_what_travelled(tmp_path: Path, method: str) -> None:
    found, federation, result = recorded(tmp_path, {**UPDATES, "method.name": method})
    assert sorted(found.states) == [0, 1, 2, 3]
    assert same(found.states[0], federation.assembly.initial.tensors)
    assert same(found.states[3], result.state.tensors)
    assert {(one.round, one.client) for one in found.updates} == {
        (round_, name) for round_ in range(3) for name in federation.assembly.problem.names
    }
    assert found.lr == {0: 0.05, 1: 0.05, 2: 0.05}
    if method == "fedlora":
        first = [one.contribution for one in found.updates if one.round == 0]
        mean = (first[0] + first[1] + first[2]) * (1 / 3)
        moved = found.states[1].select(mean) - found.states[0].select(mean)
        assert all(torch.allclose(mean.tensor(name), moved.tensor(name), atol=1e-6) for name in mean)


def test_models_alone_tell_of_no_client(tmp_path: Path) -> None:
    found, _, _ = recorded(tmp_path, {"evaluation.record": "models"})
    assert sorted(found.states) == [0, 1, 2, 3]
    assert not found.updates
    assert not found.sums


def test_behind_masks_only_sums_are_there_to_be_kept(tmp_path: Path) -> None:
    plain, _, _ = recorded(tmp_path / "plain", UPDATES, sizes=(5, 8, 11, 9))
    masked, _, _ = recorded(tmp_path / "masked", UPDATES | MASKED, sizes=(5, 8, 11, 9))
    assert not masked.updates
    assert [one.round for one in masked.sums] == [0, 1, 2]
    first = [one.contribution for one in plain.updates if one.round == 0]
    total = first[0] + first[1] + first[2] + first[3]
    for name in total:
        assert torch.allclose(masked.sums[0].total.tensor(name), total.tensor(name), atol=1e-5)
    assert masked.sums[0].clients == 4


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    recorded(tmp_path, UPDATES)
    folder = tmp_path / "run" / "private" / recording.FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_recording_changes_nothing_of_the_run(tmp_path: Path) -> None:
    _, _, result = recorded(tmp_path, UPDATES)
    usual = toys.federation().run(tmp_path / "usual")
    assert same(usual.state.tensors, result.state.tensors)


def test_updates_are_warned_of_and_said_in_the_result(tmp_path: Path) -> None:
    _, federation, result = recorded(tmp_path, UPDATES)
    assert any("updates" in warning for warning in federation.warnings)
    assert result.summary["recorded"] == "updates"
    assert toys.federation().warnings == []


def test_it_needs_a_directory() -> None:
    with pytest.raises(ConfigError, match="run directory"):
        toys.federation(UPDATES).run()


def test_a_run_that_goes_on_keeps_recording(tmp_path: Path) -> None:
    toys.federation(UPDATES | {"federation.rounds": 1}).run(tmp_path / "run")
    toys.federation(UPDATES).run(tmp_path / "run", resume=True)
    found = recording.read(tmp_path / "run")
    assert found is not None
    assert sorted(found.states) == [0, 1, 2, 3]
    assert sorted({one.round for one in found.updates}) == [0, 1, 2]


def test_what_a_client_noised_itself_is_kept_noised(tmp_path: Path) -> None:
    settings = {**private_toys.NOISE, "privacy.noise": "local", "evaluation.record": "updates"}
    federation = private_toys.federation(settings, seed=3)
    federation.run(tmp_path / "run")
    found = recording.read(tmp_path / "run")
    assert found is not None
    assert all(one.contribution.norm() > 0.3 for one in found.updates)  # the clip norm is .1; the rest is noise


def test_a_damaged_recording_is_named(tmp_path: Path) -> None:
    recorded(tmp_path, UPDATES)
    file = tmp_path / "run" / "private" / recording.FOLDER / "round-00002.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RunDirectoryError, match="round-00002"):
        recording.read(tmp_path / "run")


def test_a_recording_with_a_gap_is_no_recording(tmp_path: Path) -> None:
    recorded(tmp_path, UPDATES)
    (tmp_path / "run" / "private" / recording.FOLDER / "round-00001.safetensors").unlink()
    with pytest.raises(RunDirectoryError, match="lacks rounds"):
        recording.read(tmp_path / "run")


@pytest.mark.parametrize(
    "name", ["round-abc.safetensors", "round-3.safetensors", "round-000001.safetensors", "notes.txt"]
)
def test_other_files_beside_a_recording_are_none_of_it(tmp_path: Path, name: str) -> None:
    recorded(tmp_path, UPDATES)
    (tmp_path / "run" / "private" / recording.FOLDER / name).write_text("mine")
    found = recording.read(tmp_path / "run")
    assert found is not None
    assert sorted(found.states) == [0, 1, 2, 3]


def test_a_run_that_goes_on_clears_what_a_kill_left_of_its_recording(tmp_path: Path) -> None:
    toys.federation(UPDATES | {"federation.rounds": 1}).run(tmp_path / "run")
    folder = tmp_path / "run" / "private" / recording.FOLDER
    (folder / "round-00002.safetensors.0123456789abcdef.part").write_text("half")
    toys.federation(UPDATES).run(tmp_path / "run", resume=True)
    assert sorted(file.name for file in folder.iterdir()) == [f"round-{n:05d}.safetensors" for n in range(4)]


# Recordings and the runs that they belong to.

HEAD_AT_HOME = {"method.personal": ["classifier.*"], "evaluation.record": "updates"}


@pytest.mark.parametrize(
    "settings",
    [
        UPDATES,
        {"evaluation.record": "models"},
        UPDATES | MASKED,
        UPDATES | {"method.name": "fra_lora"},
        UPDATES | {"federation.sampling": "poisson", "federation.cohort": 1, "federation.rounds": 8},
        HEAD_AT_HOME,
    ],
    ids=["updates", "models", "masks", "products", "few at a time", "personal"],
)
def test_what_a_run_recorded_is_its_own(tmp_path: Path, settings: dict[str, Any]) -> None:
    found, federation, _ = recorded(tmp_path, settings)
    checkpoint = read_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    recording.require_of_run(found, checkpoint.state, federation.assembly.problem.names)


def test_so_it_is_of_one_that_ended_early(tmp_path: Path) -> None:
    ledger = tmp_path / "budget.sqlite"
    private_toys.Ledger.create(ledger, data_set="wards", epsilon=7.0, delta=0.1)
    stop = {"privacy.ledger": str(ledger), "privacy.on_exhausted": "stop", "federation.rounds": 6}
    federation = private_toys.federation({**private_toys.NOISE, **stop, "evaluation.record": "updates"})
    result = federation.run(tmp_path / "run")
    found = recording.read(tmp_path / "run")
    assert found is not None
    assert 0 < result.state.round < 6
    recording.require_of_run(found, result.state, federation.assembly.problem.names)


def test_so_it_is_of_one_that_went_on(tmp_path: Path) -> None:
    toys.federation(UPDATES | {"federation.rounds": 1}).run(tmp_path / "run")
    federation = toys.federation(UPDATES)
    result = federation.run(tmp_path / "run", resume=True)
    found = recording.read(tmp_path / "run")
    assert found is not None
    recording.require_of_run(found, result.state, federation.assembly.problem.names)


def test_without_its_last_rounds_it_is_refused(tmp_path: Path) -> None:
    """So is one with an extra round, as after a run that was resumed and killed between a recording and its checkpoint."""
    found, federation, result = recorded(tmp_path, UPDATES)
    names = federation.assembly.problem.names
    folder = tmp_path / "run" / "private" / recording.FOLDER
    (folder / "round-00003.safetensors").unlink()
    less = recording.read(tmp_path / "run")
    assert less is not None
    with pytest.raises(RunDirectoryError, match="it ends after round 2, and the run after round 3"):
        recording.require_of_run(less, result.state, names)
    with pytest.raises(RunDirectoryError, match=r"it ends after round 3, and the run after round 2 .*--resume"):
        recording.require_of_run(found, replace(result.state, round=2), names)
    with pytest.raises(RunDirectoryError, match="ends after round -1"):
        recording.require_of_run(recording.Recorded({}), result.state, names)


@pytest.mark.parametrize("asked", ["models", "updates"])
def test_that_of_another_run_is_refused(tmp_path: Path, asked: str) -> None:
    settings = {"evaluation.record": asked}
    other, _, _ = recorded(tmp_path / "other", settings | {"training.lr": 0.0500001})
    _, federation, result = recorded(tmp_path / "own", settings)
    with pytest.raises(RunDirectoryError, match="its state after round 3 is another than the run's; restore"):
        recording.require_of_run(other, result.state, federation.assembly.problem.names)


def test_that_of_other_clients_is_refused(tmp_path: Path) -> None:
    found, federation, result = recorded(tmp_path, UPDATES)
    with pytest.raises(RunDirectoryError, match="it names client 'client-1', which this run does not have"):
        recording.require_of_run(found, result.state, [federation.assembly.problem.names[0], *"bc"])


def test_that_of_more_clients_behind_masks_is_refused(tmp_path: Path) -> None:
    found, federation, result = recorded(tmp_path, UPDATES | MASKED)
    with pytest.raises(RunDirectoryError, match="sums of more than the 2 clients"):
        recording.require_of_run(found, result.state, federation.assembly.problem.names[:2])


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.ones(2), "v": torch.zeros(1)},
        {"w": torch.ones(3)},
        {"w": torch.ones(2, dtype=torch.float64)},
        {"w": torch.tensor([1.0, 1.0000001])},
        {"v": torch.ones(2)},
    ],
    ids=["names more", "shape", "type", "one bit", "name"],
)
def test_a_last_state_that_differs_in_anything_is_another(other: dict[str, Any]) -> None:
    own = State(Tensors({"w": torch.ones(2)}))
    recording.require_of_run(recording.Recorded({0: Tensors({"w": torch.ones(2)})}), own, ["a"])
    with pytest.raises(RunDirectoryError, match="its state after round 0"):
        recording.require_of_run(recording.Recorded({0: Tensors(other)}), own, ["a"])


def same(one: Tensors, other: Tensors) -> bool:
    return list(one) == list(other) and all(torch.equal(one.tensor(name), other.tensor(name)) for name in one)


@pytest.mark.parametrize("masked", [{}, MASKED], ids=["plain", "masked"])
def test_what_phantoms_send_is_recorded_beside_what_clients_send(tmp_path: Path, masked: dict[str, Any]) -> None:
    settings = {**private_toys.NOISE, **UPDATES, **masked, "evaluation.phantoms": 4}
    found, federation, result = recorded(tmp_path, settings, sizes=(3, 3, 3))
    recording.require_of_run(found, result.state, federation.assembly.server.names)
    assert masked or {one.client for one in found.updates} == set(federation.assembly.server.names)
    assert not masked or {one.clients for one in found.sums} == {7}
