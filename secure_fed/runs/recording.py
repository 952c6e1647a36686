"""Everything that is sent in a run, kept for an audit if `evaluation.record` requests it.

    private/recording/round-00000.safetensors    the initial state
    private/recording/round-00001.safetensors    the state after the first round, and the messages of that round

"models" keeps the global states, which every client of a round receives anyway. "updates" also keeps the contributions of
single clients, or behind masks the sums that the server decoded, before any noise of its own: raw material for attacks on the
training data, which no guarantee covers. Only their owner can read folder and files.

The engine knows nothing of this: replies are recorded on the transport, sums where they are decoded, states at the end of
rounds. A repeated round replaces its earlier recording.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, RunDirectoryError, plainly
from secure_fed.methods.method import State
from secure_fed.rounds.server import Server
from secure_fed.rounds.sums import Intake, RecordedSum
from secure_fed.rounds.transport import Recording, Reply, Request, Transport
from secure_fed.runs.directory import RECORDING, private_part
from secure_fed.runs.durable import atomic_write, clear_parts
from secure_fed.tensors.tensors import Tensors

FOLDER = RECORDING


@dataclass(frozen=True)
class Update:
    """The contribution of one client in one pass of a round; rounds count from 0."""

    round: int
    client: str
    pass_name: str
    contribution: Tensors
    weight: float


@dataclass(frozen=True)
class Summed:
    """A masked sum of one pass as the server decoded it: the sum over `clients` clients, and the sum of their weights."""

    round: int
    pass_name: str
    total: Tensors
    weight: float
    clients: int


@dataclass(frozen=True)
class Recorded:
    """A recording, read back: the global states by number of rounds, and the recorded messages. lr: local, by round."""

    states: Mapping[int, Tensors]
    updates: Sequence[Update] = ()
    sums: Sequence[Summed] = ()
    lr: Mapping[int, float] = field(default_factory=dict)


@dataclass
class Recorder:
    """Writes a recording during a run. kept: the value of `evaluation.record`."""

    run_dir: Path | None
    names: Sequence[str]
    kept: str
    _sent: list[Update | Summed] = field(default_factory=list)

    @classmethod
    def of(cls, config: RunConfig, run_dir: Path | None, names: Sequence[str]) -> Recorder:
        """The recorder of a run in this directory; refuses to record without one."""
        kept = config.evaluation.record
        if kept != "nothing" and run_dir is None:
            message = f"evaluation.record = {kept!r} needs a run directory to write to: set out"
            raise ConfigError(message).about("evaluation.record", kept, "a run directory")
        return cls(run_dir, names, kept)

    @property
    def folder(self) -> Path | None:
        return private_part(self.run_dir) / FOLDER if self.run_dir is not None and self.kept != "nothing" else None

    def begin(self, state: State) -> None:
        """Record the initial state; a resumed run has recorded it already."""
        self._sent = []
        if self.folder is None:
            return
        folder = self.folder
        with plainly(RunDirectoryError, f"{folder} cannot be made", "choose another --out"):
            folder.mkdir(mode=0o700, exist_ok=True)
        clear_parts(folder)
        if state.round == 0:
            self._write(state, [])

    def end_of_round(self, state: State, lr: float) -> None:
        """Keep a finished round; if a killed round resumes from its release, its recording from before the kill stays."""
        sent = [one for one in self._sent if one.round == state.round - 1]
        self._sent = []
        if self.folder is not None and (sent or not (self.folder / _name(state.round)).exists()):
            self._write(state, sent, lr)

    def around(self, transport: Transport) -> Transport:
        return Recording(transport, note=self._record_reply) if self.kept == "updates" else transport

    def beside(self, server: Server) -> Server:
        """The server with its masked sums recorded."""
        if self.kept != "updates":
            return server
        return replace(server, summing=RecordedSum(server.summing, self._record_sum))

    def _record_reply(self, request: Any, reply: Any) -> None:
        if isinstance(request, Request) and isinstance(reply, Reply):
            name = self.names[reply.client]
            self._sent.append(Update(request.round, name, request.pass_name, reply.contribution, reply.weight))

    def _record_sum(self, request: Request, intake: Intake) -> None:
        """Record a masked sum. Without masks the transport has recorded every contribution to it."""
        if intake.spent is None:
            return
        total = intake.total
        self._sent.append(Summed(request.round, request.pass_name, total.total(), total.weight, len(intake.received)))

    def _write(self, state: State, sent: Sequence[Update | Summed], lr: float | None = None) -> None:
        tensors = {f"state/{name}": part for name, part in state.tensors.parts().items()}
        entries: list[dict[str, Any]] = []
        for number, one in enumerate(sent):
            content = one.contribution if isinstance(one, Update) else one.total
            tensors |= {f"{number}/{name}": part for name, part in content.parts().items()}
            entries.append({name: value for name, value in vars(one).items() if not isinstance(value, Tensors)})
        whole = {name: part.detach().cpu().contiguous() for name, part in tensors.items()}
        path = (self.folder or Path()) / _name(state.round)
        noted = {"sent": json.dumps(entries), "lr": json.dumps(lr)}
        atomic_write(path, safetensors.torch.save(whole, {"said": json.dumps(noted)}), private=True)


def warning(config: RunConfig) -> str:
    """The warning before training starts; empty if no client's update is kept."""
    return _UPDATES if config.evaluation.record == "updates" else ""


