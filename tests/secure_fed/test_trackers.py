"""Weights & Biases and MLflow get only a run's public records; those of a private run arrive at its end.

Stand-ins with the same interface replace them; two tests use the packages themselves where they are installed. Progress on the
terminal reports every stage and client, and no number that has to stay secret.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import TestCase
from unittest.mock import MagicMock

import pytest

import secure_fed
from privacy.participation import Poisson
from privacy.plan import Target, for_sums
from secure_fed.errors import ConfigError
from secure_fed.methods.method import State
from secure_fed.report import progress as shown
from secure_fed.report.formatting import at_most
from secure_fed.report.progress import ConsoleProgress
from secure_fed.rounds.engine import Charges
from secure_fed.rounds.transport import Progress
from secure_fed.runs.budget import RunBudget
from secure_fed.tensors.tensors import Tensors
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.masked.wide_toys import CLIPPED, MASKED, federation

PUBLIC_PRIVATE = {**private_toys.NOISE, "federation.rounds": 2}


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A stand-in without an active run, whose runs are id1, id2, ..."""
    module = MagicMock(run=None, Settings=dict)

    def init(**terms: Any) -> MagicMock:
        return MagicMock(id=terms["id"] or f"id{module.init.call_count}", log=module.log, finish=module.finish)

    module.init.side_effect = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def begun(wandb: MagicMock) -> list[dict[str, Any]]:
    return [call.kwargs for call in wandb.init.call_args_list]


