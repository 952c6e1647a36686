"""Reference ("shadow") adapters: the same federated training with fresh coins over the audit pool.

A reference is the adapter that the run would have trained with other units of the pool as members (Shokri et al., 2017; Carlini
et al., 2022, arXiv 2112.03570, section IV-C): the same clients with the rest of their data, the same method, schedule, bounds
and noise, over the same base. Public randomness (without privacy, the order of examples and the cohorts) is the run's, because
an attacker knows `federation.seed`; secret randomness is drawn afresh for each reference. Noise comes from a seed: no reference
is ever released.

Coins. Every unit is a member of half of the references, drawn for each unit independently (the design of Carlini et al.). So
each reference has fair and independent coins, as the run has, and a unit has equally many "in" and "out" confidences. With an
odd number of references, a fair coin decides which side has one more. Equal examples share their coins, as in the run.

Differences from the run:
- There are no masks: contributions are summed without fixed-point rounding and without a limited range.
- Noise that clients would add in shares is added to the sum, with the standard deviation of all shares, those of dropped-out
  clients included.
- Nothing is charged and no ledger is opened. A client that has reached its limit of participations sits out, as in the run.
- Privacy is not accounted again: the noise is the run's, even where other members would have led to another plan.

References train in lockstep: the clients of all references that train in a round share passes over the base model (module
`cohort`). For that, a round is computed twice: first up to each client's training, to collect the training jobs, then in full
with their results. Both draw the same, because all randomness comes from seeds. Where training steps have noise (privacy for
examples or groups), and where a function of the user's trains, every client trains by itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks.adversary.reference import Reference
from secure_fed.errors import UsageError
from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.learning.data.fingerprint import content
from secure_fed.learning.data.pointing import plain
from secure_fed.learning.tasks.item_extras import without_aside
from secure_fed.learning.training.cohort.trainings import Ways, train_together
from secure_fed.learning.training.schedule import scheduled_lr
from secure_fed.runs.assembly import Assembly
from secure_fed.tensors.tensors import Tensors

Bools = NDArray[np.bool_]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class References:
    """Reference adapters of a federation.

    inside: (references, units), whether the unit was a member of the reference. states: the last global state of each
    reference. why_not_together: why some clients trained one after the other; empty if all shared passes.
    """

    inside: Bools
    states: list[Tensors]
    why_not_together: str = ""


def references(
    assembly: Assembly,
    count: int,
    seed: int,
    progress: Progress | None = None,
    *,
    rounds: int | None = None,
) -> References:
    """`count` references with fair coins, all from `seed`.

    progress: called with the rounds done, over all references, and their total. rounds: the run's, if it ended early.
    """
    if count < 2:
        raise UsageError(
            f"{count} references cannot have a unit inside of one and outside of another; request at least 2"
        )
    if not assembly.audit_pool.units:
        raise UsageError(f"there are no units to toss coins for: {assembly.audit_pool.why}")
    inside = coins(count, lots(assembly.audit_pool), np.random.default_rng([seed, _COINS]))
    return trained(assembly, inside, seed, progress, rounds=rounds)


def coins(count: int, lots: Sequence[int], rng: np.random.Generator) -> Bools:
    """(count, units): every unit is a member of half of the references, drawn for each lot independently."""
    fair = np.stack([rng.permutation(count) < (count + rng.integers(2)) // 2 for _ in range(max(lots) + 1)], axis=1)
    inside: Bools = fair[:, np.asarray(lots)]
    return inside


def lots(held: AuditPool) -> list[int]:
    """(units,) numbers from 0, equal exactly for equal examples, so that copies of a held-out example are held out too."""
    numbers: dict[bytes, int] = {}
    contents = [
        content(without_aside(plain(unit.examples[0])))
        if held.of == "data" and held.kind == "example"
        else unit.name.encode()
        for unit in held.units
    ]
    return [numbers.setdefault(one, len(numbers)) for one in contents]


def trained(
    assembly: Assembly,
    inside: Bools,
    seed: int,
    progress: Progress | None = None,
    *,
    common: bool = True,
    rounds: int | None = None,
) -> References:
    """A reference for each row of `inside`, trained in lockstep or, without `common`, each client by itself."""
    planned, done = assembly.config.federation.rounds, 0
    rounds = planned if rounds is None else rounds
    common = common and not assembly.protection.placement.step_noise and assembly.local is None
    states: list[Tensors] = []
    ways = Ways()
    together = _in_lockstep(assembly) if common else 1
    for start in range(0, len(inside), together):
        numbers = range(start, min(start + together, len(inside)))
        made = [Reference.of(assembly, inside[number], _seed_of(seed, number)) for number in numbers]
        for round_ in range(rounds):
            _round(made, scheduled_lr(assembly.config.training, round_, planned), ways if common else None)
            done += len(made)
            if progress is not None:
                progress(done, rounds * len(inside))
        states += [one.state.tensors for one in made]
    why_not = ways.why_not if common else "references were to be trained one after the other"
    return References(inside, states, why_not)


def _round(made: Sequence[Reference], lr: float, ways: Ways | None) -> None:
    """Compute one round of each reference."""
    if ways is None:
        for one in made:
            one.round(lr)
        return
    noted = [one.noted(lr) for one in made]
    jobs = [job for own in noted for job in own]
    assembly = made[0].assembly
    public = assembly.protection.placement.private
    found = iter(train_together(assembly.objective, jobs, ways, public=public))
    for one, own in zip(made, noted, strict=True):
        one.round(lr, [next(found) for _ in own])


def _in_lockstep(assembly: Assembly) -> int:
    """The number of references in lockstep: all trained tensors of a round are in memory at once."""
    plan = assembly.method.plan(assembly.initial)
    numbers = assembly.initial.tensors.select(plan.trainable).numel
    return max(1, _HELD // max(1, math.ceil(numbers * assembly.sampler.expected)))


def _seed_of(seed: int, number: int) -> int:
    """The seed of the noise and the secret coins of one reference."""
    return int.from_bytes(hashlib.sha256(f"reference {number} of {seed}".encode()).digest()[:8], "big")


_COINS = 1
_HELD = 1 << 26  # trained numbers, 256 MB
