"""Small federations with canaries, run to their end, in an adversary's view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attacks.adversary.case import Case, Seen
from privacy.entropy import SeededEntropy
from privacy.mechanisms import Gaussian
from secure_fed.federation import Federation
from secure_fed.methods.method import State
from secure_fed.runs import roc
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed import toys

INPUTS = 256
CLIENTS: dict[str, Any] = {
    "evaluation.audit_fraction": 1.0,
    "evaluation.canaries": "direction",
    "evaluation.dummies": 0,  # only the canaries pull
    "method.rank": 8,
    "privacy.unit": "client",
    "privacy.clip_norm": 0.1,
    "privacy.delta": 1e-3,
    "federation.cohort": 60,
}
EXAMPLES = {
    **CLIENTS,
    "privacy.unit": "example",
    "federation.cohort": 3,
    "training.optimizer": "sgd",
    "training.batch_size": 20,
}
MANY_CLIENTS, MANY_EXAMPLES = [2] * 120, [40] * 3


class Wide(nn.Module):
    """Two layers wide enough for random directions to be almost orthogonal, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=3)
        self.query, self.value, self.classifier = nn.Linear(INPUTS, 64), nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.value(self.query(x).tanh()).tanh())
        return scores


def wide() -> Wide:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Wide()


def examples(seed: int, count: int) -> list[toys.Item]:
    x = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed))
    return [{"x": row, "labels": int(row[:3].argmax())} for row in x]


class States:
    """A callback that keeps the state of every round."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensors] = {}

    def on_round_end(self, record: Mapping[str, Any], state: State) -> None:
        self.kept[state.round] = state.tensors


def never(count: int) -> Any:
    raise AssertionError("this attack trains no references")


def case(
    settings: Mapping[str, Any], sizes: Sequence[int], vantage: str = "fellow_client", *, noise: bool = True
) -> tuple[Case, Any]:
    """A finished run seen from `vantage`, and its stated epsilon. noise: whether its mechanism adds any."""
    built, states, epsilon = _run(tuple(settings.items()), tuple(sizes), noise)
    last = states[max(states)]
    return Case(built.assembly, Seen(vantage, last, states if vantage != "outsider" else {}), never), epsilon


@cache
def _run(
    settings: tuple[tuple[str, Any], ...], sizes: tuple[int, ...], noise: bool
) -> tuple[Federation, dict[int, Tensors], float | None]:
    states = States()
    built = Federation(
        toys.config(dict(settings)),
        model=wide(),
        train=[examples(client + 1, size) for client, size in enumerate(sizes)],
        test=examples(999, 20),
        entropy=SeededEntropy(0),
        callbacks=[states],
    )
    with nullcontext() if noise else patch.object(Gaussian, "noised", _clean):
        result = built.run()
    kept = {0: built.assembly.initial.tensors, **states.kept}
    return built, kept, (result.summary.get("privacy") or {}).get("epsilon")


def _clean(self: Gaussian, total: Mapping[str, Tensor], clip_norm: float, stream: Any) -> dict[str, Tensor]:
    """A broken mechanism that adds no noise."""
    return dict(total)


def auc(scores: NDArray[np.float64], of: Case) -> float:
    members = of.assembly.audit_pool.members
    return roc.rank(scores[members], scores[~members]).auc
