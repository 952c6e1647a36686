"""Weights & Biases and MLflow get only a run's public records; those of a private run arrive at its end.

Stand-ins with the same interface replace them. The last two tests use the packages themselves where they are installed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import secure_fed
from secure_fed.errors import ConfigError
from tests.secure_fed import private_toys, toys

PUBLIC_PRIVATE = {**private_toys.NOISE, "federation.rounds": 2}


@dataclass
class Wandb:
    """A stand-in that keeps the terms of every begun run and all logged values."""

    begun: list[dict[str, Any]] = field(default_factory=list)
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    finished: int = 0
    broken: str = ""
    run: Any = None
    Settings = staticmethod(dict)

    def init(self, **terms: Any) -> Any:
        if self.broken:
            raise RuntimeError(self.broken)
        self.begun.append(terms)
        return SimpleNamespace(id=terms["id"] or f"id{len(self.begun)}", log=self.log, finish=self.finish)

    def log(self, values: dict[str, float], step: int) -> None:
        if self.broken:
            raise RuntimeError(self.broken)
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@dataclass
class MLflow:
    """A stand-in for both the module and its client."""

    uris: list[str | None] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    logged: list[tuple[str, int, str, float]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    experiments: list[str] = field(default_factory=list)
    begun: int = 0

    def MlflowClient(self, uri: str | None) -> MLflow:  # noqa: N802
        self.uris.append(uri)
        return self

    def active_run(self) -> None:
        return None

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments.append(name)
        return name

    def create_run(self, experiment: str, run_name: str | None) -> Any:
        self.begun += 1
        return self.get_run(f"{experiment}-{self.begun}")

    def get_run(self, run: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def log_param(self, run: str, name: str, value: Any) -> None:
        self.params[name] = value

    def log_metric(self, run: str, name: str, value: float, step: int) -> None:
        self.logged.append((run, step, name, value))

    def set_terminated(self, run: str) -> None:
        self.ended.append(run)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    monkeypatch.setitem(sys.modules, "wandb", stand_in := Wandb())
    return stand_in


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MLflow:
    monkeypatch.setitem(sys.modules, "mlflow", stand_in := MLflow())
    return stand_in


def public(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """The record's numbers under flat names, for the two levels that records of these runs have."""
    found = {name: value for name, value in record.items() if isinstance(value, int | float)}
    inner = {name: value for name, value in record.items() if isinstance(value, dict)}
    return found | {
        f"{outer}/{name}": value
        for outer, values in inner.items()
        for name, value in values.items()
        if isinstance(value, int | float)
    }


def test_without_privacy_each_round_arrives_when_it_ends(wandb: Wandb, tmp_path: Path) -> None:
    arrived: list[int] = []
    counting = SimpleNamespace(on_published=lambda record: arrived.append(len(wandb.logged)))
    callbacks = [secure_fed.WandbCallback(), counting]
    toys.federation({"evaluation.per_client": True}, callbacks=callbacks).run(tmp_path / "first")
    assert arrived == [1, 2, 3]
    assert wandb.logged == [(record["round"], numbers_of(record)) for record in public(tmp_path / "first")]
    assert "clients_accuracy/mean" in wandb.logged[0][1]
    (begun,) = wandb.begun
    assert (begun["project"], begun["name"], begun["id"]) == ("secure-fed", "first", None)
    assert begun["config"]["federation"]["rounds"] == 3
    assert "mode" not in begun
    assert wandb.finished == 1


def test_a_private_run_arrives_at_its_end_as_its_public_part_says_and_stays_on_the_machine(
    wandb: Wandb, mlflow: MLflow, tmp_path: Path
) -> None:
    during: list[int] = []
    watching = SimpleNamespace(on_round_end=lambda record, state: during.append(len(wandb.begun) + mlflow.begun))
    callbacks = [secure_fed.WandbCallback(), secure_fed.MLflowCallback(), watching]
    result = private_toys.federation(PUBLIC_PRIVATE, callbacks=callbacks).run(tmp_path / "run")
    assert during == [0, 0]  # no message reveals when a round ended
    expected = [(record["round"], numbers_of(record)) for record in public(tmp_path / "run")]
    assert wandb.logged == expected
    assert [(step, name, value) for _, step, name, value in mlflow.logged] == [
        (step, name, value) for step, values in expected for name, value in values.items()
    ]
    withheld = {"seconds", "train_loss"}
    assert withheld <= set(result.records[0])
    assert not withheld & {name for _, values in wandb.logged for name in values}
    (begun,) = wandb.begun
    private = tmp_path / "run" / "private"
    assert (begun["mode"], begun["dir"]) == ("offline", str(private))
    assert begun["settings"]["console"] == "off"
    assert begun["settings"]["x_disable_stats"]
    assert mlflow.uris == [f"sqlite:///{private / 'mlflow.db'}"]
    assert mlflow.ended == ["secure-fed-1"]


