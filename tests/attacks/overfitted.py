"""A federation that can only memorise: labels are independent of inputs, and clients have few examples."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attacks.adversary.case import Case, seen
from attacks.adversary.shadows import SharedReferences
from secure_fed.federation import Federation
from secure_fed.runs import recording, roc
from secure_fed.runs.recording import Recorded
from secure_fed.tensors.tensors import Tensors
from tests.attacks import canaried
from tests.secure_fed import toys

USUAL: dict[str, Any] = {
    "evaluation.audit_fraction": 1.0,
    "evaluation.record": "updates",
    "federation.rounds": 6,
    "method.rank": 4,
    "training.optimizer": "sgd",
    "training.lr": 0.5,
    "training.lr_schedule": "constant",
    "training.steps": 4,
    "training.batch_size": 32,
}


def examples(seed: int, count: int) -> list[toys.Item]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, canaried.INPUTS, generator=generator)
    labels = torch.randint(3, (count,), generator=generator)
    return [{"x": row, "labels": int(label)} for row, label in zip(x, labels, strict=True)]


def run(
    run_dir: Path, settings: Mapping[str, Any] | None = None, clients: int = 8, each: int = 30
) -> tuple[Federation, Tensors, Recorded]:
    """A finished run and its recording: `clients` clients, whose examples are each a member or not by a coin."""
    built = Federation(
        toys.config({**USUAL, **(settings or {})}),
        model=canaried.wide(),
        train=[examples(client + 1, each) for client in range(clients)],
        test=examples(999, 100),
    )
    final = built.run(run_dir).state.tensors
    recorded = recording.read(run_dir)
    assert recorded is not None
    return built, final, recorded


def case(ran: tuple[Federation, Tensors, Recorded], vantage: str) -> Case:
    built, final, recorded = ran
    return Case(built.assembly, seen(vantage, final, recorded), SharedReferences(built.assembly))


@cache
def learned() -> tuple[Federation, Tensors, Recorded]:
    """A run of four clients, with twenty examples each, that learned its members by heart; tests only read it."""
    with TemporaryDirectory() as folder:
        return run(Path(folder) / "run", {"federation.rounds": 10, "method.rank": 8}, clients=4, each=20)


def area(scores: NDArray[np.float64] | None, members: NDArray[np.bool_]) -> float:
    assert scores is not None
    return roc.auc(scores[members], scores[~members])


def area_of_shuffled(scores: NDArray[np.float64] | None, members: NDArray[np.bool_]) -> float:
    """The mean AUC over permutations of the truth, which is 1/2 for an attack that does not know the truth."""
    rng = np.random.default_rng(0)
    return float(np.mean([area(scores, rng.permutation(members)) for _ in range(50)]))
