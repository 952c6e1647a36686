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

`RunStore` writes and restores all of this. A directory is resumed by the very same run alone (`require_same_start`): the same
settings, data, guarantee and model. A checkpoint is one safetensors file with a digest of its tensors (`read_checkpoint`).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from privacy.statement import PROSE
from secure_fed.config import RunConfig
from secure_fed.errors import RunDirectoryError, StorageError
from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.learning.data import fingerprint
from secure_fed.methods.method import State
from secure_fed.rounds.client import Client, existing
from secure_fed.runs import published
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
    read_object,
    require_unused,
    usable,
    without_times,
)
from secure_fed.runs.durable import append_line, atomic_write, clear_parts
from secure_fed.tensors.tensors import Tensors

Values = Mapping[str, Any]  # the facts of a run's start, or the record of a round
_DIGESTS = ("data_digest", "examples_digest", "digest")
_RESUMED = {  # by the fact that differs: what a run was started with, and how to resume it
    "privacy": ("another guarantee", "without that change"),
    "chat_template": (
        "another chat template",
        "with that one, which is the tokenizer's of model.name, or that of data.chat_template",
    ),
    "local": ("another local step", "with the same function, or without one if the run had none"),
}


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

    def save(self, state: State, personal: Mapping[int, Tensors], shown: Values, withheld: Values) -> None:
        """Make a finished round durable. withheld: the private part of its record."""
        if self._private:
            line = json.dumps({"round": state.round, **withheld})
            append_line(private_part(self.path) / OWN_ROUNDS, line, private=True)
        append_line(self.path / METRICS, json.dumps(shown))
        if personal:
            write_personal(self.path, state.round, personal)
        write_checkpoint(self.path / CHECKPOINT, state, {}, {}, private=False)
        self._keep_personal_of(state.round)

    def amend(self, shown: Values, withheld: Values) -> None:
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

    def restore(self) -> tuple[Checkpoint | None, list[dict[str, Any]]]:
        """The last finished round and the records up to it, with their withheld part; later or torn lines are dropped."""
        checkpoint = read_checkpoint(self.path)
        if checkpoint is None:
            done = len(read_records(self.path))
            if done > 1 or (self.path / RESULT).exists():  # the first round's record is written before the state
                raise RunDirectoryError(
                    f"{self.path} records {done} finished rounds, and {CHECKPOINT}, the state after them, is missing: restore "
                    "it, or run again into another folder"
                )
        finished = checkpoint.state.round if checkpoint else 0
        self._keep_personal_of(finished)
        shown = self._records(self.path / METRICS, finished)
        if not self._private:
            return checkpoint, shown
        own = self._records(private_part(self.path) / OWN_ROUNDS, finished)
        return checkpoint, [published.together(*both) for both in zip(shown, own, strict=True)]

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

    def finish(self, shown: Values, withheld: Values, ended: str) -> None:
        """Write the result, after its withheld part. ended: the time, which the owner's facts note unless the run had ended."""
        folder = private_part(self.path)
        if not (self.path / RESULT).exists() or read_object(self.path, RESULT).get("rounds") != shown["rounds"]:
            noted = read_object(folder, OWN_FACTS) | {"ended": ended}
            atomic_write(folder / OWN_FACTS, _pretty(noted), private=True)
        if self._private:
            atomic_write(folder / OWN_RESULT, _pretty(withheld), private=True)
        atomic_write(self.path / RESULT, _pretty(shown))
        if self._private:
            without_times(self.path)


@dataclass(frozen=True)
class Releases:
    """`engine.Keeper` in a run directory."""

    run_dir: Path
    clients: Sequence[Client]

    def kept(self, round_: int) -> tuple[State, dict[str, Any]] | None:
        found = read_released(self.run_dir)
        if found is None or found.state.round != round_:
            return None
        for index, kept in found.personal.items():
            self.clients[index].kept = kept
        return found.state, found.record

    def keep(self, state: State, record: dict[str, Any]) -> None:
        """Make a release durable before any further processing."""
        write_checkpoint(private_part(self.run_dir) / RELEASED, state, kept_by(self.clients), record, private=True)


def kept_by(clients: Sequence[Client]) -> dict[int, Tensors]:
    """The personal tensors of the clients that have trained any."""
    return {client.index: client.kept for client in existing(clients) if client.kept}


