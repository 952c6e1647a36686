"""A private run killed at any instant, and resumed: every release is charged before it is computed, none is published twice.

A process kills itself at a named instant between two durable steps of the run or of its ledger. Then the run is resumed, and
never with another guarantee. The transport notes the round of every computed pass on disk, so that the tests can count repeated
ones. In turn, with correlated noise, no round is computed twice, and the noise goes on by the keys on disk.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from privacy import accounting
from privacy.errors import LedgerError
from secure_fed.errors import RunDirectoryError
from secure_fed.federation import Federation
from secure_fed.rounds.transport import Reply, Request
from secure_fed.runs import durable
from secure_fed.runs.directory import RELEASED
from secure_fed.runs.evaluation import evaluated
from secure_fed.runs.noise_key import NOISE_KEY, NoiseKeys
from secure_fed.runs.store import read_checkpoint, read_records, read_released
from tests import accounts
from tests.cells import chosen
from tests.contracts.runs import KilledAfter, KilledError
from tests.golden import refused
from tests.privacy.test_ledger_tampering import raw
from tests.secure_fed import in_turn as turns
from tests.secure_fed import private_toys, toys
from tests.secure_fed.private_toys import NOISE, charged, federation
from tests.secure_fed.test_reliability import Whole, _files, instants, kill_at

ROUNDS = 3  # of the toys


_LEDGER = ["appended", "committed"]  # every transaction of the ledger, read-only ones included
_START = [
    *_files("config.json", "facts.json", "run.json"),
    *("built", "linked", "created", *_LEDGER * 2),
    *(*_files("budget.json"), *_LEDGER, *_files("budget.json"), *_LEDGER),
]
_CHARGE = [*_LEDGER, *_LEDGER, *_files("budget.json")]
_LINES = [f"{name}:{step}" for name in ("rounds.jsonl", "metrics.jsonl") for step in ("torn", "appended")]


def _round(number: int) -> list[str]:
    ends = _files(f"personal-{number}.safetensors", "checkpoint.safetensors")
    return [*_CHARGE, *_files(RELEASED), *_LINES, *ends]


_ROUND = _round(1)
POINTS = [
    *_START,
    *_round(1),
    *_round(2),
    *_round(3),
    *_LEDGER * 2,
    *_files("facts.json", "figures.json", "result.json"),
    "noise.key:erased",  # if there was one
]
CHARGED = len(_START) + 3  # the charge of the first round is on disk
COMPUTED = len(_START) + len(_CHARGE)  # the first round's release is computed, and not yet on disk
KEPT = COMPUTED + 2  # the first round's release is on disk
_SHARED = [point for point in POINTS if not point.startswith("personal-")]  # without personal tensors
_SHARED_ROUND = len(_ROUND) - 3


def central() -> Federation:
    """Server momentum, an adaptive clip norm and personal tensors; no limit on epsilon."""
    settings = {
        **NOISE,
        "federation.cohort": 2,
        "federation.server_optimizer": "momentum",
        "method.personal": ["classifier"],
        "privacy.clip_quantile": 0.5,
    }
    return federation(settings, 7)


def to_a_target() -> Federation:
    """A limit of epsilon 8, which the planned rounds use up."""
    return federation({**NOISE, "privacy.noise_multiplier": None, "privacy.epsilon": 8.0}, 7)


def local() -> Federation:
    """Noise of the clients. Each is charged by itself and takes part in two of three rounds: one round may be repeated."""
    return federation({**NOISE, "privacy.noise": "local", "federation.cohort": 2, "federation.seed": 1}, 7)


def in_turn() -> Federation:
    """Correlated noise. It is the operating system's, so a resumed run needs the keys on disk."""
    settings = {"federation.rounds": ROUNDS, "privacy.band": 2, "evaluation.every": ROUNDS, "method.rank": 2}
    return turns.federation({**turns.BANDED, **settings})


SCENARIOS: dict[str, Callable[[], Federation]] = {f.__name__: f for f in (central, to_a_target, local, in_turn)}


@dataclass
class Noting:
    """A transport that adds the round of every pass to a file, as an observer of its messages could."""

    inner: Any
    path: Path

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[Reply]:
        with self.path.open("a") as file:
            file.write(f"{next(iter(requests.values())).round}\n")
        return self.inner.exchange(requests)


