"""The noise that a run would end with: its standard deviation by hand, and that of runs whose clients send nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from privacy.correlation import square_root
from privacy.entropy import SeededEntropy, Stream
from secure_fed.federation import Federation
from secure_fed.rounds.noise_alone import NoiseAlone, StepNoise
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed import toys
from tests.secure_fed.private_toys import CLIENT, EXAMPLE, federation

ROUNDS, C, Z = 6, 0.1, 2.0
PLAIN = {
    **CLIENT,
    "privacy.noise_multiplier": Z,
    "method.name": "fedlora",
    "federation.rounds": ROUNDS,
    "federation.cohort": 3,
    "federation.server_lr": 0.5,
}


class Wide(nn.Module):
    """The toy's layers, and one that is averaged as it is: wide enough to show the spread of its noise to a few per cent."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 64)
        self.value = nn.Linear(64, 64)
        self.middle = nn.Linear(64, 64)
        self.classifier = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.middle(self.value(self.query(x).tanh()).tanh()).tanh())
        return scores


def wide(settings: Mapping[str, Any], **own: Any) -> Federation:
    return federation({"method.modules_to_save": ["middle", "classifier"], **settings}, model=Wide(), **own)


def alone(built: Federation, steps: StepNoise | None = None) -> NoiseAlone:
    assembly = built.assembly
    return NoiseAlone(assembly.server, assembly.initial, built.config.federation.rounds, steps)


def moved(built: Federation, tensors: Tensors) -> float:
    """The standard deviation of the noise on each number of the layer that is averaged as it is."""
    start = built.assembly.initial.tensors
    return float((tensors.tensor("middle.weight") - start.tensor("middle.weight")).std())


# The standard deviation on each number, in units of the clip norm times the noise multiplier and the server's rate of 0.5.
MOMENTUM = np.array([[0.5 ** (t - s) if s <= t else 0.0 for s in range(ROUNDS)] for t in range(ROUNDS)])
LAST_MODELS = np.linalg.norm((np.tril(np.ones((ROUNDS, ROUNDS))) @ MOMENTUM)[-3:].mean(0)) / 3
MOVING = {"federation.server_optimizer": "momentum", "federation.server_momentum": 0.5, "federation.average_last": 3}
BANDED = {"federation.sampling": "schedule", "privacy.correlation": "banded", "privacy.band": 2, "federation.cohort": 1}
FORMULAS: dict[str, tuple[dict[str, Any], float]] = {
    "the sum of all rounds": ({}, math.sqrt(ROUNDS) / 3),
    "momentum, and the mean of the last models": (MOVING, LAST_MODELS),
    "correlated noise cancels": (BANDED, square_root(2).errors(ROUNDS)[-1]),
    "noise of the clients": (
        {"privacy.noise": "local", "federation.sampling": "schedule"},
        math.sqrt(ROUNDS) / math.sqrt(3),
    ),
    "many rounds, by fewer with the same sum": ({"federation.rounds": 500}, math.sqrt(500) / 3),
}


@pytest.mark.parametrize("case", FORMULAS)
def test_the_noise_is_that_of_the_whole_run(case: str) -> None:
    settings, factor = FORMULAS[case]
    built = wide({**PLAIN, **settings})
    protection = built.assembly.protection
    found, mechanism = alone(built), protection.plan if protection.correlated is not None else protection.mechanism
    assert mechanism is not None
    expected = 0.5 * mechanism.noise_multiplier * C * factor
    assert found.made < 500
    assert moved(built, found.ended().tensors) == pytest.approx(expected, rel=0.04)
    if not settings:
        assert moved(built, found.ended(times=0.1).tensors) == pytest.approx(0.1 * expected, rel=0.04)
        assert moved(built, found.ended(rate=1.0).tensors) == pytest.approx(2 * expected, rel=0.04)


@pytest.mark.parametrize(
    "settings",
    [
        {"method.name": "fra_lora", "method.denoise": "tangent"},
        {"method.name": "ffa_lora"},
        {"method.name": "fedlora", "federation.server_optimizer": "adam"},
    ],
    ids=lambda settings: str(next(iter(settings.values()))),
)
def test_a_method_gets_the_noise_of_its_own_run(settings: dict[str, Any]) -> None:
    """Clients whose rate is next to nothing send next to nothing: the run ends with its noise alone."""
    still = {**PLAIN, **settings, "training.lr": 1e-12, "training.optimizer": "sgd", "method.modules_to_save": []}
    if settings.get("federation.server_optimizer") == "adam":
        still["federation.server_lr"] = 0.01
    built = federation({**still, "method.rank": 2}, seed=3, model=Wide())
    start, real = built.assembly.initial.tensors, built.run().state.tensors
    found = alone(built).ended().tensors
    assert not toys.same(real, found), "another source of noise"

    def shift(tensors: Tensors) -> float:
        """Of the adapted matrices: their product shows what factors hide."""
        pairs = [(name, name.replace("lora_B", "lora_A")) for name in tensors if "lora_B" in name]
        products = ([one.tensor(b) @ one.tensor(a) for b, a in pairs] for one in (tensors, start))
        return math.hypot(*(float((ours - before).norm()) for ours, before in zip(*products, strict=True)))

    assert shift(found) == pytest.approx(shift(real), rel=0.2)


@pytest.mark.parametrize("optimizer", chosen(["sgd", "adamw"], ["sgd"]))
def test_noise_of_steps_goes_through_the_local_optimizer(optimizer: str) -> None:
    settings = {**EXAMPLE, "privacy.noise_multiplier": 4.0, "federation.rounds": 2, "method.name": "fedlora"}
    settings |= {"training.optimizer": optimizer, "training.lr": 0.05, "training.steps": 5}

    def silent(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        scores: Tensor = model(batch["x"])
        return 0.0 * scores.sum(1)

    sizes = (8, 8)
    built = wide(settings, sizes=sizes, seed=1, loss=silent, metrics=lambda model, batches: {"loss": 0.0})
    problem = built.assembly.problem
    steps = StepNoise(built.config.training, 2, problem.units, problem.last)
    found = moved(built, alone(built, steps).ended().tensors)
    real = moved(built, built.run().state.tensors)
    if optimizer == "sgd":
        assert real == pytest.approx(0.05 * 4.0 * C / 4 * math.sqrt(5 * 2 / len(sizes)), rel=0.05)
        assert found == pytest.approx(real, rel=0.05)
    else:  # the probe has the longest gradient beside the noise, of which there is little here
        assert 0.7 * real < found < 1.05 * real


def test_little_noise_in_steps_moves_adamw_little() -> None:
    """AdamW divides by the size of a gradient: noise without any gradient would move it equally far, however little it is."""
    ends = []
    for z in (0.01, 1.0):
        built = wide({**EXAMPLE, "privacy.noise_multiplier": z, "training.steps": 4, "method.name": "fedlora"})
        problem = built.assembly.problem
        steps = StepNoise(built.config.training, built.config.federation.rounds, problem.units, problem.last)
        ends.append(moved(built, alone(built, steps).ended().tensors))
    assert ends[0] < 0.1 * ends[1]


def test_none_of_its_numbers_is_a_number_of_the_released_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same at every call, and takes nothing from the run's source of noise."""
    built = wide(PLAIN)
    real = built.assembly.protection.entropy
    asked: list[tuple[str | int, ...]] = []

    def noted(self: Any, *label: str | int) -> Stream:
        asked.append(label)
        return SeededEntropy(0).stream(*label)

    monkeypatch.setattr(type(real), "stream", noted)
    first, again = (alone(built).ended().tensors for _ in range(2))
    assert toys.same(first, again)
    assert not asked
