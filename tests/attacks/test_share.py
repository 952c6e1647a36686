"""Property inference from a client's update: closer to the true share than the guess without the update, or no finding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from attacks.inference.share import PENALTIES, Shares, _left_out, guessed, made_up

FEATURES, SIZE = 12, 20
Example = tuple[Any, float]


def examples(count: int, having: bool, rng: np.random.Generator) -> list[Example]:
    """The attribute moves features of an example, and says nothing of its label, which is 1 for four in five."""
    features = rng.normal(size=(count, FEATURES)) + having * np.r_[np.full(4, 1.2), np.zeros(FEATURES - 4)]
    return [(row, float(label)) for row, label in zip(features, rng.random(count) < 0.8, strict=True)]


def trained(own: Sequence[Example]) -> Any:
    """(numbers,) the change of a network with one hidden layer by some steps on a client's examples."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    inputs = torch.tensor(np.stack([row for row, _ in own]), dtype=torch.float32)
    labels = torch.tensor([[label] for _, label in own])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(inputs), labels).backward()
        optimizer.step()
    return (torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before).double().numpy()


@pytest.fixture(scope="module")
def attacked() -> tuple[Any, Any, Any, Any]:
    """Updates and shares of simulated clients, and of 40 real ones with their own examples."""
    rng = np.random.default_rng(0)
    shadows = made_up(trained, examples(300, True, rng), examples(300, False, rng), 150, SIZE, rng)
    real = made_up(trained, examples(300, True, rng), examples(300, False, rng), 40, SIZE, rng)
    return (*shadows, *real)


def test_an_update_tells_the_share(attacked: tuple[Any, Any, Any, Any]) -> None:
    shadows, shares, updates, true = attacked
    found = guessed(updates, shadows, shares)
    assert found.error(true) < 0.75 * found.baseline(true)
    assert found.p_value(true) < 0.01
    assert found.without == pytest.approx(shares.mean())
    assert ((found.guessed >= 0) & (found.guessed <= 1)).all()


def test_noise_tells_nothing(attacked: tuple[Any, Any, Any, Any]) -> None:
    """Noise of ten times an update's length: the guess goes back to the mean, and is no worse than it by much."""
    shadows, shares, updates, true = attacked
    rng, length = np.random.default_rng(1), np.linalg.norm(shadows, axis=1).mean()
    noised = [one + rng.normal(size=one.shape) * length for one in (shadows, updates)]
    found = guessed(noised[1], noised[0], shares)
    assert found.error(true) > 0.9 * found.baseline(true)
    assert found.error(true) < 1.2 * found.baseline(true)
    assert found.p_value(true) > 0.01


@pytest.mark.nightly
def test_false_alarms_are_as_rare_as_said() -> None:
    rng = np.random.default_rng(0)
    alarms = sum(Shares(rng.random(12), 0.5).p_value(rng.random(12), seed) < 0.05 for seed in range(200))
    assert alarms <= 200 * 0.05 + 3 * (200 * 0.05) ** 0.5


def test_leaving_one_out_is_done_by_hand_too() -> None:
    rng = np.random.default_rng(0)
    rows, shares = rng.normal(size=(9, 4)), rng.normal(size=9)
    kernel = rows @ rows.T
    errors = []
    for out in range(9):
        rest = np.delete(np.arange(9), out)
        weights = np.linalg.solve(kernel[np.ix_(rest, rest)] + 0.3 * np.eye(8), shares[rest])
        errors.append((kernel[out, rest] @ weights - shares[out]) ** 2)
    assert _left_out(kernel, shares, 0.3) == pytest.approx(float(np.mean(errors)))
    assert len(PENALTIES) == 9


def test_made_up_clients_have_the_shares_that_are_said() -> None:
    rng = np.random.default_rng(0)
    updates, shares = made_up(lambda own: np.array([sum(own)]), [1], [0], 200, 10, rng)
    assert updates[:, 0] / 10 == pytest.approx(shares)
    assert set(shares) == {count / 10 for count in range(11)}
