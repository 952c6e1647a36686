"""The methods on LoRA: their contract for the products B A, and what is particular to one of them.

FFA-LoRA, RoLoRA, FedLoRA, FRA-LoRA, FRA then FFA, and FeDeRA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from secure_fed.config import MethodConfig
from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning.models.adapters.lora import LoraAdapter, pairs
from secure_fed.methods import METHODS, build, card
from secure_fed.methods.ffa_lora import FfaLora
from secure_fed.methods.fra_lora import FraLora
from secure_fed.methods.method import CHANGE, Method, State
from secure_fed.runs.directory import read_config
from secure_fed.tensors.tensors import LowRank
from tests.golden import refused
from tests.secure_fed import small_models, toys
from tests.secure_fed.methods.refactorised import best, products
from tests.secure_fed.methods.rounds import RANK, means_of, method_of, nothing, one_round, start, trained

ADAPTER = LoraAdapter(rank=3, alpha=6.0)


@pytest.mark.parametrize("rslora", [False, True])
def test_double_rank_keeps_the_scale(rslora: bool) -> None:
    one, two = (
        build(MethodConfig(name="ffa_lora", rank=4, rslora=rslora, double_rank=double)).adapter
        for double in (False, True)
    )
    assert two.rank == 8
    assert two.scaling == pytest.approx(one.scaling)


def test_orthonormal_a_has_orthonormal_rows() -> None:
    state = start(FfaLora(ADAPTER))
    for pair in pairs(state.tensors):
        a = state.tensors.tensor(pair.a)
        assert torch.allclose(a @ a.T, torch.eye(3), atol=1e-6)


def test_gaussian_a_has_rows_of_unit_length_on_average() -> None:
    draws = [start(FfaLora(ADAPTER, freeze_init="gaussian"), seed).tensors for seed in range(10)]
    a = torch.stack([draw.tensor(pair.a) for draw in draws for pair in pairs(draw)])
    assert a.square().sum(-1).mean() == pytest.approx(1.0, abs=0.1)
    assert abs(float((a**4).mean() / a.square().mean() ** 2) - 3) < 0.5  # a normal distribution's kurtosis


def test_frozen_a_neither_travels_nor_moves_by_a_bit() -> None:
    method = FfaLora(ADAPTER)
    state = start(method)
    names = {pair.a for pair in pairs(state.tensors)}
    for round_ in range(3):
        plan = method.plan(state)
        assert names.isdisjoint(plan.trainable)
        assert names.isdisjoint(plan.down)
        mean = method.contribute(CHANGE, state.tensors, trained(method, state, round_), {})
        assert names.isdisjoint(mean)
        after = method.apply(state, {CHANGE: mean})
        assert all(torch.equal(after.tensors.tensor(name), state.tensors.tensor(name)) for name in names)
        state = after


def test_rolora_trains_b_in_even_rounds_and_a_in_odd_ones() -> None:
    """B first: where B = 0 the gradient of A is zero. All come down, since a client that joins late needs both."""
    built = toys.federation({"method.name": "rolora", "federation.rounds": 4, "training.optimizer": "sgd"})
    method, initial = built.assembly.method, built.assembly.initial
    found = {which: {getattr(pair, which) for pair in pairs(initial.tensors)} for which in "ab"}
    for round_ in range(4):
        plan = method.plan(State(initial.tensors, round_))
        assert set(plan.trainable) == set(initial.tensors) - found["ab"[round_ % 2]]
        assert set(plan.down) == set(initial.tensors)
    result = built.run()
    assert not any(torch.equal(result.state.tensors.tensor(n), initial.tensors.tensor(n)) for n in initial.tensors)
    up = [row["bytes_up"] for row in result.records]
    assert up == [up[0], up[1]] * 2
    assert up[0] - up[1] == 3 * 4 * (32 - 28)  # 8 x 2 + 8 x 2 numbers of B, 2 x 6 + 2 x 8 of A


def test_fedlora_averages_factors_and_misses_the_mean_product() -> None:
    """The gap is the covariance of the factors over clients: for two clients, (B_1 - B_2)(A_1 - A_2) / 4."""
    method = build(MethodConfig(name="fedlora", rank=3))
    state = start(method)
    afters = [trained(method, state, seed) for seed in (1, 2)]
    mean = method.apply(state, means_of(method, state, afters)).tensors
    for pair in pairs(state.tensors):
        (a1, b1), (a2, b2) = ((after.tensor(pair.a), after.tensor(pair.b)) for after in afters)
        gap = (b1 @ a1 + b2 @ a2) / 2 - mean.tensor(pair.b) @ mean.tensor(pair.a)
        assert torch.allclose(gap, (b1 - b2) @ (a1 - a2) / 4, atol=1e-6)
        assert gap.norm() > 0.1 * (b1 @ a1).norm()


def test_fra_contributes_factors_of_twice_the_rank_with_the_scale_inside_and_splits_in_balance() -> None:
    method = FraLora(ADAPTER)
    state = start(method)
    after = trained(method, state, 1)
    contribution = method.contribute(CHANGE, state.tensors, after, {})
    found = method.apply(state, {CHANGE: contribution}).tensors
    with refused(MethodError):  # a personal factor
        method.contribute(CHANGE, state.tensors, after.without([pairs(after)[0].b]), {})
    for pair in pairs(state.tensors):
        change = contribution[f"{pair.module}.delta"]
        assert isinstance(change, LowRank)
        assert change.rank == 6
        b, a, b_i, a_i = (side.tensor(name) for side in (state.tensors, after) for name in (pair.b, pair.a))
        assert torch.allclose(change.dense(), 2.0 * (b_i @ a_i - b @ a), atol=1e-6)
        a, b = found.tensor(pair.a), found.tensor(pair.b)
        assert torch.allclose(a @ a.T, b.T @ b, atol=1e-5)
        assert (b.gather(0, b.abs().argmax(0)[None]) > 0).all(), "signs are fixed"


@pytest.mark.parametrize(("rounds", "switch"), [(1, 1), (3, 1), (9, 4), (10, 5), (30, 5)])
def test_fra_then_ffa_switches_after_five_rounds_or_half_of_few(rounds: int, switch: int) -> None:
    usual = {"method.name": "fra_then_ffa", "federation.rounds": rounds}
    assert getattr(build(toys.config(usual)), "switch_round", None) == switch
    with refused(ConfigError, "method.switch_round"):
        build(toys.config({**usual, "method.switch_round": max(rounds, 2)}))


def test_fra_then_ffa_switches_where_its_run_began_to(tmp_path: Path) -> None:
    """Resuming with more rounds does not move the switch."""
    toys.federation({"method.name": "fra_then_ffa", "federation.rounds": 4}).run(tmp_path)
    held = read_config(tmp_path).method.switch_round
    resumed = read_config(tmp_path).override(["federation.rounds=20"])
    assert (held, getattr(build(resumed), "switch_round", None)) == (2, 2)


def test_fra_then_ffa_switches_once_and_freezes_a() -> None:
    method = build(MethodConfig(name="fra_then_ffa", rank=3, alpha=6.0, switch_round=2))
    state = start(method)
    names = {pair.a for pair in pairs(state.tensors)}
    frozen: dict[str, torch.Tensor] = {}
    for round_ in range(5):
        plan = method.plan(state)
        assert names <= set(plan.down), "a client that joins late needs A"
        assert names.isdisjoint(plan.trainable) == (round_ >= 2)
        mean = method.contribute(CHANGE, state.tensors, trained(method, state, round_), {})
        assert any(isinstance(member, LowRank) for member in mean.values()) == (round_ < 2)
        state = method.apply(state, {CHANGE: mean})
        if round_ == 1:
            frozen = {name: state.tensors.tensor(name) for name in names}
        for name in frozen:
            a = state.tensors.tensor(name)
            assert torch.equal(a, frozen[name])
            assert torch.allclose(a @ a.T, torch.eye(3), atol=1e-6)


# FeDeRA: the start from singular vectors (`adapters/test_lora.py`) under each rule of averaging.


@pytest.mark.parametrize("rule", ["fedlora", "ffa_lora", "rolora", "fra_lora"])
def test_federa_is_its_rule_with_another_start_and_a_card_of_its_own(rule: str) -> None:
    method: Any = build(toys.config({"method.name": "federa", "method.rule": rule, "method.rank": 3}))
    usual = build(toys.config({"method.name": rule, "method.rank": 3}))
    assert method.adapter == LoraAdapter(rank=3, alpha=3.0, start="singular")
    assert type(method) is type(usual)
    assert (method.card.name, method.card.paper) == ("federa", card("federa").paper)
    for said in ("travels", "mean_exact", "units", "memoryless"):
        assert getattr(method.card, said) == getattr(usual.card, said)
    state, other = start(method), start(usual)
    for round_ in (0, 1):
        one, two = State(state.tensors, round_), State(other.tensors, round_)
        plan = method.plan(one)
        assert plan == usual.plan(two)
        assert method.layout(one, *plan.passes) == usual.layout(two, *plan.passes)


# The contract for the products B A.


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
