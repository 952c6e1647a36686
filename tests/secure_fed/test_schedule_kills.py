"""A run in turn with correlated noise, killed at any instant: rounds are computed once and charged, and the noise goes on.

A process kills itself at a named instant between two durable steps, and another one resumes the run. The transport notes on
disk every computed round. Noise is the operating system's, so a resumed run needs the keys on disk.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from privacy import ledger_file
from secure_fed.rounds.transport import Reply, Request
from secure_fed.runs import durable, noise_key
from secure_fed.runs.directory import RELEASED
from secure_fed.runs.noise_key import NOISE_KEY, NoiseKeys
from secure_fed.runs.store import read_records
from tests import accounts
from tests.cells import chosen
from tests.secure_fed.in_turn import BANDED, federation
from tests.secure_fed.private_toys import charged
from tests.secure_fed.test_reliability import _PROCESSES

ROUNDS = 3
SETTINGS = {**BANDED, "federation.rounds": ROUNDS, "privacy.band": 2, "evaluation.every": ROUNDS, "method.rank": 2}


@dataclass
class Noting:
    """A transport that adds the number of every requested round to a file."""

    inner: Any
    path: Path

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[Reply]:
        with self.path.open("a") as file:
            file.write(f"{next(iter(requests.values())).round}\n")
        return self.inner.exchange(requests)


def run(path: Path, *, resume: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    built = federation(SETTINGS)
    built.assembly = replace(built.assembly, transport=Noting(built.assembly.transport, path.with_suffix(".asked")))
    return built.run(path, resume=resume).summary


def run_and_die(path: Path, resume: bool, deadly: int) -> None:
    left = deadly

    def crash_point(name: str) -> None:
        nonlocal left
        if left == 0:
            if hasattr(signal, "SIGKILL"):
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
        left -= 1

    durable.crash_point = ledger_file.crash_point = noise_key.crash_point = crash_point
    with accounts.coarse():
        run(path, resume=resume)


def kill_at(path: Path, deadly: int, *, resume: bool = False) -> None:
    process = _PROCESSES.Process(target=run_and_die, args=(path, resume, deadly))  # type: ignore[attr-defined]
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if hasattr(signal, "SIGKILL") else 1)


def asked(path: Path) -> list[int]:
    noted = path.with_suffix(".asked")
    return [int(line) for line in noted.read_text().splitlines()] if noted.exists() else []


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The named instants of a run, in order."""
    passed: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        for module in (durable, ledger_file, noise_key):
            patched.setattr(module, "crash_point", passed.append)
        run(tmp_path_factory.mktemp("whole") / "run", resume=False)
    return passed


def at(points: list[str], name: str, which: int = 0) -> int:
    return [index for index, point in enumerate(points) if point == name][which]


def test_keys_are_on_disk_before_the_first_charge_and_gone_after_the_result(points: list[str]) -> None:
    assert points.count("noise.key:replaced") == 1
    assert "budget.json:replaced" in points[at(points, "noise.key:replaced") : at(points, f"{RELEASED}:written")]
    assert points[-2:] == ["result.json:replaced", "noise.key:erased"]


def require_whole(path: Path) -> dict[str, Any]:
    """Resumes the run to its end: every round is charged once and computed at most once. Returns the result."""
    before = asked(path)
    if before:
        assert charged(path) >= len(before)
    if (path / "private" / NOISE_KEY).exists():
        assert (path / "private" / NOISE_KEY).stat().st_mode & 0o777 == 0o600
    said = run(path, resume=True)
    assert max(Counter(asked(path)).values()) == 1
    assert charged(path) == said["releases"] == ROUNDS
    records = read_records(path)
    assert [record["round"] for record in records] == [1, 2, 3]
    assert not (path / "private" / NOISE_KEY).exists()
    assert said["ended_early"] is None
    return said


def deadly(points: list[str]) -> dict[str, int]:
    """Name -> index of an instant around the writing of the keys, the first charge, the second release and the end."""
    keys = at(points, "noise.key:written")
    released = at(points, f"{RELEASED}:written", 1)
    return {
        "keys written": keys,
        "keys there": keys + 2,
        "charged": keys + 8,
        "computed": released,
        "released": released + 2,
        "erased": len(points) - 1,
    }


WHERE = ("keys written", "keys there", "charged", "computed", "released", "erased")


@pytest.mark.parametrize("where", chosen(WHERE, ["keys there", "computed"]))
def test_killed_at_a_named_instant(points: list[str], tmp_path: Path, where: str) -> None:
    path = tmp_path / "run"
    kill_at(path, deadly(points)[where])
    assert charged(path) == {"keys written": 0, "keys there": 0, "charged": 1, "erased": 3}.get(where, 2)
    assert (path / "private" / NOISE_KEY).exists() == (where not in ("keys written", "erased"))
    require_whole(path)


@pytest.mark.nightly
def test_killed_at_every_instant_and_again_in_the_next_start(points: list[str], tmp_path: Path) -> None:
    for first in range(at(points, "noise.key:written"), len(points), 5):
        path = tmp_path / f"run-{first}"
        kill_at(path, first)
        if first < at(points, f"{RELEASED}:written", 1):
            kill_at(path, 22, resume=True)
            keys = NoiseKeys.from_bytes((path / "private" / NOISE_KEY).read_bytes())
            assert keys.starts[0][0] == 0
        require_whole(path)
