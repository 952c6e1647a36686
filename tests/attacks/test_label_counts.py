"""Label counts from the change of a bias: exact if the mean probability is known, close if public texts replace it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from attacks import label_counts
from attacks.adversary.case import Inapplicable, Settings
from tests.attacks.federations import case


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(0, 2**31), st.floats(1e-3, 2))
def test_shares_are_exact_where_the_mean_probability_is_known(labels: list[int], seed: int, lr: float) -> None:
    """The step of SGD is computed by autograd."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(labels), 5, dtype=torch.float64, generator=generator)
    bias = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    F.cross_entropy(logits + bias, torch.tensor(labels)).backward()
    assert bias.grad is not None
    found = label_counts.shares(-lr * bias.grad.numpy(), logits.softmax(1).mean(0).numpy(), lr, 1)
    assert found == pytest.approx(np.bincount(labels, minlength=5) / len(labels), abs=1e-9)


def test_shares_stay_shares() -> None:
    """With a wrong mean probability, some shares would be negative."""
    found = label_counts.shares(np.array([-1.0, 0.2, 0.8]), np.array([0.1, 0.1, 0.8]), 1.0, 1)
    assert found.min() == 0
    assert found.sum() == pytest.approx(1)
    assert label_counts.shares(np.full(4, -9.0), np.full(4, 0.25), 1.0, 1).tolist() == [0.25] * 4


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_known_batches_are_counted_better_than_by_the_population(factor: float) -> None:
    """Clients of eight examples and skewed labels; whatever rate the head's last layer has of its own."""
    more = {"training__lr": 0.1 / factor, "training__head_factor": factor}
    skewed = case(clients=6, each=8, data__partition="dirichlet", data__alpha=0.3, **more)
    found = label_counts.run(skewed, Settings()).measured
    assert found["clients"] == 6
    assert found["l1_error"] < 0.1
    assert found["baseline_l1"] > 4 * found["l1_error"]


def test_steps_whose_rate_falls_are_counted_by_their_mean_rate() -> None:
    """Four steps at 1, 3/4, 2/4 and 1/4 of the rate, too short to move the probabilities."""
    falls = {"training__lr_schedule": "linear", "federation__rounds": 1, "training__steps": 4, "training__lr": 0.005}
    found = label_counts.run(case(clients=6, each=8, data__partition="dirichlet", data__alpha=0.3, **falls), Settings())
    assert found.measured["l1_error"] < 0.1


def test_the_scale_matters() -> None:
    """A broken variant that forgets the number of steps is caught."""
    change, mean, true = np.array([-0.25, 0.05, 0.2]), np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.35, 0.4])
    assert label_counts.l1(label_counts.shares(change, mean, 1.0, 1), true) < 1e-9
    assert label_counts.l1(label_counts.shares(change, mean, 1.0, 4), true) > 0.3


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"training__optimizer": "adamw"}, "plain SGD"),
        ({"training__momentum": 0.9}, "plain SGD"),
        ({"training__max_grad_norm": 0.01}, r"training\.max_grad_norm is 0\.01; leave it out"),
        ({"training__proximal": 40.0}, r"training\.proximal is 40: set it to 0"),
        ({"method__personal": ("classifier.*",)}, "bias"),
    ],
)
def test_it_says_where_it_does_not_apply(settings: dict[str, object], why: str) -> None:
    with pytest.raises(Inapplicable, match=why):
        label_counts.run(case(clients=2, **settings), Settings())
