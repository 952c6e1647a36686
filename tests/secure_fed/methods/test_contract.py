"""The contract of every method in the table.

The methods on LoRA, FFA-LoRA, RoLoRA, FedLoRA, FRA-LoRA, FRA then FFA, and FeDeRA: their contract for the products B A, and
what is particular to one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from secure_fed.config import MethodConfig
from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning.models.adapters.lora import LoraAdapter, pairs
from secure_fed.learning.models.adapters.triplet import triplets
from secure_fed.methods import METHODS, build, card
from secure_fed.methods.ffa_lora import FfaLora
from secure_fed.methods.fra_lora import FraLora
from secure_fed.methods.method import CHANGE, Method, State
from secure_fed.runs.directory import read_config
from secure_fed.tensors.tensors import Layout, LowRank, Tensors
from tests.cells import chosen, every
from tests.contracts import runs
from tests.contracts.runs import OF_A_CLASS
from tests.golden import refused
from tests.secure_fed import small_models, toys
from tests.secure_fed.methods.refactorised import best, products
from tests.secure_fed.methods.rounds import (
    HEAD_PREFIXES,
    RANK,
    head,
    means_of,
    method_of,
    nothing,
    one_round,
    start,
    trained,
)

# Virtual tokens change the output from the first round on; C2A's tied layers start away from zero, or have no gradient.
CHANGES_THE_MODEL = ("prompt_tuning", "prefix_tuning", "p_tuning", "c2a")


@pytest.fixture(params=chosen(METHODS, (*OF_A_CLASS, "prefix_tuning")))
def method(request: pytest.FixtureRequest) -> Method:
    return method_of(request.param)


def test_prepare_is_a_function_of_its_arguments_and_leaves_what_the_model_computes(method: Method) -> None:
    model = small_models.make("bert")
    before = small_models.logits(model)
    torch.manual_seed(1)
    random_state = torch.random.get_rng_state()
    tensors = method.prepare(model, small_models.head_of(model), seed=7)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    torch.manual_seed(2)
    assert start(method).tensors.to_bytes() == tensors.to_bytes()
    drawn = method.card.name not in ("fedft", "head", "bitfit", "ia3", "federa")  # these draw nothing at the start
    assert (start(method, seed=8).tensors.to_bytes() != tensors.to_bytes()) == drawn
    same = torch.allclose(small_models.logits(model), before, atol=1e-6)
    assert same == (method.card.name not in CHANGES_THE_MODEL)
    for name in tensors:
        assert torch.equal(tensors.tensor(name), model.get_parameter(name))
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert free <= set(tensors)
    assert tensors.tensor("classifier.weight").data_ptr() != model.get_parameter("classifier.weight").data_ptr()


def test_every_round_keeps_the_contract(method: Method) -> None:
    """Over three rounds: plans, layouts and contributions agree, and no argument is changed.

    No change is no contribution, and moves no head. The head's next tensors are the clients' mean. Memory goes through.
    """
    state = start(method)
    initial = state.tensors
    for round_ in range(3):
        plan = method.plan(state)
        assert len(set(plan.passes)) == len(plan.passes) >= 1
        assert set(plan.trainable) <= set(plan.down) <= set(state.tensors)
        assert method.plan(State(initial, round_)) == plan, "it depends on the round and the start alone"
        afters = [trained(method, state, 100 * round_ + client) for client in range(2)]
        kept = state.tensors.to_bytes(), afters[0].to_bytes()
        means: dict[str, Tensors] = {}
        for pass_name in plan.passes:
            sent = [method.contribute(pass_name, state.tensors, after, means) for after in afters]
            assert Layout.of(sent[0]) == method.layout(state, pass_name)
            means[pass_name] = (sent[0] + sent[1]) * 0.5
        stored = {name: mean.to_bytes() for name, mean in means.items()}
        memory = Tensors({"m": torch.ones(2)})
        after = method.apply(State(state.tensors, round_, memory), means)
        assert (state.tensors.to_bytes(), afters[0].to_bytes()) == kept
        assert {name: mean.to_bytes() for name, mean in means.items()} == stored
        assert (after.round, after.memory is memory) == (round_ + 1, True)
        want = head(afters[0] + afters[1]) * 0.5
        assert (head(after.tensors) - want).norm() < 1e-6
        still = nothing(method, state)
        for pass_name, mean in still.items():
            assert mean.without(n for n in mean if n.endswith(".votes")).norm() == 0, pass_name
        assert (head(method.apply(state, still).tensors) - head(state.tensors)).norm() == 0
        state = after


def test_head_tensors_may_be_missing(method: Method) -> None:
    """A client's personal tensors are in neither `after` nor the mean."""
    state = start(method)
    afters = [trained(method, state, seed).without(["classifier.bias"]) for seed in range(2)]
    means: dict[str, Tensors] = {}
    for pass_name in method.plan(state).passes:
        sent = [method.contribute(pass_name, state.tensors, after, means) for after in afters]
        means[pass_name] = (sent[0] + sent[1]) * 0.5
        assert "classifier.bias" not in means[pass_name]
    after = method.apply(state, means)
    assert torch.equal(after.tensors.tensor("classifier.bias"), state.tensors.tensor("classifier.bias"))