def require_same_start(
    path: Path, config: RunConfig, facts: Mapping[str, Any], admits: Callable[[State], bool]
) -> None:
    """Refuse a directory that is neither unused nor of this very run: the same settings, data, guarantee and model.

    admits: whether a state can be one of this run.
    """
    shown, own = published.of_facts(facts, private=config.privacy.unit != "none")
    described = (path / FACTS).exists()
    if described:  # before the settings, some of which another local step would leave open
        _require_same_data(FACTS, path, differing({"local": facts.get("local")}, read_facts(path)))
    if (path / CONFIG).exists():
        require_same(path, config, read_config(path))
    else:
        require_unused(path)
    if described:
        _require_same_data(FACTS, path, differing(shown, read_facts(path)))
    if described or (private_part(path) / OWN_FACTS).exists():
        _require_same_data(f"{PRIVATE}/{OWN_FACTS}", path, differing_digests(path, own))
    checkpoint = read_checkpoint(path)
    if checkpoint is not None and not admits(checkpoint.state):
        raise RunDirectoryError(f"{path} holds the state of another model; resume with the model it was started with")


def require_same(path: Path, config: RunConfig, held: RunConfig) -> None:
    """Refuse other settings than those that the run in `path` was started with. Without privacy, rounds may be added."""
    rounds = ("federation", "rounds")
    if config.federation.rounds < held.federation.rounds:
        raise RunDirectoryError(
            f"{path} was planned for {held.federation.rounds} rounds; federation.rounds may be raised on resuming, "
            f"not lowered to {config.federation.rounds}"
        )
    if config.federation.rounds > held.federation.rounds and held.privacy.unit != "none":
        raise RunDirectoryError(
            f"{path} was planned for {held.federation.rounds} rounds, and its privacy too: federation.rounds cannot be raised "
            "after a release; start a new run"
        )
    differences = config.replace({rounds: held.federation.rounds}).differences(held)
    if differences:
        raise RunDirectoryError(
            f"{path} was started with another configuration (now, and then): {'; '.join(differences)}; resume without that "
            "change"
        )


def _require_same_data(name: str, path: Path, differing: Sequence[str]) -> None:
    """Refuse other facts. name: of the file with these facts. differing: the names of those that differ."""
    if differing:
        data = "other data", "with the training and test rows of that run and the same division, or start a new run"
        what, how = _RESUMED.get(differing[0], data)
        raise RunDirectoryError(f"{path} was started with {what}: {differing[0]} in {name} differs; resume {how}")


def differing(facts: Values, held: Values) -> list[str]:
    """The names of facts that differ from the recorded ones. Versions may change, and with them the words of a guarantee; so
    may the machine.
    """
    return [
        name
        for name, value in facts.items()
        if name not in ("versions", "origin")
        and json.dumps(_without_prose(name, value)) != json.dumps(_without_prose(name, held.get(name)))
    ]


def differing_digests(path: Path, own: Values) -> list[str]:
    """The names of facts that differ from the private part of the run in `path`; digests are keyed with its key."""
    if not (private_part(path) / OWN_FACTS).exists():
        raise RunDirectoryError(
            f"{path / PRIVATE} lacks {OWN_FACTS}, which identifies the run's data: restore the folder that the run wrote"
        )
    held = read_object(private_part(path), OWN_FACTS)
    return differing(sealed(own, str(held.get("key", ""))), held)


def sealed(own: Values, key: str) -> dict[str, Any]:
    """The same facts with keyed digests: without the key, nobody can test a guess on them."""
    return {
        name: sealed(value, key)
        if isinstance(value, Mapping)
        else fingerprint.sealed(value, key)
        if name in _DIGESTS and isinstance(value, str)
        else value
        for name, value in own.items()
    }


def _without_prose(name: str, fact: Any) -> Any:
    if name != "privacy" or not isinstance(fact, Mapping):
        return fact
    return {key: value for key, value in fact.items() if key not in PROSE}


@dataclass(frozen=True)
class Checkpoint:
    """The state after some round, every client's personal tensors, and the record of a round whose end is not saved yet."""

    state: State
    personal: Mapping[int, Tensors]
    record: dict[str, Any] = field(default_factory=dict)


