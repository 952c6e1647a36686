"""The contract of every method in the table. For the products B A of methods on LoRA see `test_methods.py`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from secure_fed.learning.models.adapters.triplet import triplets
from secure_fed.methods import METHODS, card
from secure_fed.methods.method import CHANGE, Method, State
from secure_fed.tensors.tensors import Layout, Tensors
from tests.cells import chosen, every
from tests.contracts import runs
from tests.contracts.runs import OF_A_CLASS
from tests.secure_fed import small_models, toys
from tests.secure_fed.methods.rounds import HEAD_PREFIXES, head, means_of, method_of, nothing, start, trained

# Virtual tokens change the output from the first round on; C2A's tied layers start away from zero, or have no gradient.
CHANGES_THE_MODEL = ("prompt_tuning", "prefix_tuning", "p_tuning", "c2a")


@pytest.fixture(params=chosen(METHODS, (*OF_A_CLASS, "prefix_tuning")))
def method(request: pytest.FixtureRequest) -> Method:
    return method_of(request.param)


def test_prepare_is_a_function_of_its_arguments(method: Method) -> None:
    torch.manual_seed(1)
    first = start(method).tensors
    torch.manual_seed(2)
    again, other = start(method).tensors, start(method, seed=8).tensors
    assert first.to_bytes() == again.to_bytes()
    drawn = method.card.name not in ("fedft", "head", "bitfit", "ia3", "federa")  # these draw nothing at the start
    assert (first.to_bytes() != other.to_bytes()) == drawn


def test_prepare_leaves_what_the_model_computes_and_the_random_state(method: Method) -> None:
    model = small_models.make("bert")
    before = small_models.logits(model)
    random_state = torch.random.get_rng_state()
    tensors = method.prepare(model, small_models.head_of(model), seed=3)
    assert torch.equal(torch.random.get_rng_state(), random_state)
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
