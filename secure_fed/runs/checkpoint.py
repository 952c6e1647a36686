"""Checkpoints of a run: a state of the federation, with or without personal tensors, in one safetensors file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from secure_fed.errors import RunDirectoryError
from secure_fed.methods.method import State
from secure_fed.runs.directory import BEST, CHECKPOINT, RELEASED, private_part
from secure_fed.runs.durable import atomic_write
from secure_fed.tensors.tensors import Tensors


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


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The state after the last finished round, if any round finished; without personal tensors."""
    return _read(path / CHECKPOINT)


def read_best(path: Path) -> Checkpoint | None:
    """The state of the best evaluation; None if none was kept."""
    return _read(path / BEST)


def read_released(path: Path) -> Checkpoint | None:
    """The state after the last release of a private run, if there was any, with the personal tensors at that time."""
    return _read(private_part(path) / RELEASED)


def read_personal(path: Path, round_: int) -> Mapping[int, Tensors]:
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
            fields = json.loads(opened.metadata()["said"])
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
        if fields.get("digest", found := _digest(whole)) != found:  # earlier versions wrote none
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
        found.update(one.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def personal_file(round_: int | str) -> str:
    """The name of the file of personal tensors after that round."""
    return f"personal-{round_}.safetensors"
