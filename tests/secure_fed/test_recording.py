"""Recordings of messages for audits: made only on request, readable only by the owner, equal to the messages."""

from __future__ import annotations

import shutil
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from secure_fed.errors import ConfigError, RunDirectoryError
from secure_fed.federation import Federation
from secure_fed.methods.method import State
from secure_fed.runs import recording
from secure_fed.runs.run import Result
from secure_fed.tensors.tensors import Tensors
from tests.golden import refused
from tests.secure_fed import private_toys, toys

UPDATES = {"evaluation.record": "updates"}
MASKED = {"secure_aggregation.enabled": True, "secure_aggregation.dropout": 0.0, "secure_aggregation.corrupt": 0.0}


@dataclass(frozen=True)
class Run:
    path: Path
    federation: Federation
    result: Result

    @classmethod
    def of(cls, path: Path, settings: dict[str, Any], *, resume: bool = False, **own: Any) -> Run:
        federation = toys.federation(settings, **own)
        return cls(path, federation, federation.run(path, resume=resume))

    @property
    def folder(self) -> Path:
        return self.path / "private" / recording.FOLDER

    @property
    def recorded(self) -> recording.Recorded:
        found = recording.read(self.path)
        assert found is not None
        return found

    def require_own(self, found: recording.Recorded, **other: Any) -> None:
        """`recording.require_of_run`. other: a state or names in place of the run's."""
        own: dict[str, Any] = {"state": self.result.state, "names": self.federation.assembly.server.names}
        recording.require_of_run(found, *{**own, **other}.values())


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run.of(tmp_path_factory.mktemp("updates") / "run", UPDATES)


def test_nothing_is_kept_unless_asked_and_then_said_and_changes_nothing(updates: Run, tmp_path: Path) -> None:
    usual = Run.of(tmp_path / "usual", {})
    assert not usual.folder.exists()
    assert recording.read(usual.path) is None
    assert toys.same(usual.result.state.tensors, updates.result.state.tensors)
    assert usual.federation.warnings == []
    assert any("updates" in warning for warning in updates.federation.warnings)
    assert updates.result.summary["recorded"] == "updates"
    with refused(ConfigError, "evaluation.record"):
        toys.federation(UPDATES).run()


def test_updates_and_states_are_what_travelled_for_the_owner_to_read(updates: Run) -> None:
    assert stat.S_IMODE(updates.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in updates.folder.iterdir()} == {0o600}
    found, assembly = updates.recorded, updates.federation.assembly
    assert sorted(found.states) == [0, 1, 2, 3]
    assert toys.same(found.states[0], assembly.initial.tensors)
    assert toys.same(found.states[3], updates.result.state.tensors)
    sent = {(one.round, one.client) for one in found.updates}
    assert sent == {(round_, name) for round_ in range(3) for name in assembly.problem.names}
    assert found.lr == {0: 0.05, 1: 0.05, 2: 0.05}
    first = [one.contribution for one in found.updates if one.round == 0]
    mean = (first[0] + first[1] + first[2]) * (1 / 3)
    moved = found.states[1].select(mean) - found.states[0].select(mean)
    assert all(torch.allclose(mean.tensor(name), moved.tensor(name), atol=1e-6) for name in mean)


def test_models_alone_tell_of_no_client(tmp_path: Path) -> None:
    run = Run.of(tmp_path, {"evaluation.record": "models"})
    found = run.recorded
    assert (sorted(found.states), list(found.updates), list(found.sums)) == ([0, 1, 2, 3], [], [])
    run.require_own(found)


def test_behind_masks_only_sums_are_there_to_be_kept(updates: Run, tmp_path: Path) -> None:
    run = Run.of(tmp_path, UPDATES | MASKED)
    masked = run.recorded
    assert not masked.updates
    assert [(one.round, one.clients) for one in masked.sums] == [(0, 3), (1, 3), (2, 3)]
    first = [one.contribution for one in updates.recorded.updates if one.round == 0]
    total = first[0] + first[1] + first[2]
    for name in total:
        assert torch.allclose(masked.sums[0].total.tensor(name), total.tensor(name), atol=1e-5)
    run.require_own(masked)
    with refused(RunDirectoryError):
        run.require_own(masked, names=run.federation.assembly.problem.names[:2])


