"""The run directory: what a run writes, and how it goes on after being killed at any instant.

    config.json              the configuration, resolved; written first, so a directory with one holds a run
    run.json                 facts fixed at the start: labels, clients, partition, versions
    metrics.jsonl            a line for every finished round
    checkpoint.safetensors   the state after the last finished round, replaced in one step
    released.safetensors     with privacy: the state after the last release, before anything was done with it
    result.json, report.html

A round's line is written before its checkpoint, so the metrics may be one round ahead of the state; resuming drops that line
and computes the round again, to the same bits, because all randomness is derived from (seed, round, client).
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import safetensors
import safetensors.torch

from secure_fed.config import RunConfig
from secure_fed.durable import append_line, atomic_write, clear_parts, part_of
from secure_fed.errors import RunDirectoryError, StorageError
from secure_fed.methods.method import State
from secure_fed.run_dir import CONFIG, FACTS, METRICS, RESULT, read_config, read_facts, usable
from secure_fed.tensors import Tensors

CHECKPOINT, RELEASED = "checkpoint.safetensors", "released.safetensors"
LOCK = ".lock"


@dataclass(frozen=True)
class Checkpoint:
    """The state after some round, every client's personal tensors, and the record of a round whose end is not saved yet."""

    state: State
    personal: Mapping[int, Tensors]
    record: dict[str, Any] = field(default_factory=dict)


class RunStore:
    """One run directory, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with usable(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _taken(path)
        clear_parts(path)

    def close(self) -> None:
        self._lock.release()

    def begin(self, config: RunConfig, facts: Mapping[str, Any]) -> None:
        """Start a new run here, or check that this is the directory of the same run on the same data.

        A start that was killed on its way is gone on with.
        """
        held = read_config(self.path) if (self.path / CONFIG).exists() else None
        described = (self.path / FACTS).exists()
        if held is None:
            require_unused(self.path)
        else:
            _require_same(self.path, config, held)
        if described:
            _require_same_data(self.path, facts)
        if config != held:
            atomic_write(self.path / CONFIG, _pretty(config.to_dict()))
        if not described:
            atomic_write(self.path / FACTS, _pretty(facts))

    def save(self, state: State, personal: Mapping[int, Tensors], record: Mapping[str, Any]) -> None:
        """Make a finished round durable."""
        append_line(self.path / METRICS, json.dumps(record))
        self._write(CHECKPOINT, state, personal, {})

    def keep(self, state: State, personal: Mapping[int, Tensors], record: Mapping[str, Any]) -> None:
        """Make a release durable before anything is done with it."""
        self._write(RELEASED, state, personal, record)

    def _write(self, name: str, state: State, personal: Mapping[int, Tensors], record: Mapping[str, Any]) -> None:
        tensors = {f"state/{name}": part for name, part in state.tensors.parts().items()}
        tensors |= {f"memory/{name}": part for name, part in state.memory.parts().items()}
        for client, kept in personal.items():
            tensors |= {f"client/{client}/{name}": part for name, part in kept.parts().items()}
        whole = {name: part.detach().cpu().contiguous() for name, part in tensors.items()}
        said = {"round": state.round, "clip_norm": state.clip_norm, "record": record}
        # One text, because the order of several is another in every process.
        atomic_write(self.path / name, safetensors.torch.save(whole, {"said": json.dumps(said)}))

    def restore(self) -> tuple[Checkpoint | None, list[dict[str, Any]]]:
        """The last finished round and the records up to it; later or torn lines of the metrics are dropped."""
        checkpoint = read_checkpoint(self.path)
        finished = checkpoint.state.round if checkpoint else 0
        records = read_records(self.path, finished)
        if len(records) != finished:
            raise RunDirectoryError(
                f"{self.path / METRICS} is damaged: it tells of {len(records)} of the {finished} finished rounds; "
                "start again in another --out"
            )
        if (self.path / METRICS).exists():
            atomic_write(self.path / METRICS, "".join(json.dumps(record) + "\n" for record in records))
        return checkpoint, records

    def finish(self, result: Mapping[str, Any]) -> None:
        atomic_write(self.path / RESULT, _pretty(result))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the run in this directory as a `RunStore` does, for whoever reads it and writes beside it.

    RunDirectoryError where another process holds it. Where there is no run, or nothing can be written, nothing is held.
    """
    lock = None
    if os.path.exists(path / CONFIG):  # unlike Path.exists, False of what cannot be looked into
        with suppress(OSError, RuntimeError):
            lock = _taken(path)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