def run(scenario: str, path: Path, *, resume: bool = False) -> dict[str, Any]:
    torch.set_num_threads(1)
    with accounts.coarse():  # as in the process that is killed
        built = SCENARIOS[scenario]()
        built.assembly = replace(built.assembly, transport=Noting(built.assembly.transport, path.with_suffix(".asked")))
        return built.run(path, resume=resume).summary


def asked(path: Path) -> list[int]:
    """The rounds of the passes computed by all processes of this run."""
    noted = path.with_suffix(".asked")
    return [int(line) for line in noted.read_text().splitlines()] if noted.exists() else []


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(run, tmp_path_factory)


def assert_same_released(left: Path, right: Path) -> None:
    """Both folders hold the same state, settings, releases and records, apart from times."""
    kept = [file.name for file in (left / "private").glob("personal-*")]
    for name in ("checkpoint.safetensors", "config.json", "run.json", *(f"private/{one}" for one in (RELEASED, *kept))):
        assert (left / name).read_bytes() == (right / name).read_bytes(), name
    assert toys.without_time(read_records(left)) == toys.without_time(read_records(right))


# Named instants.


def test_what_is_written_in_which_order(tmp_path: Path) -> None:
    """A reservation, then in each round: the charge, the ledger's new head, the release, the record and the checkpoint."""
    assert instants(run, "central", tmp_path / "run") == POINTS
    assert POINTS[CHARGED - 1 : CHARGED + 1] == ["appended", "committed"]
    assert (POINTS[COMPUTED], POINTS[KEPT]) == (f"{RELEASED}:written", f"{RELEASED}:replaced")


@pytest.mark.parametrize(
    "deadly",
    chosen(
        range(len(_START) - 14, len(_START) + len(_ROUND)),
        [CHARGED, COMPUTED, KEPT],
    ),
    ids=lambda index: f"{index}-{POINTS[index]}",
)
def test_killed_at_a_named_instant(uninterrupted: Whole, tmp_path: Path, deadly: int) -> None:
    """Injected noise makes tensors equal to the bit. Every computed pass is charged; a kill wastes at most one charge."""
    path = tmp_path / "run"
    kill_at(deadly, run, "central", path)
    if asked(path):
        assert charged(path) >= len(asked(path))
    said = run("central", path, resume=True)
    assert_same_released(path, uninterrupted["central"])
    wasted = CHARGED <= deadly < KEPT
    assert charged(path) == said["releases"] == ROUNDS + wasted
    assert len(asked(path)) == ROUNDS + (COMPUTED <= deadly < KEPT)
    plan = SCENARIOS["central"]().assembly.protection.plan
    assert plan is not None
    assert said["epsilon"] == accounting.epsilon(plan.release, ROUNDS + wasted, 1e-3)
    assert said["epsilon_cumulative"] == said["epsilon"]
    assert said["ended_early"] is None


@pytest.mark.parametrize(
    "deadly",
    chosen([CHARGED, COMPUTED, KEPT, KEPT + _SHARED_ROUND, COMPUTED + 2 * _SHARED_ROUND], [COMPUTED]),
)
def test_a_budget_for_these_rounds_does_not_pay_for_one_made_again(
    uninterrupted: Whole, tmp_path: Path, deadly: int
) -> None:
    path = tmp_path / "run"
    kill_at(deadly, run, "to_a_target", path)
    said = run("to_a_target", path, resume=True)
    assert charged(path) == said["releases"] == ROUNDS
    assert 0.99 * 8 < said["epsilon"] <= 8
    assert _SHARED[COMPUTED + 2 * _SHARED_ROUND] == f"{RELEASED}:written"
    if _SHARED[deadly] == f"{RELEASED}:replaced":
        assert (said["rounds"], said["ended_early"]) == (ROUNDS, None)
        assert_same_released(path, uninterrupted["to_a_target"])
    else:
        assert said["rounds"] == ROUNDS - 1
        assert f"after {ROUNDS - 1} of {ROUNDS} rounds" in said["ended_early"]
        assert "above privacy.epsilon = 8" in said["ended_early"]
        whole = read_records(uninterrupted["to_a_target"])[: ROUNDS - 1]
        assert toys.without_time(read_records(path)) == toys.without_time(whole)
        assert run("to_a_target", path, resume=True)["rounds"] == ROUNDS - 1


