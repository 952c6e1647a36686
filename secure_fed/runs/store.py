"""The run directory: the files that a run writes, and how it resumes after being killed at any instant.

    config.json              the configuration, resolved; written first, so a directory with this file contains a run
    run.json                 facts fixed at the start: labels, clients, versions
    metrics.jsonl            a line for every finished round
    checkpoint.safetensors   the state after the last finished round, replaced in one step
    best.safetensors         the state of the best evaluation, if it is kept
    result.json, report.html
    private/                 only its owner can read it:
      facts.json             digests of the data, under this run's key, and the other withheld facts of the start
      rounds.jsonl           with privacy: the withheld part of every finished round
      personal-N.safetensors the personal tensors of clients after round N
      released.safetensors   with privacy: the state after the last release, before any further processing
      figures.json           with privacy: the withheld part of the result
      membership.json, recording/, budget.json, budget.sqlite, noise.key, attendance, report.html, audits, trackers' files

A round's lines are written before its checkpoint, so the metrics may be one round ahead of the state; resuming drops that line
and computes the round again: without privacy to the same bits, because all randomness is derived from (seed, round, client),
and with privacy from its stored release, if there is one. Personal tensors are in files beside the checkpoint, not in it: a
round's file is written before its checkpoint, and older files are removed after it.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from secure_fed.config import RunConfig
from secure_fed.errors import RunDirectoryError, StorageError
from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.methods.method import State
from secure_fed.runs import published
from secure_fed.runs.checkpoint import Checkpoint, personal_file, read_checkpoint, write_checkpoint
from secure_fed.runs.directory import (
    BEST,
    CHECKPOINT,
    CONFIG,
    FACTS,
    LOCK,
    MEMBERSHIP,
    METRICS,
    OWN_FACTS,
    OWN_RESULT,
    OWN_ROUNDS,
    PRIVATE,
    RELEASED,
    RESULT,
    made_private,
    private_part,
    read_config,
    read_facts,
    require_unused,
    usable,
    without_times,
)
from secure_fed.runs.durable import append_line, atomic_write, clear_parts
from secure_fed.runs.same_run import differing, differing_digests, require_same, require_same_data, sealed
from secure_fed.tensors.tensors import Tensors

Record = Mapping[str, Any]


class RunStore:
    """One run directory, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with usable(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _taken(path)
        clear_parts(path)
        clear_parts(private_part(path))
        self._private = False

    def close(self) -> None:
        self._lock.release()

    def begin(self, config: RunConfig, facts: Mapping[str, Any], admits: Callable[[State], bool]) -> None:
        """Start a new run here, or check that this is the directory of the same run on the same data.

        A start that was killed is resumed. admits: whether a state can be one of this run.
        """
        require_same_start(self.path, config, facts, admits)
        self._private = config.privacy.unit != "none"
        shown, own = published.of_facts(facts, private=self._private)
        held = read_config(self.path) if (self.path / CONFIG).exists() else None
        described = (self.path / FACTS).exists()
        noted = described or (private_part(self.path) / OWN_FACTS).exists()
        if config != held:
            atomic_write(self.path / CONFIG, _pretty(config.to_dict()))
        folder = made_private(self.path)
        if not noted:
            key = secrets.token_hex(32)
            atomic_write(folder / OWN_FACTS, _pretty({"key": key, **sealed(own, key)}), private=True)
        if not described:
            atomic_write(self.path / FACTS, _pretty(shown))

    def save(self, state: State, personal: Mapping[int, Tensors], shown: Record, withheld: Record) -> None:
        """Make a finished round durable. withheld: the private part of its record."""
        folder = private_part(self.path)
        if self._private:
            append_line(folder / OWN_ROUNDS, json.dumps({"round": state.round, **withheld}), private=True)
        append_line(self.path / METRICS, json.dumps(shown))
        if personal:
            write_checkpoint(
                folder / personal_file(state.round), State(Tensors(), state.round), personal, {}, private=True
            )
        write_checkpoint(self.path / CHECKPOINT, state, {}, {}, private=False)
        self._keep_personal_of(state.round)

    def amend(self, shown: Record, withheld: Record) -> None:
        """Replace the last round's record by one with an evaluation that was made after the round was saved."""
        files = [(self.path / METRICS, dict(shown))]
        if self._private:
            files.append((private_part(self.path) / OWN_ROUNDS, {"round": shown["round"], **withheld}))
        for file, record in files:
            lines = [*read_lines(file)[:-1], record]
            atomic_write(file, "".join(json.dumps(one) + "\n" for one in lines), private=file.parent != self.path)

    def keep_best(self, state: State) -> None:
        write_checkpoint(self.path / BEST, state, {}, {}, private=False)

    def save_membership(self, pool: AuditPool) -> None:
        """Note for the owner which units of the audit pool are members, once: it follows from the seed and the units."""
        path = private_part(self.path) / MEMBERSHIP
        if pool.units and not path.exists():
            atomic_write(path, json.dumps(pool.record(), indent=1) + "\n", private=True)

    def _keep_personal_of(self, round_: int) -> None:
        for file in private_part(self.path).glob(personal_file("*")):
            if file.name != personal_file(round_):
                file.unlink()

    def keep(self, state: State, personal: Mapping[int, Tensors], record: Record) -> None:
        """Make a release durable before any further processing."""
        write_checkpoint(private_part(self.path) / RELEASED, state, personal, record, private=True)

    def restore(self) -> tuple[Checkpoint | None, list[dict[str, Any]]]:
        """The last finished round and the records up to it, with their withheld part; later or torn lines are dropped."""
        checkpoint = read_checkpoint(self.path)
        if checkpoint is None:
            self._require_no_round()
        finished = checkpoint.state.round if checkpoint else 0
        self._keep_personal_of(finished)
        shown = self._records(self.path / METRICS, finished)
        if not self._private:
            return checkpoint, shown
        own = self._records(private_part(self.path) / OWN_ROUNDS, finished)
        return checkpoint, [published.together(*both) for both in zip(shown, own, strict=True)]

    def _require_no_round(self) -> None:
        """Refuse a run that has lost its checkpoint. The first round's record may be there: it is written before the state."""
        done = len(read_records(self.path))
        if done > 1 or (self.path / RESULT).exists():
            raise RunDirectoryError(
                f"{self.path} records {done} finished rounds, and {CHECKPOINT}, the state after them, is missing: restore it, "
                "or run again into another folder"
            )

    def _records(self, file: Path, finished: int) -> list[dict[str, Any]]:
        """The records of the finished rounds; other lines are removed from the file."""
        records = read_lines(file, finished)
        if len(records) != finished:
            raise RunDirectoryError(
                f"{file} is damaged: it records {len(records)} of the {finished} finished rounds: restore it, or run again "
                "into another folder"
            )
        if file.exists():
            content = "".join(json.dumps(record) + "\n" for record in records)
            atomic_write(file, content, private=file.parent != self.path)
        return records

    def finish(self, shown: Record, withheld: Record) -> None:
        """Write the result, after its withheld part."""
        if self._private:
            atomic_write(private_part(self.path) / OWN_RESULT, _pretty(withheld), private=True)
        atomic_write(self.path / RESULT, _pretty(shown))
        if self._private:
            without_times(self.path)


def require_same_start(
    path: Path, config: RunConfig, facts: Mapping[str, Any], admits: Callable[[State], bool]
) -> None:
    """Refuse a directory that is neither unused nor of this very run: the same settings, data, guarantee and model.

    admits: whether a state can be one of this run.
    """
    shown, own = published.of_facts(facts, private=config.privacy.unit != "none")
    described = (path / FACTS).exists()
    if described:  # before the settings, some of which another local step would leave open
        require_same_data(FACTS, path, differing({"local": facts.get("local")}, read_facts(path)))
    if (path / CONFIG).exists():
        require_same(path, config, read_config(path))
    else:
        require_unused(path)
    if described:
        require_same_data(FACTS, path, differing(shown, read_facts(path)))
    if described or (private_part(path) / OWN_FACTS).exists():
        require_same_data(f"{PRIVATE}/{OWN_FACTS}", path, differing_digests(path, own))
    checkpoint = read_checkpoint(path)
    if checkpoint is not None and not admits(checkpoint.state):
        raise RunDirectoryError(f"{path} holds the state of another model; resume with the model it was started with")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the run in this directory as a `RunStore` does, for code that reads it and writes beside it.

    RunDirectoryError if another process has the lock. Where there is no run, or nothing can be written, there is no lock.
    """
    lock = None
    if os.path.exists(path / CONFIG):  # unlike Path.exists, False for folders that cannot be read
        with suppress(OSError, RuntimeError):
            lock = _taken(path)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


@contextmanager
def resumable(path: Path) -> Iterator[None]:
    """Add the command that resumes a run in this directory to the message of any interruption."""
    try:
        yield
    except (KeyboardInterrupt, StorageError) as error:
        if not os.path.exists(path / CONFIG):
            raise
        command = f"`secure-fed train --resume --out {shlex.quote(str(path))}`"
        stopped = isinstance(error, KeyboardInterrupt)
        raise type(error)(f"go on with {command}" if stopped else f"{error}, with {command}") from error


def _taken(path: Path) -> filelock.BaseFileLock:
    """The acquired lock of the directory; OSError where the system refuses to make one."""
    lock = filelock.FileLock(path / LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:  # an OSError too, but not one about writing
        raise RunDirectoryError(
            f"{path} is in use by another process; wait for it, or choose another directory"
        ) from error
    return lock


def read_records(path: Path, upto: int | None = None) -> list[dict[str, Any]]:
    """The rounds' public records in order, at most to round `upto`; a torn last line is dropped."""
    return read_lines(path / METRICS, upto)


def read_lines(file: Path, upto: int | None = None) -> list[dict[str, Any]]:
    """Records of rounds, a line each: of `metrics.jsonl`, or of the private part."""
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


def _pretty(value: Mapping[str, Any] | Sequence[Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