@contextmanager
def resumable(path: Path) -> Iterator[None]:
    """Whatever stops a run in this directory from outside, with the way to go on with it."""
    try:
        yield
    except (KeyboardInterrupt, StorageError) as error:
        if not os.path.exists(path / CONFIG):
            raise
        command = f"`secure-fed train --resume --out {shlex.quote(str(path))}`"
        stopped = isinstance(error, KeyboardInterrupt)
        raise type(error)(f"go on with {command}" if stopped else f"{error}, with {command}") from error


def _taken(path: Path) -> filelock.BaseFileLock:
    """The directory's lock, taken; OSError where the system refuses to make one."""
    lock = filelock.FileLock(path / LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:  # an OSError too, but not one about writing
        raise RunDirectoryError(
            f"{path} is in use by another process; wait for it, or choose another directory"
        ) from error
    return lock


def read_checkpoint(path: Path, name: str = CHECKPOINT) -> Checkpoint | None:
    """The state after the last finished round, if any round finished; or after the last release."""
    file = path / name
    if not file.exists():
        return None
    groups: dict[str, dict[str, Any]] = {"state": {}, "memory": {}}
    personal: dict[int, dict[str, Any]] = {}
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            said = json.loads(opened.metadata()["said"])
            finished, clip_norm, record = int(said["round"]), float(said["clip_norm"]), dict(said["record"])
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                group, _, rest = name.partition("/")
                # A copy: the file may be replaced while we hold it, and kernels may sum in an order that depends on
                # how a tensor lies in memory, which must be as in a run that was never stopped.
                tensor = opened.get_tensor(name).clone()
                if group == "client":
                    client, _, rest = rest.partition("/")
                    personal.setdefault(int(client), {})[rest] = tensor
                else:
                    groups[group][rest] = tensor
        tensors, memory = (Tensors.from_parts(groups[group]) for group in ("state", "memory"))
        own = {client: Tensors.from_parts(parts) for client, parts in personal.items()}
        return Checkpoint(State(tensors, finished, memory, clip_norm), own, record)
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{file} is damaged ({error}); start again in another --out") from error


def read_records(path: Path, upto: int | None = None) -> list[dict[str, Any]]:
    """The rounds' records in order, at most to round `upto`; a torn last line is not one."""
    file = path / METRICS
    if not file.exists():
        return []
    records: list[dict[str, Any]] = []
    for line in file.read_bytes().splitlines():
        try:
            record = json.loads(line)
            number = record["round"]
        except (ValueError, TypeError, KeyError):
            break
        if number == len(records) + 1 and (upto is None or number <= upto):
            records.append(record)
    return records


def _require_same(path: Path, config: RunConfig, held: RunConfig) -> None:
    rounds = ("federation", "rounds")
    if config.federation.rounds < held.federation.rounds:
        raise RunDirectoryError(
            f"{path} was planned for {held.federation.rounds} rounds; federation.rounds may be raised on resuming, "
            f"not lowered to {config.federation.rounds}"
        )
    if config.federation.rounds > held.federation.rounds and held.privacy.unit != "none":
        raise RunDirectoryError(
            f"{path} was planned for {held.federation.rounds} rounds, and its privacy for these: federation.rounds cannot be "
            "raised in view of what was released; start a new run"
        )
    differences = config.replace({rounds: held.federation.rounds}).differences(held)
    if differences:
        raise RunDirectoryError(f"{path} was written by another configuration: {'; '.join(differences)}")


def _require_same_data(path: Path, facts: Mapping[str, Any]) -> None:
    held = read_facts(path)
    for name, value in facts.items():
        if name != "versions" and json.dumps(value) != json.dumps(held.get(name)):
            raise RunDirectoryError(
                f"{path} was begun with other data: {name} in {FACTS} differs; resume with what it was begun with"
            )


def require_unused(path: Path) -> None:
    """Refuse a directory that holds a run, or anything but what a start killed on its way leaves."""
    with usable(path):
        if (path / CONFIG).exists():
            raise RunDirectoryError(
                f"{path} already holds a run; add --resume to go on with it or choose another --out"
            )
        if path.exists() and not (path.is_dir() and all(_left_by_a_start(file.name) for file in path.iterdir())):
            raise RunDirectoryError(f"{path} is not an empty directory; choose another --out")


def _left_by_a_start(name: str) -> bool:
    return name == LOCK or part_of(name) == CONFIG


def _pretty(value: Mapping[str, Any] | Sequence[Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