def _name(round_: int) -> str:
    return f"round-{round_:05d}.safetensors"


def _round(name: str) -> int | None:
    """The number of finished rounds in the name of a recording's file; None for any other name."""
    number = name.removeprefix("round-").removesuffix(".safetensors")
    digits = number.isascii() and number.isdigit()
    return int(number) if digits and _name(int(number)) == name else None


def read(run_dir: Path) -> Recorded | None:
    """The recording of the run in this directory, if it made one; files with other names are skipped."""
    folder = private_part(run_dir) / FOLDER
    with plainly(RunDirectoryError, f"{folder} cannot be read", "make it readable, or take it away"):
        there = [*folder.iterdir()] if folder.is_dir() else []
    files = {number: file for file in there if (number := _round(file.name)) is not None}
    states: dict[int, Tensors] = {}
    lr: dict[int, float] = {}
    updates: list[Update] = []
    sums: list[Summed] = []
    for number, file in sorted(files.items()):
        state, sent, rate = _read(file)
        states[number] = state
        updates += [one for one in sent if isinstance(one, Update)]
        sums += [one for one in sent if isinstance(one, Summed)]
        if rate is not None:
            lr[number - 1] = rate
    if files and sorted(states) != list(range(len(states))):
        raise RunDirectoryError(
            f"{folder} lacks rounds: it has {len(states)} states, the last after round {max(states)}; {_REMEDY}"
        )
    return Recorded(states, updates, sums, lr) if files else None


def require_of_run(recorded: Recorded, final: State, clients: Sequence[str]) -> None:
    """Refuse a recording that is not, or not completely, from the run of these clients that ended in `final`.

    It must have the states after 0, 1, ... rounds, the last of them `final` to the bit; every contribution must be from one of
    these clients, and every masked sum over no more clients than there are.
    """
    rounds, last = final.round, max(recorded.states, default=-1)
    strangers = {one.client for one in recorded.updates} - set(clients)
    if sorted(recorded.states) != list(range(rounds + 1)):
        why = (
            f"it ends after round {last}, and the run after round {rounds} (one that was stopped goes on with --resume)"
        )
    elif not _same(recorded.states[rounds], final.tensors):
        why = f"its state after round {rounds} is another than the run's"
    elif strangers:
        why = f"it names client {min(strangers)!r}, which this run does not have"
    elif any(one.clients > len(clients) for one in recorded.sums):
        why = f"it has sums of more than the {len(clients)} clients of this run"
    else:
        return
    raise RunDirectoryError(f"the folder {FOLDER} is of another run, or lacks rounds: {why}; {_REMEDY}")


def _same(one: Tensors, other: Tensors) -> bool:
    """Whether all numbers are the same, bit by bit, on any device."""
    left, right = one.parts(), other.parts()
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name].cpu(), right[name].cpu()) for name in left
    )


def _read(file: Path) -> tuple[Tensors, list[Update | Summed], float | None]:
    groups: dict[str, dict[str, Any]] = {}
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            noted = json.loads(opened.metadata()["said"])
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                group, _, rest = name.partition("/")
                groups.setdefault(group, {})[rest] = opened.get_tensor(name)
        sent: list[Update | Summed] = []
        for number, fields in enumerate(json.loads(noted["sent"])):
            content = Tensors.from_parts(groups.get(str(number), {}))
            client = "client" in fields
            sent.append(Update(**fields, contribution=content) if client else Summed(**fields, total=content))
        return Tensors.from_parts(groups["state"]), sent, json.loads(noted["lr"])
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{file} is damaged ({error}); {_REMEDY}") from error


_REMEDY = f"restore the run's own folder {FOLDER}, remove this folder, or run again"
_UPDATES = (
    "evaluation.record = 'updates' keeps what clients send, from which training texts can be recovered, and which no "
    "guarantee covers: protect the run directory like the training texts"
)