@pytest.mark.parametrize("deadly", chosen(range(27, 50, 4), [31]))
def test_clients_are_charged_before_they_compute(uninterrupted: Whole, tmp_path: Path, deadly: int) -> None:
    path = tmp_path / "run"
    kill_at(deadly, run, "local", path)
    said = run("local", path, resume=True)
    assert_same_released(path, uninterrupted["local"])
    by_client = [who for who, _ in private_toys.charges(private_toys.own_ledger(path))]
    assert 2 * ROUNDS <= len(by_client) <= 2 * ROUNDS + 2
    assert said["releases"] == max(map(by_client.count, by_client)) <= ROUNDS
    assert said["epsilon"] == accounting.epsilon(accounting.replaced(1.0), ROUNDS, 1e-3)


# In turn, with correlated noise.


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The named instants of a run in turn, in order."""
    return instants(run, "in_turn", tmp_path_factory.mktemp("whole") / "run")


def at(points: list[str], name: str, which: int = 0) -> int:
    return [index for index, point in enumerate(points) if point == name][which]


def test_keys_are_on_disk_before_the_first_charge_and_gone_after_the_result(points: list[str]) -> None:
    assert points.count("noise.key:replaced") == 1
    assert "budget.json:replaced" in points[at(points, "noise.key:replaced") : at(points, f"{RELEASED}:written")]
    assert points[-2:] == ["result.json:replaced", "noise.key:erased"]


def require_whole(path: Path) -> None:
    """Resumes a run in turn to its end: every round is charged once and computed at most once."""
    if before := asked(path):
        assert charged(path) >= len(before)
    if (path / "private" / NOISE_KEY).exists():
        assert (path / "private" / NOISE_KEY).stat().st_mode & 0o777 == 0o600
    said = run("in_turn", path, resume=True)
    assert max(Counter(asked(path)).values()) == 1
    assert charged(path) == said["releases"] == ROUNDS
    assert [record["round"] for record in read_records(path)] == [1, 2, 3]
    assert not (path / "private" / NOISE_KEY).exists()
    assert said["ended_early"] is None


# Name -> the index of an instant around the writing of the keys, the first charge, the second release and the end.
WHERE: dict[str, Callable[[list[str]], int]] = {
    "keys written": lambda points: at(points, "noise.key:written"),
    "keys there": lambda points: at(points, "noise.key:written") + 2,
    "charged": lambda points: at(points, "noise.key:written") + 8,
    "computed": lambda points: at(points, f"{RELEASED}:written", 1),
    "released": lambda points: at(points, f"{RELEASED}:written", 1) + 2,
    "erased": lambda points: len(points) - 1,
}


@pytest.mark.parametrize("where", chosen(WHERE, ["keys there", "computed"]))
def test_a_run_in_turn_killed_at_a_named_instant(points: list[str], tmp_path: Path, where: str) -> None:
    path = tmp_path / "run"
    kill_at(WHERE[where](points), run, "in_turn", path)
    assert charged(path) == {"keys written": 0, "keys there": 0, "charged": 1, "erased": 3}.get(where, 2)
    assert (path / "private" / NOISE_KEY).exists() == (where not in ("keys written", "erased"))
    require_whole(path)


@pytest.mark.nightly
def test_a_run_in_turn_killed_at_every_instant_and_again_in_the_next_start(points: list[str], tmp_path: Path) -> None:
    for first in range(at(points, "noise.key:written"), len(points), 5):
        path = tmp_path / f"run-{first}"
        kill_at(first, run, "in_turn", path)
        if first < at(points, f"{RELEASED}:written", 1):
            kill_at(22, run, "in_turn", path, resume=True)
            keys = NoiseKeys.from_bytes((path / "private" / NOISE_KEY).read_bytes())
            assert keys.starts[0][0] == 0
        require_whole(path)


def test_what_was_released_is_on_disk_before_anybody_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is charged before clients compute, stored before its evaluation, and saved before callbacks get it."""
    path, seen = tmp_path / "run", []
    built = federation(NOISE)
    transport = built.assembly.transport

    class Spying:
        def exchange(self, requests: Mapping[int, Request]) -> Iterator[Reply]:
            (round_,) = {request.round for request in requests.values()}
            assert charged(path) == round_ + 1
            seen.append(f"computed {round_ + 1}")
            return transport.exchange(requests)

        def on_round_end(self, record: dict[str, Any], state: Any) -> None:
            saved = read_checkpoint(path)
            assert saved is not None
            assert toys.same(saved.state.tensors, state.tensors)
            seen.append(f"told {state.round}")

    def spied(assembly: Any, state: Any) -> Any:
        kept = read_released(path)
        assert kept is not None
        assert kept.state.round == state.round
        assert toys.same(kept.state.tensors, state.tensors)
        seen.append(f"evaluated {state.round}")
        return evaluated(assembly, state)

    spy = Spying()
    built.assembly = replace(built.assembly, transport=spy)
    monkeypatch.setattr("secure_fed.runs.run.evaluated", spied)
    built.callbacks.append(spy)
    built.run(path)
    assert seen == [f"{what} {round_}" for round_ in (1, 2, 3) for what in ("computed", "evaluated", "told")]


