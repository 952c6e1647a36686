"""A run that is killed at any instant and resumed ends in the same bits as an uninterrupted one.

First at every named instant between two durable steps, in a process that kills itself there; then five times in a row in
a real `python -m secure_fed train`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from privacy import accounting, ledger_file
from privacy.ledger import Ledger
from secure_fed.commands import cli
from secure_fed.errors import RunDirectoryError
from secure_fed.federation import Federation
from secure_fed.report.page import write_report
from secure_fed.runs import durable, noise_key, recording
from secure_fed.runs.store import read_checkpoint, read_personal, read_records
from tests.cells import chosen
from tests.contracts.runs import KilledAfter, KilledError
from tests.golden import refused
from tests.secure_fed import private_toys, small_models, toys

pytestmark = pytest.mark.usefixtures("never_drawn")

ROUNDS = 4
_REPLACED = ("written", "synced", "replaced")


def _files(*names: str) -> list[str]:
    return [f"{name}:{step}" for name in names for step in _REPLACED]


def _round(number: int) -> list[str]:
    return [
        *("metrics.jsonl:torn", "metrics.jsonl:appended"),
        *_files(f"personal-{number}.safetensors", "checkpoint.safetensors"),
    ]


POINTS = (
    *_files("config.json", "facts.json", "run.json"),
    *(point for number in range(1, ROUNDS + 1) for point in _round(number)),
    *_files("facts.json", "result.json"),
    "noise.key:erased",  # which only correlated noise has
    *_files("report.html"),
)
# A new interpreter for each of the hundred processes below would take minutes, so this one is forked. A fork lacks torch's
# own threads, which exist only where torch computes on an accelerator: there, a process that has only imported torch is forked.
_WAYS = (*(() if torch.accelerator.is_available() else ("fork",)), "forkserver", "spawn")
_PROCESSES = multiprocessing.get_context(next(way for way in _WAYS if way in multiprocessing.get_all_start_methods()))
if _PROCESSES.get_start_method() == "forkserver":
    _PROCESSES.set_forkserver_preload([__name__, "tests.secure_fed.test_private_reliability"])


def everything_at_once() -> Federation:
    """Server memory, personal tensors, cohorts of any size, dropout, and a method that changes halfway."""
    settings = {
        "method.name": "fra_then_ffa",
        "method.switch_round": ROUNDS // 2,
        "method.dropout": 0.2,
        "method.personal": ["classifier"],
        "federation.rounds": ROUNDS,
        "federation.server_optimizer": "adam",
        "federation.server_lr": 0.05,
        "federation.sampling": "poisson",
        "federation.cohort": 2,
        "training.proximal": 0.1,
        "evaluation.per_client": True,
    }
    return toys.federation(settings, model=toys.model(dropout=0.3))


def transformer() -> Federation:
    """BERT with common settings and its own dropout."""
    rng = random.Random(0)
    texts = [
        {"input_ids": [rng.randrange(2, 40) for _ in range(rng.randrange(4, 12))], "labels": rng.randrange(3)}
        for _ in range(40)
    ]
    settings = {"method.modules_to_save": [], "federation.rounds": ROUNDS, "federation.cohort": 2, "training.steps": 2}
    model = small_models.make("bert")
    return Federation(toys.config(settings), model=model, train=[texts[:9], texts[9:16], texts[16:32]], test=texts[32:])


SCENARIOS: dict[str, Callable[[], Federation]] = {f.__name__: f for f in (everything_at_once, transformer)}


INSTANTS = {
    "everything_at_once": POINTS,
    "transformer": tuple(point for point in POINTS if not point.startswith("personal-")),  # without personal tensors
}


def run(scenario: str, path: Path, *, resume: bool = False, page: bool = False) -> None:
    """Runs a scenario as the command line does. The report takes longer than the run: it is written only for `page`."""
    torch.set_num_threads(1)
    SCENARIOS[scenario]().run(path, resume=resume)
    if page:
        write_report(path)


def die_at(deadly: int, run: Callable[..., Any], *given: Any, **named: Any) -> None:
    """Runs up to the named instant with index `deadly`, from 0, and is killed there."""
    left = deadly

    def crash_point(name: str) -> None:
        nonlocal left
        if left == 0:
            if hasattr(signal, "SIGKILL"):
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
        left -= 1

    durable.crash_point = ledger_file.crash_point = noise_key.crash_point = crash_point
    run(*given, **named)


def kill_at(deadly: int, run: Callable[..., Any], *given: Any, **named: Any) -> None:
    process = _PROCESSES.Process(target=die_at, args=(deadly, run, *given), kwargs=named)  # type: ignore[attr-defined]
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if hasattr(signal, "SIGKILL") else 1)


def instants(run: Callable[..., Any], *given: Any, **named: Any) -> list[str]:
    """The names of the instants that a run passes, in order."""
    passed: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        for module in (durable, ledger_file, noise_key):
            patched.setattr(module, "crash_point", passed.append)
        run(*given, **named)
    return passed


class Whole(dict[str, Path]):
    """Every scenario's run directory, without an interruption. Each is made when it is first asked for."""

    def __init__(self, run: Callable[[str, Path], object], factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._run, self._factory = run, factory

    def __missing__(self, scenario: str) -> Path:
        self[scenario] = self._factory.mktemp("uninterrupted") / scenario
        self._run(scenario, self[scenario])
        return self[scenario]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(run, tmp_path_factory)


def assert_same_run(left: Path, right: Path) -> None:
    """Both folders have the same files, equal to the bit apart from times and paths. The report has both and is left out."""
    for part in ("", "private"):
        names = [{file.name for file in (path / part).iterdir()} - {".lock", "report.html"} for path in (left, right)]
        assert names[0] == names[1]
    personal = [f"private/{file.name}" for file in (left / "private").glob("personal-*")]
    for name in ("checkpoint.safetensors", "config.json", "run.json", *personal):
        assert (left / name).read_bytes() == (right / name).read_bytes(), name
    assert toys.without_time(read_records(left)) == toys.without_time(read_records(right))
    lines = (left / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) == len((right / "metrics.jsonl").read_text().splitlines())
    results = [json.loads((path / "result.json").read_text()) for path in (left, right)]
    for result in results:
        del result["seconds"], result["run_dir"]
    assert results[0] == results[1]


# Named instants.


def test_every_write_of_a_run_has_its_instants(tmp_path: Path) -> None:
    assert instants(run, "everything_at_once", tmp_path / "run", page=True) == list(POINTS)
    written = {name.partition(":")[0] for name in POINTS}
    kept = {file.name for file in (tmp_path / "run").rglob("*") if file.is_file()} - {".lock"}
    assert kept == written - {"noise.key", *(f"personal-{number}.safetensors" for number in range(1, ROUNDS))}


def test_the_scenario_exercises_what_it_says(uninterrupted: Whole) -> None:
    checkpoint = read_checkpoint(uninterrupted["everything_at_once"])
    records = read_records(uninterrupted["everything_at_once"])
    assert checkpoint is not None
    assert {name[0] for name in checkpoint.state.memory} == {"m", "v"}
    heads = {kept.to_bytes() for kept in read_personal(uninterrupted["everything_at_once"], ROUNDS).values()}
    assert len(heads) == 3
    assert len({record["cohort"] for record in records}) > 1
    assert records[0]["bytes_up"] != records[-1]["bytes_up"]
    assert records[-1]["clients_accuracy"]["mean"] > 0


def _at(scenario: str, name: str, time: int = 0) -> tuple[str, int]:
    """(scenario, index of the `time`-th instant of that name), from 0; -1 is the last."""
    return scenario, [point for point, passed in enumerate(INSTANTS[scenario]) if passed == name][time]


# Every kind of write, before and after it takes effect, in the first, a middle and the last round. The others run at night.
ON_EVERY_CHANGE = [
    *(_at("everything_at_once", name) for name in ("config.json:replaced", "result.json:written")),
    *(_at("everything_at_once", f"metrics.jsonl:{how}", 1) for how in ("torn", "appended")),
    _at("everything_at_once", "personal-2.safetensors:replaced"),
    _at("everything_at_once", "checkpoint.safetensors:replaced", 1),
    _at("everything_at_once", "checkpoint.safetensors:written", -1),
]


@pytest.mark.parametrize(
    ("scenario", "deadly"),
    chosen(
        ((scenario, point) for scenario, points in INSTANTS.items() for point in range(len(points))), ON_EVERY_CHANGE
    ),
    ids=str,
)
def test_killed_at_a_named_instant(uninterrupted: Whole, tmp_path: Path, scenario: str, deadly: int) -> None:
    page = INSTANTS[scenario][deadly].startswith("report")
    kill_at(deadly, run, scenario, tmp_path / "run", page=page)
    run(scenario, tmp_path / "run", resume=True, page=page)
    assert_same_run(tmp_path / "run", uninterrupted[scenario])


@pytest.mark.parametrize(
    ("first", "seconds"), chosen([*((first, range(6)) for first in (10, 15, 22)), (15, (4,))], [(15, (4,))])
)
def test_killed_while_resuming_and_again_at_every_instant(
    uninterrupted: Whole, tmp_path: Path, first: int, seconds: Sequence[int]
) -> None:
    scenario = "everything_at_once"
    for second in seconds:
        path = tmp_path / f"run-{second}"
        kill_at(first, run, scenario, path)
        kill_at(second, run, scenario, path, resume=True)
        run(scenario, path, resume=True)
        assert_same_run(path, uninterrupted[scenario])


# Resuming a run that was not killed.


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path, uninterrupted: Whole) -> None:
    run("everything_at_once", tmp_path / "run")
    (listener, rounds), federation = listening(), everything_at_once()
    federation.callbacks.append(listener)
    result = federation.run(tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", uninterrupted["everything_at_once"])
    assert rounds == ["end"]
    assert len(result.records) == ROUNDS
    assert result.summary["accuracy"] == result.records[-1]["accuracy"]


def listening() -> tuple[Any, list[Any]]:
    """(a callback, a list of the rounds and "end" as they are told to it)."""
    told: list[Any] = []
    return SimpleNamespace(
        on_round_end=lambda record, state: told.append(record["round"]), on_end=lambda result: told.append("end")
    ), told


def test_rounds_may_be_raised_and_give_the_longer_run(tmp_path: Path) -> None:
    toys.federation({"federation.rounds": 2}).run(tmp_path / "grown")
    listener, told = listening()
    toys.federation({"federation.rounds": 5}, callbacks=[listener]).run(tmp_path / "grown", resume=True)
    toys.federation({"federation.rounds": 5}).run(tmp_path / "whole")
    assert told == [3, 4, 5, "end"]
    assert_same_run(tmp_path / "grown", tmp_path / "whole")
    with refused(RunDirectoryError):
        toys.federation({"federation.rounds": 2}).run(tmp_path / "grown", resume=True)


def test_a_rate_that_falls_goes_on_as_in_the_longer_run_where_rounds_are_raised(tmp_path: Path) -> None:
    """Finished rounds keep their learning rates."""
    falling = {"training.lr_schedule": "linear", "evaluation.record": "updates"}
    toys.federation({**falling, "federation.rounds": 2}).run(tmp_path / "grown")
    toys.federation({**falling, "federation.rounds": 4}).run(tmp_path / "grown", resume=True)
    found = recording.read(tmp_path / "grown")
    assert found is not None
    assert found.lr == pytest.approx({0: 0.05, 1: 0.025, 2: 0.025, 3: 0.0125})


def test_a_failed_run_is_resumed_by_the_same_object(tmp_path: Path, uninterrupted: Whole) -> None:
    """Resuming in the same object drops the clients' state of the failed round, as a new process does."""
    federation = everything_at_once()
    federation.callbacks.append(KilledAfter(2))
    with pytest.raises(KilledError):
        federation.run(tmp_path / "run")
    federation.callbacks.clear()
    for client in federation.assembly.clients:
        client.kept = client.personal * 2.0
    federation.run(tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", uninterrupted["everything_at_once"])


def test_another_model_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    toys.federation({"federation.rounds": 1}).run(tmp_path / "run")
    larger = toys.model()
    larger.classifier = torch.nn.Linear(8, 4)
    with refused(RunDirectoryError):
        toys.federation({"federation.rounds": 1}, model=larger).run(tmp_path / "run", resume=True)


# Kills of the command line's process.


OPEN = {
    "federation": {"rounds": 60, "server_optimizer": "adam", "server_lr": 0.05},
    "method": {"name": "fra_then_ffa", "switch_round": 25, "personal": ["classifier.*"]},
}
PRIVATE = {"federation": {"rounds": 40}, "privacy": {"unit": "client", "noise_multiplier": 1.5, "delta": 1e-3}}


@pytest.mark.nightly
@pytest.mark.parametrize("chosen", [OPEN, PRIVATE], ids=["open", "private"])
def test_five_real_kills(chosen: dict[str, Any], small_model: Path, small_data: Path, tmp_path: Path) -> None:
    """`train`, killed during start-up and then at four random instants, and resumed with --resume each time.

    A private run has charged every release.
    """
    tables = {name: dict(table) for name, table in chosen.items()}
    tables["federation"] |= {"cohort": 3, "sampling": "poisson"}
    usual = {"model.name": small_model, "data.client": "site", "training.batch_size": 4}
    usual |= {f"data.{part}": small_data / f"{part}.jsonl" for part in ("train", "test")}
    rng, private, ledger = random.Random(7), chosen is PRIVATE, tmp_path / "sites.sqlite"
    if private:
        usual["privacy.ledger"] = ledger
        Ledger.create(ledger, data_set="sites", epsilon=1000.0, delta=0.1)
    flat = {**usual, **{f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}}
    settings = tmp_path / "run.toml"
    settings.write_text("".join(f"{name} = {json.dumps(value, default=str)}\n" for name, value in flat.items()))
    victim, untouched = tmp_path / "victim", tmp_path / "untouched"
    _kill_when(["train", str(settings), "--out", str(victim)], "run directory", 0.0)
    for number in range(4):
        round_ = len(read_records(victim)) + rng.randint(2, 6)  # on a loaded machine the last kill may have been late
        command = ["train", str(settings)] if number == 0 else ["train"]
        _kill_when([*command, "--resume", "--out", str(victim)], f"round {round_}/", rng.uniform(0.0, 0.05))
        assert not private or len(private_toys.charges(ledger)) >= len(read_records(victim))
    rounds = tables["federation"]["rounds"]
    assert 5 <= len(read_records(victim)) < rounds
    assert cli.main(["train", "--resume", "--out", str(victim)]) == 0
    if not private:
        assert cli.main(["train", str(settings), "--out", str(untouched)]) == 0
        assert_same_run(victim, untouched)
        return
    said, opened = json.loads((victim / "result.json").read_text()), Ledger.open(ledger)
    assert said["rounds"] == rounds <= said["releases"] == len(private_toys.charges(opened)) <= rounds + 5
    assert len({row.run for row in opened.rows() if row.kind == "reserve"}) == 1, "it is one run all along"
    cost = accounting.epsilon(accounting.poisson_sampled(0.5, 1.5), said["releases"], 1e-3)
    assert said["epsilon"] == said["epsilon_cumulative"] == cost


def _kill_when(arguments: list[str], line: str, later: float) -> None:
    """Starts the command line and kills it `later` seconds after it prints a line that contains `line`."""
    command = [sys.executable, "-m", "secure_fed", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(line in said for said in process.stderr), f"{line!r} was never said"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=later)
        process.kill()
    assert process.returncode != 0
