"""The contract of the methods on LoRA for the products B A."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.methods import METHODS
from secure_fed.methods.method import CHANGE, Method, State
from tests.secure_fed import small_models
from tests.secure_fed.methods.refactorised import best, products
from tests.secure_fed.methods.rounds import RANK, means_of, method_of, nothing, one_round, start, trained

ONE_PASS = ("fedlora", "ffa_lora", "rolora", "fra_lora", "fra_then_ffa", "federa", "fedsvd")
ON_LORA = (*ONE_PASS, "fedask", "fedpower")


def test_none_is_missing() -> None:
    """`test_no_change_changes_no_product` has the passes."""
    assert {name for name in METHODS if isinstance(getattr(method_of(name), "adapter", None), LoraAdapter)} == set(
        ON_LORA
    )


@pytest.fixture
def method(request: pytest.FixtureRequest) -> Method:
    return method_of(request.param)


def close(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((left - right).norm() <= tolerance * right.norm() + 1e-9)


on_lora = pytest.mark.parametrize("method", ON_LORA, indirect=True)
one_pass = pytest.mark.parametrize("method", ONE_PASS, indirect=True)


@on_lora
def test_no_change_changes_no_product(method: Method) -> None:
    state = start(method)
    assert (method.plan(state).passes == (CHANGE,)) == (method.card.name in ONE_PASS)
    for _ in range(4):
        after = method.apply(state, nothing(method, state))
        for module, product in products(after.tensors).items():
            assert close(product, products(state.tensors)[module])
        state = one_round(method, state)


@one_pass
def test_mean_is_exact_where_the_card_says_so(method: Method) -> None:
    """Over three rounds (past the switch of fra_then_ffa), against products formed and averaged in float64."""
    state = start(method)
    exact = []
    for _ in range(3):
        afters = [trained(method, state, seed) for seed in range(4)]
        found = products(method.apply(state, means_of(method, state, afters)).tensors)
        clients = [products(state.tensors | after) for after in afters]
        for module, product in found.items():
            want = torch.stack([client[module] for client in clients]).mean(0)
            exact.append(close(product, best(want, RANK)))
        state = one_round(method, state)
    assert all(exact) == method.card.mean_exact


@on_lora
def test_apply_takes_dense_means_too(method: Method) -> None:
    """A server optimiser with memory, and noise, turn factored means into dense ones."""
    state = start(method)
    means = means_of(method, state, [trained(method, state, seed) for seed in range(2)])
    formed = {name: mean.dense() for name, mean in means.items()}
    one, other = (products(method.apply(state, given).tensors) for given in (means, formed))
    for module in one:
        assert close(one[module], other[module])


@on_lora
def test_every_adapted_direction_can_still_learn(method: Method) -> None:
    """If a row of A and its column of B were both zero after a round, neither would ever have a gradient."""
    state = start(method)
    state = method.apply(state, nothing(method, state))
    for name in state.tensors:
        if ".lora_A." in name:
            a = state.tensors.tensor(name)
            b = state.tensors.tensor(name.replace(".lora_A.", ".lora_B."))
            assert (a.norm(dim=1) + b.norm(dim=0) > 0.1).all()


@pytest.mark.parametrize("name", ["fra_lora", "fra_then_ffa"])
def test_products_are_not_transposed(name: str) -> None:
    """With square matrices, shapes do not reveal a transposed product, so the values are compared."""
    method = method_of(name, target_modules=("query", "dense"))
    state = one_round(method, start(method))
    found = products(one_round(method, state).tensors)
    assert {tuple(product.shape) for product in found.values()} == {(16, 16), (24, 16), (16, 24)}
    clients = [products(state.tensors | trained(method, state, 100 + client)) for client in range(4)]
    for module, product in found.items():
        want = best(torch.stack([client[module] for client in clients]).mean(0), RANK)
        assert close(product, want)
        if product.shape[0] == product.shape[1]:
            assert not close(product.T, want, 0.1)


@pytest.mark.parametrize("method", [*ON_LORA, "svd_adaptation", "fedara"], indirect=True)
def test_as_lora_is_the_change_of_the_original_weights(method: Any) -> None:
    """After two rounds and a training, s B A added to the original weights computes what the model does with the state."""
    model, plain = small_models.make("bert"), small_models.make("bert")
    head = small_models.head_of(model)
    initial = method.prepare(model, head, 7)
    state = one_round(method, one_round(method, State(initial)))
    tensors = state.tensors | trained(method, state, 9, 0.5)
    for name, tensor in tensors.parts().items():
        model.get_parameter(name).data = tensor
    form = method.as_lora(initial, tensors)
    for name in head:
        plain.get_parameter(name).data = tensors.tensor(name)
    before = small_models.logits(plain)
    for module, (a, b) in form.factors.items():
        plain.get_submodule(module).get_parameter("weight").data += form.adapter.scaling * b @ a
    assert torch.allclose(small_models.logits(plain), small_models.logits(model), atol=1e-5)
    assert not torch.allclose(small_models.logits(plain), before, atol=1e-4)