def write_checkpoint(
    file: Path, state: State, personal: Mapping[int, Tensors], record: Mapping[str, Any], *, private: bool
) -> None:
    """Replace the file in one step. private: only its owner can read it."""
    tensors = {f"state/{name}": part for name, part in state.tensors.parts().items()}
    tensors |= {f"memory/{name}": part for name, part in state.memory.parts().items()}
    for client, kept in personal.items():
        tensors |= {f"client/{client}/{name}": part for name, part in kept.parts().items()}
    whole = {name: part.detach().cpu().contiguous() for name, part in tensors.items()}
    fields = {"round": state.round, "clip_norm": state.clip_norm, "record": record, "digest": _digest(whole)}
    # One text, because the order of several would differ between processes.
    content = safetensors.torch.save(whole, {"said": json.dumps(fields)})
    atomic_write(file, content, private=private)


def write_trained(path: Path, config: RunConfig, facts: Mapping[str, Any], state: State, personal: Tensors) -> None:
    """Write a model that a run elsewhere has trained, for `export.trained.load_run`: a run directory without rounds and result.

    personal: the tensors of the client that the facts name as `member`. All of it is for its owner alone.
    """
    shown, _ = published.of_facts(facts, private=config.privacy.unit != "none")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in ((CONFIG, config.to_dict()), (FACTS, shown)):
        atomic_write(path / name, _pretty(content), private=True)
    if personal:
        write_personal(path, state.round, {facts["clients"].index(facts["member"]): personal})
    write_checkpoint(path / CHECKPOINT, state, {}, {}, private=True)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The state after the last finished round, if any round finished; without personal tensors."""
    return _read(path / CHECKPOINT)


def read_best(path: Path) -> Checkpoint | None:
    """The state of the best evaluation; None if none was kept."""
    return _read(path / BEST)


def read_released(path: Path) -> Checkpoint | None:
    """The state after the last release of a private run, if there was any, with the personal tensors at that time."""
    return _read(private_part(path) / RELEASED)


def write_personal(path: Path, round_: int | str, personal: Mapping[int, Tensors]) -> None:
    """Write the personal tensors of clients, for `read_personal`."""
    write_checkpoint(made_private(path) / personal_file(round_), State(Tensors()), personal, {}, private=True)


def read_personal(path: Path, round_: int | str) -> Mapping[int, Tensors]:
    """The personal tensors of clients after that round, by client; clients without any are left out."""
    found = _read(private_part(path) / personal_file(round_))
    return found.personal if found else {}


def _read(file: Path) -> Checkpoint | None:
    if not file.exists():
        return None
    groups: dict[str, dict[str, Any]] = {"state": {}, "memory": {}}
    personal: dict[int, dict[str, Any]] = {}
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            if "said" not in (metadata := opened.metadata() or {}):
                raise ValueError("another program wrote it")
            fields = json.loads(metadata["said"])
            finished, clip_norm, record = int(fields["round"]), float(fields["clip_norm"]), dict(fields["record"])
            whole: dict[str, Tensor] = {}
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                group, _, rest = name.partition("/")
                # A copy: the file may be replaced while it is open, and kernels may sum in an order that depends on a tensor's
                # memory layout, which must be as in a run that was never stopped.
                whole[name] = tensor = opened.get_tensor(name).clone()
                if group == "client":
                    client, _, rest = rest.partition("/")
                    personal.setdefault(int(client), {})[rest] = tensor
                else:
                    groups[group][rest] = tensor
        if fields["digest"] != _digest(whole):
            raise ValueError("its tensors are not those that were written")
        tensors, memory = (Tensors.from_parts(groups[group]) for group in ("state", "memory"))
        own = {client: Tensors.from_parts(parts) for client, parts in personal.items()}
        return Checkpoint(State(tensors, finished, memory, clip_norm), own, record)
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{file} is damaged ({error}): restore it, or run again into another folder") from error


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the tensors' names, types, shapes and bytes, which finds a damaged disk or copy."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        one = tensors[name]
        found.update(f"{name} {one.dtype} {tuple(one.shape)} ".encode())
        if one.numel():  # an empty array of numpy has strides that no view allows
            found.update(one.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def personal_file(round_: int | str) -> str:
    """The name of the file of personal tensors after that round."""
    return f"personal-{round_}.safetensors"


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


def _pretty(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