# Of every method that averages parameters: parts of the names of the tensors that train in rounds 0 and 1 besides the head,
# and the number of places where they are.
PARTS: dict[str, tuple[set[str], int]] = {
    "fedft": ({""}, 0),
    "head": (set(), 0),
    "bitfit": ({".bias"}, 0),
    "adapter_houlsby": ({"adapter.down", "adapter.up"}, 4),
    "adapter_pfeiffer": ({"adapter.down", "adapter.up"}, 2),
    "prompt_tuning": ({"bert.prompt."}, 0),
    "prefix_tuning": ({"bert.prefix."}, 0),
    "p_tuning": ({"bert.prompt."}, 0),
    "ia3": ({"adapter.weight"}, 8),
    "compacter": ({"kronecker_rule.weight", "adapter.down_", "adapter.up_"}, 4),
    "adamix": ({"adapter.downs.", "adapter.up"}, 2),
    "fedlora": ({".lora_A.", ".lora_B."}, 0),
    "ffa_lora": ({".lora_B."}, 0),
    "rolora": ({".lora_A.", ".lora_B."}, 0),
    "federa": ({".lora_A.", ".lora_B."}, 0),
    "svd_adaptation": ({".triplet.A", ".triplet.E", ".triplet.B"}, 0),
    "fedtt": ({".tensor_train."}, 0),
    "fedtt_plus": ({".tensor_train."}, 0),
    "c2a": ({"hypernetwork."}, 0),
}
REFACTORING = {"fra_lora", "fra_then_ffa", "fedara", "fedsvd", "fedask", "fedpower"}


@every("name", PARTS)
def test_rounds_of_averaged_parameters_by_hand(name: str) -> None:
    """Two rounds of three clients with weights 1/2, 1/4, 1/4: the weighted means of what trained, whatever the noise level."""
    method, weights = method_of(name), (0.5, 0.25, 0.25)
    state, own = start(method), set[str]()
    for _ in range(2):
        plan = method.plan(state)
        own |= {tensor for tensor in plan.trainable if not tensor.startswith(HEAD_PREFIXES)}
        afters = [trained(method, state, seed) for seed in range(3)]
        changes = [method.contribute(CHANGE, state.tensors, after, {}) for after in afters]
        mean = changes[0] * 0.5 + changes[1] * 0.25 + changes[2] * 0.25
        following = method.apply(state, {CHANGE: mean}, 0.1)
        for tensor in state.tensors:
            old, found = state.tensors.tensor(tensor), following.tensors.tensor(tensor)
            if tensor not in plan.trainable:
                assert torch.equal(found, old)
                continue
            assert torch.equal(changes[0].tensor(tensor), afters[0].tensor(tensor) - old)
            want = sum(w * after.tensor(tensor).double() for w, after in zip(weights, afters, strict=True))
            torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)
        state = following
    parts, places = PARTS[name]
    assert all(any(part in tensor for part in parts) for tensor in own)
    assert all(any(part in tensor for tensor in own) for part in parts)
    assert len({tensor.partition(".adapter.")[0] for tensor in own if ".adapter." in tensor}) == places


def test_every_method_averages_parameters_or_refactors_products() -> None:
    assert {*PARTS, *REFACTORING} == set(METHODS), "add a new method to one of them"
    assert not {*PARTS} & REFACTORING


# Averages of a whole adapter: factors whose mean is not the mean of the matrices, and whole runs.


def kronecker(tensors: Tensors) -> Tensor:
    at = "bert.encoder.layer.0.output.dense.adapter.down"
    a, s, t = (tensors.tensor(n).numpy() for n in ("kronecker_rule.weight", f"{at}_left.weight", f"{at}_right.weight"))
    return torch.from_numpy(sum(np.kron(a[i], np.outer(s[i], t[i])) for i in range(len(a))))


def product_of_three(tensors: Tensors) -> Tensor:
    _, a, e, b = triplets(tensors)[0]
    return tensors.tensor(b) * tensors.tensor(e) @ tensors.tensor(a)


def train_of_cores(tensors: Tensors) -> Tensor:
    """FedTT's eq. (2)."""
    product = torch.ones(1)
    for j in range(4):
        core = tensors.tensor(f"bert.encoder.layer.0.output.dense.tensor_train.down.core_{j}")
        product = torch.tensordot(product, core, dims=1)
    return product


@every(("name", "matrix"), [("compacter", kronecker), ("svd_adaptation", product_of_three), ("fedtt", train_of_cores)])
def test_the_mean_of_factors_is_not_that_of_the_matrices(name: str, matrix: Callable[[Tensors], Tensor]) -> None:
    """The reason for `mean_exact=False` on the card."""
    method = method_of(name)
    state = start(method)
    afters = [trained(method, state, seed, 0.5) for seed in range(3)]
    found = matrix(method.apply(state, means_of(method, state, afters)).tensors)
    mean = sum(map(matrix, afters)) / 3
    assert (found - mean).norm() > 0.1 * mean.norm()
    assert not card(name).mean_exact


@pytest.mark.parametrize("name", ["bitfit", "adapter_houlsby", "ia3"])
def test_every_tensor_of_the_adapter_and_the_head_learns(name: str) -> None:
    built = runs.federation(runs.settings(name, **{"training.optimizer": "adamw"}))
    begun, end = built.assembly.initial.tensors, built.run().state.tensors
    assert not [tensor for tensor in end if torch.equal(end.tensor(tensor), begun.tensor(tensor))]


def test_the_experts_drawn_are_the_same_in_every_run() -> None:
    def run(seed: int) -> Tensors:
        found = runs.federation(runs.settings("adamix", **{"federation.rounds": 1, "federation.seed": seed}))
        before = torch.get_rng_state()
        tensors = found.run().state.tensors
        assert torch.equal(torch.get_rng_state(), before)
        return tensors

    first = run(0)
    assert toys.same(first, run(0))
    assert not toys.same(first, run(1))


# Methods on LoRA.


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