# Refused on resuming.


def test_what_was_promised_cannot_be_changed_and_no_noise_slipped_in(tmp_path: Path) -> None:
    federation(NOISE).run(tmp_path / "run")
    for changed in ({"federation.rounds": 4}, {"privacy.noise_multiplier": 0.5}, {"privacy.clip_norm": 0.2}):
        with refused(RunDirectoryError):
            federation(NOISE | changed).run(tmp_path / "run", resume=True)
    with refused(RunDirectoryError):
        federation(NOISE, 1).run(tmp_path / "run", resume=True)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with refused(RunDirectoryError):  # it has a ledger of its own
        federation(NOISE).run(tmp_path / "copy", resume=True)


def test_a_ledger_changed_since_an_old_copy_or_another_one_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "run" / "private" / "budget.sqlite"
    with pytest.raises(KilledError):
        federation(NOISE, callbacks=[KilledAfter(1)]).run(tmp_path / "run")
    shutil.copy(own, tmp_path / "old.sqlite")
    federation(NOISE).run(tmp_path / "run", resume=True)
    federation(NOISE).run(tmp_path / "other")
    shutil.copy(own, tmp_path / "edited.sqlite")
    with raw(tmp_path / "edited.sqlite") as connection:
        fewer = "UPDATE chain SET body = replace(body, '\"releases\":1', '\"releases\":0') WHERE id = 3"
        assert connection.execute(fewer).rowcount == 1
    for ledger in ("old.sqlite", "other/private/budget.sqlite", "edited.sqlite"):
        shutil.copy(tmp_path / ledger, own)
        with refused(LedgerError, hide="[0-9a-f]{8,}") as error:
            federation(NOISE).run(tmp_path / "run", resume=True)
        assert error.value.exit_code == 2


STOPS = ("run.json:replaced", "budget.json:replaced", f"{RELEASED}:synced", f"{RELEASED}:replaced")


@pytest.mark.parametrize("deadly", chosen(STOPS, STOPS[1:3]))
def test_a_run_that_stops_early_goes_on_to_where_it_stopped(deadly: str, tmp_path: Path) -> None:
    """Killed before or after its reservation, the run gets the releases that the ledger has room for."""
    ledger, path = tmp_path / "wards.sqlite", tmp_path / "run"
    private_toys.Ledger.create(ledger, data_set="wards", epsilon=7.0, delta=0.1)
    stop = {"privacy.ledger": str(ledger), "privacy.on_exhausted": "stop", "federation.rounds": 6}

    def crash_point(name: str) -> None:
        if name == deadly:
            raise KilledError

    with patch.object(durable, "crash_point", crash_point), pytest.raises(KilledError):
        federation(NOISE | stop).run(path)
    said = federation(NOISE | stop).run(path, resume=True).summary
    assert (said["releases"], said["rounds"]) == (3, 2 if deadly == f"{RELEASED}:synced" else 3)
    assert said["epsilon_cumulative"] <= 7
    assert said["ended_early"]
