"""Resuming a private run: with the stored release, or with a new one that is charged; never with another guarantee."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy import accounting
from privacy.errors import LedgerError
from secure_fed.errors import RunDirectoryError
from secure_fed.rounds.transport import Reply, Request
from secure_fed.runs import durable
from secure_fed.runs.directory import RELEASED
from secure_fed.runs.evaluation import evaluated
from secure_fed.runs.store import read_checkpoint, read_released
from tests.secure_fed import private_toys, toys
from tests.secure_fed.private_toys import NOISE, charged, federation

# With noise from the operating system, which no process can repeat.


class Fault(Exception):  # noqa: N818 - an event
    pass


def interrupted(path: Path, where: str, round_: int = 2, settings: dict[str, Any] = NOISE) -> None:
    """Runs with the operating system's noise until `round_` fails: while its clients compute, or after its release."""
    built = federation(settings)
    transport = built.assembly.transport

    class Failing:
        def exchange(self, requests: Mapping[int, Request]) -> Iterator[Reply]:
            if next(iter(requests.values())).round == round_ - 1:
                raise Fault
            return transport.exchange(requests)

    def failing(assembly: Any, state: Any) -> Any:
        if state.round == round_:
            raise Fault
        return evaluated(assembly, state)

    with pytest.MonkeyPatch.context() as patch:
        if where == "computing":
            built.assembly = replace(built.assembly, transport=Failing())
        else:
            patch.setattr("secure_fed.runs.run.evaluated", failing)
        with pytest.raises(Fault):
            built.run(path)


class States:
    def __init__(self) -> None:
        self.tensors: dict[int, bytes] = {}

    def on_round_end(self, record: dict[str, Any], state: Any) -> None:
        self.tensors[state.round] = state.tensors.to_bytes()


def test_a_kept_release_is_what_the_run_goes_on_with(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", "released")
    kept = read_released(tmp_path / "run")
    assert kept is not None
    assert kept.state.round == 2
    states = States()
    said = federation(NOISE, callbacks=[states]).run(tmp_path / "run", resume=True).summary
    assert states.tensors[2] == kept.state.tensors.to_bytes()
    assert sorted(states.tensors) == [2, 3]
    assert charged(tmp_path / "run") == said["releases"] == 3


def test_a_release_made_again_is_charged_again_and_told(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", "computing")
    said = federation(NOISE).run(tmp_path / "run", resume=True).summary
    assert charged(tmp_path / "run") == said["releases"] == 4
    assert said["epsilon"] == said["epsilon_cumulative"] == accounting.epsilon(accounting.unamplified(1.0), 4, 1e-3)
    assert said["epsilon"] > federation(NOISE).run().summary["epsilon"]
    assert said["rounds"] == 3
    assert said["privacy"]["released"].startswith("4 noised sums")


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


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"federation.rounds": 4}, r"its privacy too: federation\.rounds cannot be raised"),
        ({"privacy.noise_multiplier": 0.5}, r"privacy\.noise_multiplier: 0\.5, not 1\.0"),
        ({"privacy.clip_norm": 0.2}, r"privacy\.clip_norm: 0\.2, not 0\.1"),
    ],
)
def test_what_was_promised_cannot_be_changed(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    federation(NOISE).run(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=words):
        federation(NOISE | changed).run(tmp_path / "run", resume=True)


def test_injected_noise_cannot_be_slipped_in(tmp_path: Path) -> None:
    federation(NOISE).run(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="privacy"):
        federation(NOISE, 1).run(tmp_path / "run", resume=True)


def edited(path: Path, sql: str) -> None:
    with sqlite3.connect(path) as connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute(sql)
        for _, text in triggers:
            connection.execute(text)
    connection.close()


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        (
            "UPDATE chain SET body = replace(body, '\"releases\":1', '\"releases\":0') WHERE id = 3",
            "tampered with: row 3",
        ),
        ("UPDATE chain SET body = replace(body, '\"epsilon\":', '\"epsilon\":0') WHERE id = 2", "tampered with: row 2"),
        ("DELETE FROM chain WHERE id = (SELECT max(id) FROM chain)", "has been cut"),
        ("DELETE FROM chain WHERE id = 3", "tampered with"),
    ],
    ids=["fewer releases", "smaller reservation", "cut", "torn out"],
)
def test_a_ledger_changed_since_is_refused(tmp_path: Path, sql: str, words: str) -> None:
    interrupted(tmp_path / "run", "released")
    edited(tmp_path / "run" / "private" / "budget.sqlite", sql)
    with pytest.raises(LedgerError, match=words) as refused:
        federation(NOISE).run(tmp_path / "run", resume=True)
    assert refused.value.exit_code == 2


def test_an_old_copy_or_another_ledger_in_its_place_is_refused(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", "released", round_=1)
    shutil.copy(tmp_path / "run" / "private" / "budget.sqlite", tmp_path / "copy.sqlite")
    federation(NOISE).run(tmp_path / "run", resume=True)
    shutil.copy(tmp_path / "copy.sqlite", tmp_path / "run" / "private" / "budget.sqlite")
    with pytest.raises(LedgerError, match="has been cut"):
        federation(NOISE).run(tmp_path / "run", resume=True)
    federation(NOISE).run(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "private" / "budget.sqlite", tmp_path / "run" / "private" / "budget.sqlite")
    with pytest.raises(LedgerError, match="different ledger"):
        federation(NOISE).run(tmp_path / "run", resume=True)


# A shared ledger with less room than the plan needs.


def test_a_run_that_stops_early_goes_on_to_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before or after its reservation, the run gets the releases that the ledger has room for."""
    for number, deadly in enumerate(
        ("run.json:replaced", "budget.json:replaced", f"{RELEASED}:synced", f"{RELEASED}:replaced")
    ):
        ledger = tmp_path / f"{number}.sqlite"
        private_toys.Ledger.create(ledger, data_set="wards", epsilon=7.0, delta=0.1)
        stop = {"privacy.ledger": str(ledger), "privacy.on_exhausted": "stop", "federation.rounds": 6}

        def crash_point(name: str, deadly: str = deadly) -> None:
            if name == deadly:
                raise Fault

        with monkeypatch.context() as patched:
            patched.setattr(durable, "crash_point", crash_point)
            with pytest.raises(Fault):
                federation(NOISE | stop).run(tmp_path / str(number))
        said = federation(NOISE | stop).run(tmp_path / str(number), resume=True).summary
        assert said["releases"] == 3
        assert said["rounds"] == (2 if deadly == f"{RELEASED}:synced" else 3)
        assert said["epsilon_cumulative"] <= 7
        assert said["ended_early"]