def test_a_run_that_goes_on_keeps_recording_and_clears_what_a_kill_left(tmp_path: Path) -> None:
    begun = Run.of(tmp_path, UPDATES | {"federation.rounds": 1})
    (begun.folder / "round-00002.safetensors.0123456789abcdef.part").write_text("half")
    run = Run.of(tmp_path, UPDATES, resume=True)
    assert sorted({one.round for one in run.recorded.updates}) == [0, 1, 2]
    assert sorted(file.name for file in run.folder.iterdir()) == [f"round-{n:05d}.safetensors" for n in range(4)]
    run.require_own(run.recorded)


def test_what_a_client_noised_itself_is_kept_noised(tmp_path: Path) -> None:
    run = Run.of(tmp_path, {**private_toys.NOISE, "privacy.noise": "local", **UPDATES})
    assert all(one.contribution.norm() > 0.3 for one in run.recorded.updates)  # the clip norm is .1; the rest is noise


def test_a_recording_that_is_damaged_or_has_a_gap_is_none_and_other_files_are_not_of_it(
    updates: Run, tmp_path: Path
) -> None:
    shutil.copytree(updates.path, tmp_path / "run")
    copy = replace(updates, path=tmp_path / "run")
    for name in ("round-abc.safetensors", "round-3.safetensors", "round-000001.safetensors", "notes.txt"):
        (copy.folder / name).write_text("mine")
    assert sorted(copy.recorded.states) == [0, 1, 2, 3]
    last, second = (copy.folder / f"round-0000{number}.safetensors" for number in (3, 1))
    last.unlink()
    with refused(RunDirectoryError):
        copy.require_own(copy.recorded)
    last.write_bytes(second.read_bytes()[:100])
    with refused(RunDirectoryError, hide="deserializing[^)]*"):
        recording.read(copy.path)
    last.unlink()
    second.unlink()
    with refused(RunDirectoryError):
        recording.read(copy.path)


@pytest.mark.parametrize(
    "settings",
    [
        {"method.name": "fra_lora"},
        {"federation.sampling": "poisson", "federation.cohort": 1, "federation.rounds": 8},
        {"method.personal": ["classifier.*"]},
    ],
    ids=["products", "few at a time", "personal"],
)
def test_what_a_run_recorded_is_its_own(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = Run.of(tmp_path, UPDATES | settings)
    run.require_own(run.recorded)


def test_so_it_is_of_one_that_ended_early(tmp_path: Path) -> None:
    ledger = tmp_path / "budget.sqlite"
    private_toys.Ledger.create(ledger, data_set="wards", epsilon=7.0, delta=0.1)
    stop = {"privacy.ledger": str(ledger), "privacy.on_exhausted": "stop", "federation.rounds": 6}
    run = Run.of(tmp_path / "run", {**private_toys.NOISE, **stop, **UPDATES})
    assert 0 < run.result.state.round < 6
    run.require_own(run.recorded)


@pytest.mark.parametrize("masked", [{}, MASKED], ids=["plain", "masked"])
def test_what_clients_send_is_recorded_without_dummies_who_send_nothing(tmp_path: Path, masked: dict[str, Any]) -> None:
    run = Run.of(tmp_path, {**private_toys.NOISE, **UPDATES, **masked, "evaluation.dummies": 4}, sizes=(3, 3, 3))
    found = run.recorded
    run.require_own(found)
    assert masked or {one.client for one in found.updates} == set(run.federation.assembly.problem.names)
    assert not masked or {one.clients for one in found.sums} == {3}


def test_that_of_another_run_is_refused(updates: Run, tmp_path: Path) -> None:
    """A recording with an extra round is one of a run that was resumed, and killed before its checkpoint."""
    found = updates.recorded
    for other in ({"state": replace(updates.result.state, round=2)}, {"names": ["client-0", *"bc"]}):
        with refused(RunDirectoryError):
            updates.require_own(found, **other)
    with refused(RunDirectoryError):
        updates.require_own(recording.Recorded({}))
    with refused(RunDirectoryError):
        updates.require_own(Run.of(tmp_path, UPDATES | {"training.lr": 0.0500001}).recorded)


def test_a_last_state_that_differs_in_anything_is_another() -> None:
    own = State(Tensors({"w": torch.ones(2)}))
    recording.require_of_run(recording.Recorded({0: Tensors({"w": torch.ones(2)})}), own, ["a"])
    for other in (
        {"w": torch.ones(2), "v": torch.zeros(1)},
        {"w": torch.ones(3)},
        {"w": torch.ones(2, dtype=torch.float64)},
        {"w": torch.tensor([1.0, 1.0000001])},
        {"v": torch.ones(2)},
    ):
        with refused(RunDirectoryError):
            recording.require_of_run(recording.Recorded({0: Tensors(other)}), own, ["a"])
