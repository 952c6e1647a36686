"""The audited run: its federation before training, its final state, and the recording of its rounds."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.errors import RunDirectoryError
from secure_fed.federation import Federation
from secure_fed.methods.method import State, fits
from secure_fed.runs import recording
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.checkpoint import read_checkpoint
from secure_fed.runs.directory import CONFIG, RESULT, is_given, read_config, read_facts, read_whole_result
from secure_fed.runs.recording import Recorded
from secure_fed.runs.same_run import differing_digests


@dataclass(frozen=True)
class Target:
    """The audited run: its federation before training, its final state, and the recording of its rounds (None without one).

    result: the run's own summary.
    """

    assembly: Assembly
    final: State
    recorded: Recorded | None
    result: Mapping[str, Any]
    run_dir: Path | None = None


def opened(run_dir: Path) -> Target:
    """The run in this folder, with its data read again, ready for an audit. Nothing is written, and no budget is touched."""
    facts, config = read_facts(run_dir), read_config(run_dir)
    if not (run_dir / RESULT).exists():
        going_on = f"secure-fed train --resume --out {shlex.quote(str(run_dir))}"
        raise RunDirectoryError(f"{run_dir} has not ended: go on with `{going_on}`")
    result = _result(run_dir, config)
    if is_given(facts):
        raise RunDirectoryError(
            f"{run_dir} was trained with objects given in Python: audit it there, with attacks.audit.audited(Target(...))"
        )
    checkpoint = read_checkpoint(run_dir)
    if checkpoint is None:
        raise RunDirectoryError(f"{run_dir} is damaged: it has a result and no checkpoint; restore it")
    assembly = Federation(config).assembly
    known = assembly.problem.facts
    differing = differing_digests(run_dir, {name: known.get(name) for name in ("data_digest", "audit")})
    for name in [*differing, *(["phantoms"] if known.get("phantoms") != facts.get("phantoms") else [])]:
        raise RunDirectoryError(
            f"{run_dir} was trained on other data than its settings lead to now, or by another version: {name} "
            "differs; an audit needs the same data as the training"
        )
    if not fits(assembly.method, assembly.initial.tensors, checkpoint.state):
        raise RunDirectoryError(f"{run_dir} holds the state of another model than {config.model.name!r} is now")
    recorded = recording.read(run_dir)
    if recorded is not None:
        recording.require_of_run(recorded, checkpoint.state, assembly.server.names)
    return Target(assembly, checkpoint.state, recorded, result, run_dir)


def _result(run_dir: Path, config: RunConfig) -> dict[str, Any]:
    """The run's result. RunDirectoryError unless every field that an audit reads is there."""
    result = read_whole_result(run_dir)
    private = config.privacy.unit != "none"
    numbers = ("seconds", *(("epsilon", "epsilon_participants", "delta") if private else ()))
    values = {name: result.get(name) for name in numbers}
    below = {"delta": 1.0}
    whole = all(isinstance(one, int | float) and 0 <= one < below.get(name, math.inf) for name, one in values.items())
    if not whole or result.get("unit") != config.privacy.unit or private is not isinstance(result.get("privacy"), dict):
        raise RunDirectoryError(f"{run_dir / RESULT} is damaged, or of another run than {CONFIG} beside it; restore it")
    return result
