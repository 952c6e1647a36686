"""The contract of the methods on LoRA for the products B A."""

from __future__ import annotations

import pytest
import torch

from secure_fed.methods import METHODS
from secure_fed.methods.method import CHANGE, Method
from secure_fed.tensors.low_rank import truncated
from secure_fed.tensors.tensors import Tensors
from tests.cells import every
from tests.secure_fed.methods.rounds import RANK, means_of, method_of, nothing, one_round, start, trained

ONE_PASS = ("fedlora", "ffa_lora", "rolora", "fra_lora", "fra_then_ffa", "federa", "fedsvd")
ON_LORA = (*ONE_PASS, "fedask", "fedpower")


def test_none_is_missing() -> None:
    begun = {name: start(method_of(name)) for name in METHODS}
    assert {name for name in METHODS if any(".lora_A." in tensor for tensor in begun[name].tensors)} == set(ON_LORA)
    assert {name for name in ON_LORA if method_of(name).plan(begun[name]).passes == (CHANGE,)} == set(ONE_PASS)


@pytest.fixture
def method(request: pytest.FixtureRequest) -> Method:
    return method_of(request.param)


on_lora = pytest.mark.parametrize("method", ON_LORA, indirect=True)
one_pass = pytest.mark.parametrize("method", ONE_PASS, indirect=True)


def products(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The product B A of every adapted matrix, float64."""
    return {
        name.split(".lora_A.")[0]: tensors.tensor(name.replace(".lora_A.", ".lora_B.")).double()
        @ tensors.tensor(name).double()
        for name in tensors
        if ".lora_A." in name
    }


def close(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((left - right).norm() <= tolerance * right.norm() + 1e-9)


@on_lora
@every("rounds", [0, 1, 2, 3])
def test_no_change_changes_no_product(method: Method, rounds: int) -> None:
    state = start(method)
    for _ in range(rounds):
        state = one_round(method, state)
    after = method.apply(state, nothing(method, state))
    for module, product in products(after.tensors).items():
        assert close(product, products(state.tensors)[module])


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
            want = sum(client[module] for client in clients) / len(clients)
            u, s, vt = torch.linalg.svd(want)
            exact.append(close(product, u[:, :RANK] * s[:RANK] @ vt[:RANK]))
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
    afters = [trained(method, state, 100 + client) for client in range(4)]
    for module, product in found.items():
        clients = [products(state.tensors | after)[module] for after in afters]
        want = truncated(sum(clients[1:], clients[0]) / 4, RANK)
        best = want.u * want.s @ want.vt
        assert close(product, best)
        if product.shape[0] == product.shape[1]:
            assert not close(product.T, best, 0.1)
