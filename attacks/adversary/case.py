"""The input and the result of an attack: an audited run, the part of it that one adversary sees, and the finding.

`opened` reads a finished run (`Target`). There are four adversaries. Each sees everything that the one before it sees, and
more:

    outsider        the final adapter
    fellow_client   the global state of every round, as a client that took part in every round
    secure_server   also the sum of every pass that a server decodes under secure aggregation, before its own noise
    server          also every single update

`seen` filters the recording of a run for one of them. In a recording without masks, `secure_server` gets the sums that it would
have seen with masks. A `Case` is an adversary's view with the public facts of the federation and the audited units; an attack
makes a `Finding` of it. No attack reads the coins: with other coins, its scores are the same bits.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attacks.adversary.null import Floats, Null
from attacks.adversary.shadows import SharedReferences
from attacks.record import Vantage
from secure_fed.config import RunConfig
from secure_fed.errors import RunDirectoryError, UsageError
from secure_fed.federation import Federation
from secure_fed.learning.data.audit_unit import Unit
from secure_fed.learning.data.rows import places_of
from secure_fed.methods.method import State, fits
from secure_fed.runs import recording
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.directory import CONFIG, RESULT, is_given, read_config, read_facts, read_whole_result
from secure_fed.runs.membership import confidences, looked_at, mean_of_units
from secure_fed.runs.recording import Recorded, Summed, Update
from secure_fed.runs.store import differing_digests, read_checkpoint
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Layout, Tensors


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
    for name in [*differing, *(["dummies"] if known.get("dummies") != facts.get("dummies") else [])]:
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


VANTAGES = {
    one.name: one
    for one in (
        Vantage("outsider", "Whoever gets the final model", "the final adapter"),
        Vantage("fellow_client", "Another client", "the shared model after every round"),
        Vantage("secure_server", "The server behind masks", "the sum of updates in every round"),
        Vantage("server", "The server without masks", "every single update"),
    )
}


@dataclass(frozen=True)
class Seen:
    """The view of an adversary. states: by number of finished rounds, from 0; lr: local learning rates, known from settings."""

    vantage: str
    final: Tensors
    states: Mapping[int, Tensors] = field(default_factory=dict)
    sums: Sequence[Summed] = ()
    updates: Sequence[Update] = ()
    lr: Mapping[int, float] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A digest of every number in this view: with the same digest before and after an attack, it changed none of them."""
        found, sent = sha256(), [*(one.total for one in self.sums), *(one.contribution for one in self.updates)]
        for tensors in (self.final, *self.states.values(), *sent):
            for part in tensors.parts().values():
                found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()


def seen(vantage: str, final: Tensors, recorded: Recorded | None, *, averaged: bool = False) -> Seen:
    """This adversary's part of the recording. Without a recording, every adversary has the final adapter alone.

    averaged: the final adapter is the mean of several rounds' models, so it is not a step from the model before it.
    """
    rank = list(VANTAGES).index(vantage)
    if recorded is None or rank == 0:
        return Seen(vantage, final)
    sums = (recorded.sums or sums_of(recorded.updates)) if rank >= 2 else ()
    updates = recorded.updates if rank >= 3 else ()
    last = max(recorded.states) if averaged else None
    states = {round_: state for round_, state in recorded.states.items() if round_ != last}
    return Seen(vantage, final, states, sums, updates, recorded.lr)


def sums_of(updates: Sequence[Update]) -> list[Summed]:
    """The sums that secure aggregation would show of these updates."""
    together = places_of((update.round, update.pass_name) for update in updates)
    return [summed([updates[place] for place in places]) for places in together.values()]


def summed(updates: Sequence[Update]) -> Summed:
    """The sum of updates of one pass of a round."""
    first = updates[0]
    total = PlainSum(Layout.of(first.contribution))
    for update in updates:
        total.add(update.contribution, update.weight)
    return Summed(first.round, first.pass_name, total.total(), total.weight, len(updates))


@dataclass(frozen=True)
class Case:
    """An adversary and a run: the adversary's view, the public facts of the federation, and the audited units."""

    assembly: Assembly
    seen: Seen
    references: SharedReferences

    @property
    def units(self) -> tuple[Unit, ...]:
        """The audited units; some were members."""
        return self.assembly.audit_pool.units

    @property
    def population(self) -> Sequence[Any]:
        """Examples of the same distribution that are certainly non-members: the test set."""
        return self.assembly.problem.test

    def from_population(self, most: int) -> list[Any]:
        """At most `most` examples of the population. A user's data set has a length and items, but no slices."""
        return [self.population[index] for index in range(min(len(self.population), most))]

    def confidences(self, tensors: Tensors, examples: Sequence[Any]) -> Floats:
        """(examples,) phi under a global state."""
        parts, config = self.assembly.problem, self.assembly.config
        model = self.assembly.objective.load(tensors)
        device, size = self.assembly.objective.device, config.evaluation.batch_size
        with self.assembly.objective.reading:
            return confidences(model, examples, parts.collate, parts.confidence, size, device)

    @cached_property
    def looked_at(self) -> tuple[list[Any], NDArray[np.int64]]:
        """A few examples of each unit, and the index of the unit of each example."""
        return looked_at(self.units)

    def unit_confidences(self, tensors: Tensors) -> Floats:
        """(units,) mean phi over a unit's examples."""
        examples, owner = self.looked_at
        return mean_of_units(self.confidences(tensors, examples), owner, len(self.units))

    def reference_confidences(self, count: int) -> Floats:
        """(references, examples) phi of the examples in `looked_at`, under `count` reference adapters."""
        examples, _ = self.looked_at
        return self.references.confidences(count, lambda state: self.confidences(state, examples))


@dataclass(frozen=True)
class Settings:
    """The settings of an audit. references: shadow adapters; significance: of all findings together, and of all lower bounds
    together; max_rounds: the most rounds that an attack on rounds uses, evenly spaced, or the first ones for attacks on texts
    and labels. None: each attack's own number.
    """

    references: int = 16
    seed: int = 0
    significance: float = 0.05
    max_rounds: int | None = None


@dataclass(frozen=True)
class Finding:
    """scores: (units,), higher means more likely a member; None for attacks on something other than membership.

    measured: other results, as JSON. note: a caveat on the number. null: the distribution of a non-member's score,
    where it is known.
    """

    scores: Floats | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    null: Null | None = None


class Inapplicable(UsageError):  # noqa: N818 - a fact, no fault
    """The reason why an attack does not apply to a case."""
