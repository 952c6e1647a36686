"""The server's optimisers against the formulas of the paper, written out in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from secure_fed.config import FederationConfig
from secure_fed.rounds.server_optimizer import ServerOptimizer
from secure_fed.tensors.tensors import LowRank, Tensors
from tests.secure_fed import toys

CHANGES = np.random.default_rng(3).normal(size=(3, 5))


def steps_of(optimizer: ServerOptimizer) -> list[np.ndarray]:
    """The step of each of three rounds."""
    steps, memory = [], Tensors()
    for change in CHANGES:
        means = {"change": Tensors({"w": torch.tensor(change)})}
        stepped, memory = optimizer.step(means, memory)
        steps.append(stepped["change"].tensor("w").numpy())
    return steps


@pytest.mark.parametrize(("kind", "lr"), [("mean", 1.0), ("momentum", 1.0), ("adam", 0.01)])
def test_a_rate_that_is_left_open_goes_by_the_optimizer(kind: str, lr: float) -> None:
    """Adam moves each number by about its learning rate, whatever the clients send: a rate of 1 destroys any model."""
    federation = toys.federation({"federation.server_optimizer": kind})
    assert federation.config.federation.server_lr == federation.assembly.server.optimizer.lr == lr
    assert ServerOptimizer.of(FederationConfig(server_optimizer=kind, server_lr=0.3)).lr == 0.3


def test_mean_applies_the_mean_change() -> None:
    np.testing.assert_array_equal(steps_of(ServerOptimizer("mean", 1.0, 0.9)), CHANGES)
    np.testing.assert_allclose(steps_of(ServerOptimizer("mean", 0.25, 0.9)), 0.25 * CHANGES)


def test_mean_hands_on_the_very_tensors_at_rate_one() -> None:
    means = {"change": Tensors({"w": torch.ones(2)})}
    steps, memory = ServerOptimizer("mean", 1.0, 0.9).step(means, Tensors())
    assert steps["change"]["w"] is means["change"]["w"]
    assert not memory


def test_momentum_adds_up_with_decay() -> None:
    first, second, third = CHANGES
    expected = [first, 0.8 * first + second, 0.64 * first + 0.8 * second + third]
    np.testing.assert_allclose(steps_of(ServerOptimizer("momentum", 0.5, 0.8)), 0.5 * np.array(expected), rtol=1e-12)


def test_adam_is_algorithm_two() -> None:
    expected = []
    for numbers in CHANGES.T:  # one coordinate at a time
        m = v = 0.0
        column = []
        for number in numbers:
            m = 0.7 * m + 0.3 * number
            v = 0.99 * v + 0.01 * number**2
            column.append(0.1 * m / (math.sqrt(v) + 1e-3))
        expected.append(column)
    np.testing.assert_allclose(steps_of(ServerOptimizer("adam", 0.1, 0.7)), np.array(expected).T, rtol=1e-12)


@pytest.mark.parametrize(("kind", "moments"), [("momentum", {"m"}), ("adam", {"m", "v"})])
def test_passes_have_memories_of_their_own(kind: str, moments: set[str]) -> None:
    means = {"a": Tensors({"w": torch.ones(2)}), "b": Tensors({"w": -torch.ones(2)})}
    steps, memory = ServerOptimizer(kind, 1.0, 0.9).step(means, Tensors())
    assert set(memory) == {f"{moment}/{name}/w" for moment in moments for name in ("a", "b")}
    assert torch.equal(steps["a"].tensor("w"), -steps["b"].tensor("w"))


def test_what_is_given_is_left_as_it_was() -> None:
    means, optimizer = {"change": Tensors({"w": torch.ones(2)})}, ServerOptimizer("adam", 1.0, 0.9)
    _, memory = optimizer.step(means, Tensors())
    before = memory.to_bytes()
    optimizer.step(means, memory)
    assert memory.to_bytes() == before
    assert torch.equal(means["change"].tensor("w"), torch.ones(2))


def test_low_rank_means_are_formed() -> None:
    product = LowRank(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]]))
    steps, _ = ServerOptimizer("momentum", 1.0, 0.9).step({"change": Tensors({"w": product})}, Tensors())
    assert torch.equal(steps["change"].tensor("w"), torch.tensor([[3.0, 4.0], [6.0, 8.0]]))


@pytest.mark.parametrize("kind", ["momentum", "adam"])
@pytest.mark.parametrize("method", ["fra_lora", "fra_then_ffa"])
def test_fra_goes_on_under_a_server_optimizer(kind: str, method: str) -> None:
    switch = {"method.switch_round": 2} if method == "fra_then_ffa" else {}
    settings = {"method.name": method, "federation.server_optimizer": kind, "federation.server_lr": 0.1, **switch}
    federation = toys.federation(settings | {"federation.rounds": 4})
    result = federation.run()
    assert result.state.tensors.is_finite()
    assert not toys.same(result.state.tensors, federation.assembly.initial.tensors)
    assert result.records[-1]["train_loss"] < result.records[0]["train_loss"]
