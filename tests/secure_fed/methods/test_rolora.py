"""RoLoRA: B trains in even rounds, A in odd rounds, and each mean is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from secure_fed.errors import ConfigError
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.methods import build
from secure_fed.methods.method import CHANGE, State
from secure_fed.tensors.tensors import Layout
from tests.cells import chosen
from tests.secure_fed import small_models, toys
from tests.secure_fed.adapters.gradients import both
from tests.secure_fed.example_gradients import together
from tests.secure_fed.methods.learning import assert_learns
from tests.secure_fed.methods.rounds import means_of, method_of, start, trained

EXAMPLE = {"privacy.unit": "example", "privacy.noise_multiplier": 0.3, "privacy.delta": 1e-3}
CLIENT = {"privacy.unit": "client", "privacy.noise_multiplier": 0.05, "privacy.delta": 1e-3}


def factors(state: State, which: str) -> set[str]:
    return {getattr(pair, which) for pair in pairs(state.tensors)}


@pytest.mark.parametrize("round_", range(5))
def test_what_trains_goes_up_and_everything_comes_down(round_: int) -> None:
    method = method_of("rolora")
    state = State(start(method).tensors, round_)
    moving, resting = ("b", "a") if round_ % 2 == 0 else ("a", "b")
    plan = method.plan(state)
    assert set(plan.trainable) == set(state.tensors) - factors(state, resting)
    assert factors(state, moving) <= set(plan.trainable)
    assert set(plan.down) == set(state.tensors), "a client that joins late needs both"
    contribution = method.contribute(CHANGE, state.tensors, trained(method, state, 1), {})
    assert Layout.of(contribution) == method.layout(state, CHANGE)
    assert set(contribution) == set(plan.trainable)


def test_the_mean_of_the_products_is_the_product_of_the_means_in_every_round() -> None:
    method = method_of("rolora")
    state = start(method)
    for _ in range(4):
        afters = [trained(method, state, 10 * state.round + client) for client in range(3)]
        following = method.apply(state, means_of(method, state, afters))
        resting = "a" if state.round % 2 == 0 else "b"
        for name in factors(state, resting):
            assert torch.equal(following.tensors.tensor(name), state.tensors.tensor(name))
        for pair in pairs(state.tensors):
            clients = [(state.tensors | after) for after in afters]
            want = sum(c.tensor(pair.b).double() @ c.tensor(pair.a).double() for c in clients) / 3
            found = following.tensors.tensor(pair.b).double() @ following.tensors.tensor(pair.a).double()
            torch.testing.assert_close(found, want, atol=1e-6, rtol=1e-5)
        state = following
    assert method.card.mean_exact


def test_an_a_that_trained_first_would_learn_nothing() -> None:
    """B trains first: where B = 0 the gradient of A is zero."""
    federation = toys.federation({"method.name": "rolora", "federation.rounds": 2, "training.optimizer": "sgd"})
    initial = federation.assembly.initial.tensors
    tensors = federation.run().state.tensors
    for pair in pairs(initial):
        assert not torch.equal(tensors.tensor(pair.a), initial.tensor(pair.a))
        assert tensors.tensor(pair.b).any()


@pytest.mark.parametrize("round_", [0, 1])
@pytest.mark.parametrize("architecture", ["bert", "llama", "gpt2"])
def test_per_example_gradients_of_either_factor(architecture: str, round_: int) -> None:
    method = method_of("rolora")
    model = small_models.make(architecture)
    state = State(method.prepare(model, small_models.head_of(model), 0), round_)
    with torch.no_grad():
        for name in factors(state, "b"):
            model.get_parameter(name).add_(0.1)  # with B = 0 A would have no gradient
    path, found, expected = both(model, method.plan(state).trainable)
    assert path is together
    for name in factors(state, "ab"[1 - round_]):
        assert expected[name].flatten(1).norm(dim=1).min() > 1e-9
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("privacy", chosen([{}, EXAMPLE, CLIENT], [{}, CLIENT]))
def test_a_run_learns(privacy: dict[str, Any]) -> None:
    assert_learns({"method.name": "rolora", **privacy})


def test_bytes_follow_the_factor_that_trains() -> None:
    rows = toys.federation({"method.name": "rolora", "federation.rounds": 4}).run().records
    up = [row["bytes_up"] for row in rows]
    assert up[0] == up[2] != up[1] == up[3]  # 8 x 2 + 8 x 2 numbers of B, 2 x 6 + 2 x 8 of A
    assert up[0] - up[1] == 3 * 4 * (32 - 28)
    assert len({row["bytes_down"] for row in rows}) == 1


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_server_that_remembers_means_is_refused(optimizer: str) -> None:
    with pytest.raises(ConfigError, match=rf"server_optimizer = '{optimizer}' .*'rolora': B and A change in turn"):
        build(toys.config({"method.name": "rolora", "federation.server_optimizer": optimizer}))


def test_as_lora_is_a_and_b() -> None:
    method: Any = method_of("rolora")
    state = start(method)
    form = method.as_lora(state.tensors, state.tensors)
    assert form.adapter == method.adapter
    for pair in pairs(state.tensors):
        a, b = form.factors[pair.module]
        assert torch.equal(a, state.tensors.tensor(pair.a))
        assert torch.equal(b, state.tensors.tensor(pair.b))