@pytest.mark.usefixtures("wandb")
def test_a_private_run_without_a_directory_is_refused() -> None:
    built = private_toys.federation(PUBLIC_PRIVATE, callbacks=[secure_fed.WandbCallback()])
    with pytest.raises(ConfigError, match=r"files of its run directory: name one with run\(out\)"):
        built.run()


def test_a_resumed_run_goes_on_in_the_same_run_of_the_service(wandb: Wandb, mlflow: MLflow, tmp_path: Path) -> None:
    for rounds, resume in ((2, False), (3, True)):
        callbacks = [secure_fed.WandbCallback(), secure_fed.MLflowCallback()]
        toys.federation({"federation.rounds": rounds}, callbacks=callbacks).run(tmp_path / "run", resume=resume)
    assert [begun["id"] for begun in wandb.begun] == [None, "id1"]
    assert [step for step, _ in wandb.logged] == [1, 2, 3]
    assert mlflow.begun == 1
    assert {run for run, *_ in mlflow.logged} == {"secure-fed-1"}
    assert mlflow.params["federation.rounds"] == 2


def test_a_run_that_is_active_is_used_and_left_open(wandb: Wandb) -> None:
    wandb.run = wandb.init(id="own", project="mine")
    toys.federation(callbacks=[secure_fed.WandbCallback()]).run()
    assert len(wandb.begun) == 1
    assert [step for step, _ in wandb.logged] == [1, 2, 3]
    assert wandb.finished == 0


def test_what_is_wrong_at_the_start_is_said_before_anything_is_written(wandb: Wandb, tmp_path: Path) -> None:
    wandb.broken = "No API key configured. Use `wandb login` to log in.\nTraceback"
    with pytest.raises(ConfigError, match=r"cannot be started: No API key .* log in; run `wandb login`"):
        toys.federation(callbacks=[secure_fed.WandbCallback()]).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_service_that_fails_later_stops_no_run(wandb: Wandb, caplog: pytest.LogCaptureFixture) -> None:
    breaking = SimpleNamespace(on_round_end=lambda record, state: setattr(wandb, "broken", "no answer"))
    result = toys.federation(callbacks=[secure_fed.WandbCallback(), breaking]).run()
    assert result.summary["rounds"] == 3
    assert caplog.messages == ["Weights & Biases failed, and the run goes on without it: no answer"]


@pytest.mark.parametrize(("extra", "callback"), [("wandb", "WandbCallback"), ("mlflow", "MLflowCallback")])
def test_a_tracker_that_is_not_installed(extra: str, callback: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ConfigError, match=rf"evaluation\.{extra} and {callback} need it; pip install 'secure-fed"):
        getattr(secure_fed, callback)()


@pytest.mark.parametrize("private", [False, True])
def test_weights_and_biases_itself_offline(private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    made = private_toys.federation if private else toys.federation
    made(PUBLIC_PRIVATE if private else {}, callbacks=[secure_fed.WandbCallback()]).run(tmp_path / "run")
    wandb.teardown()  # a finished run may not be in its file yet
    folder = tmp_path / "run" / "private" if private else tmp_path
    (written,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert b"accuracy" in content
    assert (b"train_loss" in content) == (not private)
    assert [path for path in tmp_path.rglob("*.wandb") if path != written] == []


@pytest.mark.nightly  # a new data base takes ten seconds
@pytest.mark.parametrize("private", [False, True])
def test_mlflow_itself_in_a_file(private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'all.db'}")
    made = private_toys.federation if private else toys.federation
    made(PUBLIC_PRIVATE if private else {}, callbacks=[secure_fed.MLflowCallback()]).run(tmp_path / "run")
    place = tmp_path / "run" / "private" / "mlflow.db" if private else tmp_path / "all.db"
    assert [path for path in tmp_path.rglob("*.db") if path.name in ("all.db", "mlflow.db")] == [place]
    client = mlflow.MlflowClient(f"sqlite:///{place}")
    (run,) = client.search_runs([client.get_experiment_by_name("secure-fed").experiment_id])
    history = client.get_metric_history(run.info.run_id, "accuracy")
    records = public(tmp_path / "run")
    assert [(point.step, point.value) for point in history] == [(one["round"], one["accuracy"]) for one in records]
    assert ("train_loss" in run.data.metrics) == (not private)
    assert run.info.status == "FINISHED"
    assert run.data.params["federation.rounds"] == str(len(records))