def logged(wandb: MagicMock) -> list[tuple[int, dict[str, float]]]:
    return [(call.kwargs["step"], call.args[0]) for call in wandb.log.call_args_list]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A stand-in without experiments or an active run."""
    module = MagicMock()
    client = module.MlflowClient.return_value
    module.active_run.return_value = client.get_experiment_by_name.return_value = None
    client.create_run.return_value.info.run_id = "one"
    client.get_run.side_effect = lambda run: SimpleNamespace(info=SimpleNamespace(run_id=run))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


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


def test_without_privacy_each_round_arrives_when_it_ends(wandb: MagicMock, tmp_path: Path) -> None:
    arrived: list[int] = []
    counting = SimpleNamespace(on_published=lambda record: arrived.append(wandb.log.call_count))
    callbacks = [secure_fed.WandbCallback(), counting]
    toys.federation({"evaluation.per_client": True}, callbacks=callbacks).run(tmp_path / "first")
    assert arrived == [1, 2, 3]
    assert logged(wandb) == [(record["round"], numbers_of(record)) for record in public(tmp_path / "first")]
    assert "clients_accuracy/mean" in logged(wandb)[0][1]
    (terms,) = begun(wandb)
    assert (terms["project"], terms["name"], terms["id"]) == ("secure-fed", "first", None)
    assert terms["config"]["federation"]["rounds"] == 3
    assert "mode" not in terms
    wandb.finish.assert_called_once_with()


def test_a_private_run_arrives_at_its_end_as_its_public_part_says_and_stays_on_the_machine(
    wandb: MagicMock, mlflow: MagicMock, tmp_path: Path
) -> None:
    during: list[int] = []
    watching = SimpleNamespace(
        on_round_end=lambda record, state: during.append(len(wandb.mock_calls) + len(mlflow.mock_calls))
    )
    callbacks = [secure_fed.WandbCallback(), secure_fed.MLflowCallback(), watching]
    result = private_toys.federation(PUBLIC_PRIVATE, callbacks=callbacks).run(tmp_path / "run")
    assert during == [0, 0]  # no message reveals when a round ended
    expected = [(record["round"], numbers_of(record)) for record in public(tmp_path / "run")]
    assert logged(wandb) == expected
    client = mlflow.MlflowClient.return_value
    assert [(call.kwargs["step"], *call.args[1:]) for call in client.log_metric.call_args_list] == [
        (step, name, value) for step, values in expected for name, value in values.items()
    ]
    withheld = {"seconds", "train_loss"}
    assert withheld <= set(result.records[0])
    assert not withheld & {name for _, values in logged(wandb) for name in values}
    (terms,) = begun(wandb)
    private = tmp_path / "run" / "private"
    assert (terms["mode"], terms["dir"]) == ("offline", str(private))
    assert terms["settings"]["console"] == "off"
    assert terms["settings"]["x_disable_stats"]
    mlflow.MlflowClient.assert_called_once_with(f"sqlite:///{private / 'mlflow.db'}")
    client.set_terminated.assert_called_once_with("one")


@pytest.mark.usefixtures("wandb")
def test_a_private_run_without_a_directory_is_refused() -> None:
    built = private_toys.federation(PUBLIC_PRIVATE, callbacks=[secure_fed.WandbCallback()])
    with refused(ConfigError):
        built.run()


def test_a_resumed_run_goes_on_in_the_same_run_of_the_service(
    wandb: MagicMock, mlflow: MagicMock, tmp_path: Path
) -> None:
    for rounds, resume in ((2, False), (3, True)):
        callbacks = [secure_fed.WandbCallback(), secure_fed.MLflowCallback()]
        toys.federation({"federation.rounds": rounds}, callbacks=callbacks).run(tmp_path / "run", resume=resume)
    assert [terms["id"] for terms in begun(wandb)] == [None, "id1"]
    assert [step for step, _ in logged(wandb)] == [1, 2, 3]
    client = mlflow.MlflowClient.return_value
    client.create_run.assert_called_once()
    assert {call.args[0] for call in client.log_metric.call_args_list} == {"one"}
    client.log_param.assert_any_call("one", "federation.rounds", 2)


def test_a_run_that_is_active_is_used_and_left_open(wandb: MagicMock) -> None:
    wandb.run = MagicMock(id="own", log=wandb.log, finish=wandb.finish)
    toys.federation(callbacks=[secure_fed.WandbCallback()]).run()
    wandb.init.assert_not_called()
    assert [step for step, _ in logged(wandb)] == [1, 2, 3]
    wandb.finish.assert_not_called()


def test_what_is_wrong_at_the_start_is_said_before_anything_is_written(wandb: MagicMock, tmp_path: Path) -> None:
    wandb.init.side_effect = RuntimeError("No API key configured. Use `wandb login` to log in.\nTraceback")
    with refused(ConfigError):
        toys.federation(callbacks=[secure_fed.WandbCallback()]).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_service_that_fails_later_stops_no_run(wandb: MagicMock) -> None:
    wandb.log.side_effect = [None, RuntimeError("no answer")]
    with TestCase().assertLogs() as logged:
        result = toys.federation(callbacks=[secure_fed.WandbCallback()]).run()
    assert result.summary["rounds"] == 3
    (record,) = logged.records
    assert record.getMessage() == "Weights & Biases failed, and the run goes on without it: no answer"


@pytest.mark.parametrize(("extra", "callback"), [("wandb", "WandbCallback"), ("mlflow", "MLflowCallback")])
def test_a_tracker_that_is_not_installed(extra: str, callback: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with refused(ConfigError):
        getattr(secure_fed, callback)()


@pytest.mark.nightly  # importing them and making a data base takes seconds
@pytest.mark.parametrize("private", [False, True])
def test_the_packages_themselves_without_a_network(
    private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, mlflow = (pytest.importorskip(name) for name in ("wandb", "mlflow"))
    monkeypatch.chdir(tmp_path)
    store = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'all.db'}"}
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    made = private_toys.federation if private else toys.federation
    callbacks = [secure_fed.WandbCallback(), secure_fed.MLflowCallback()]
    made(PUBLIC_PRIVATE if private else {}, callbacks=callbacks).run(tmp_path / "run")
    wandb.teardown()  # a finished run may not be in its file yet
    folder = tmp_path / "run" / "private" if private else tmp_path
    (written,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert b"accuracy" in content
    assert (b"train_loss" in content) == (not private)
    assert [path for path in tmp_path.rglob("*.wandb") if path != written] == []
    place = folder / ("mlflow.db" if private else "all.db")
    assert [path for path in tmp_path.rglob("*.db") if path.name in ("all.db", "mlflow.db")] == [place]
    client = mlflow.MlflowClient(f"sqlite:///{place}")
    (run,) = client.search_runs([client.get_experiment_by_name("secure-fed").experiment_id])
    history = client.get_metric_history(run.info.run_id, "accuracy")
    records = public(tmp_path / "run")
    assert [(point.step, point.value) for point in history] == [(one["round"], one["accuracy"]) for one in records]
    assert ("train_loss" in run.data.metrics) == (not private)
    assert run.info.status == "FINISHED"
    assert run.data.params["federation.rounds"] == str(len(records))


def watched(settings: dict[str, Any]) -> list[Progress]:
    built, told = federation({"federation.rounds": 2, **settings}), list[Progress]()
    built.callbacks.append(SimpleNamespace(on_progress=told.append))
    for number, record in enumerate(built.run().records):
        sent = [one.sent for one in told if one.round == number]
        assert set(sent[-2:]) <= {record["bytes_up"] + record["bytes_down"], 0}, "all bytes are told of, or none"
    return told


def stages(told: list[Progress], round_: int) -> list[str]:
    names = [one.stage for one in told if one.round == round_]
    return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]


@pytest.mark.parametrize("settings", [{}, {"training.together": 1}], ids=["together", "in turn"])
def test_clients_are_counted_as_they_train(settings: dict[str, Any]) -> None:
    told = [one for one in watched({"training.steps": 3, **settings}) if one.round == 1]
    assert stages(told, 1) == ["training", "testing"]
    done = [one.done for one in told if one.stage == "training"]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, told[0].total)
    assert len({*done}) > 3 if settings else any(0 < one < told[0].total for one in done)


def test_behind_masks_every_stage_is_told() -> None:
    told = watched(MASKED)
    assert stages(told, 0) == ["exchanging keys", "sharing secrets", "training", "taking masks off", "testing"]


def test_of_a_secret_cohort_no_number_is_told() -> None:
    told = watched({**CLIPPED, "federation.sampling": "poisson", "federation.cohort": 3})
    assert {(one.done, one.total, one.sent) for one in told} == {(0.0, 0, 0)}


def ended(number: int, **more: Any) -> tuple[dict[str, Any], State]:
    return {"round": number, "bytes_up": 1000, "bytes_down": 0, "rejected": [], **more}, State(Tensors({}), number)


def test_an_accuracy_is_shown_with_the_round_that_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    with ConsoleProgress(4) as line:
        line.begin(None)
        line.on_round_end(*ended(1))
        line.on_round_end(*ended(2, accuracy=0.5))
        line.on_round_end(*ended(3))
    first, second, third = capsys.readouterr().err.splitlines()
    assert "accuracy" not in first
    assert "accuracy 50.0 %, 2.00 kB sent" in second
    assert "accuracy 50.0 % after round 2, 3.00 kB sent" in third


def test_epsilon_is_of_all_charged_releases_those_of_an_interrupted_round_included(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = for_sums(Target(1.0, None, 1e-5), Poisson(20, 0.1), 9)
    made = itertools.count(4)  # a process before this one charged three releases
    budget = RunBudget("run", None, SimpleNamespace(charge=lambda *given: next(made)), plan)  # type: ignore[arg-type]
    with ConsoleProgress(4) as line:
        line.begin(plan, Charges(budget))
        for number in (1, 2):
            budget.charge(number - 1, "change")
            line.on_round_end(*ended(number))
    shown = [f"epsilon {at_most(plan.epsilon(releases))}, " for releases in (4, 5)]
    assert all(told in text for told, text in zip(shown, capsys.readouterr().err.splitlines(), strict=True))
    assert shown[0] != shown[1] != f"epsilon {at_most(plan.epsilon(2))}, "


def test_within_a_long_round_a_line_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(shown.time, "monotonic", lambda: now)
    with ConsoleProgress(2) as line:
        line.begin(None)
        for seconds, done in ((1, 5), (20, 10), (25, 11), (40, 20)):
            monkeypatch.setattr(shown.time, "monotonic", lambda at=now + seconds: at)
            line.on_progress(Progress(0, "training", done, 40, 500))
    assert capsys.readouterr().err.splitlines() == [
        "round 1/2: training 10/40, 500 bytes sent",  # half a round says how long the others take
        "round 1/2: training 20/40, 500 bytes sent, 0:02:00 left by the slow first round",
    ]
