"""The contract of every method in the table. For the products B A of methods on LoRA see `test_products.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from secure_fed.methods import METHODS
from secure_fed.methods.method import Method, State
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Layout, Tensors
from tests.cells import chosen
from tests.contracts.runs import OF_A_CLASS
from tests.secure_fed import small_models
from tests.secure_fed.methods.rounds import head, means_of, method_of, nothing, one_round, start, trained

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


def rounds_of(method: Method) -> Iterator[State]:
    """The states at the start of rounds 0 to 3."""
    state = start(method)
    for rounds in range(4):
        assert state.round == rounds
        yield state
        state = one_round(method, state)


def test_plan_layout_and_contribution_agree(method: Method) -> None:
    for state in rounds_of(method):
        require_agreement(method, state)


def require_agreement(method: Method, state: State) -> None:
    plan = method.plan(state)
    assert len(set(plan.passes)) == len(plan.passes) >= 1
    assert set(plan.trainable) <= set(plan.down) <= set(state.tensors)
    means: dict[str, Tensors] = {}
    for pass_name in plan.passes:
        contribution = method.contribute(pass_name, state.tensors, trained(method, state, 1), means)
        assert Layout.of(contribution) == method.layout(state, pass_name)
        means[pass_name] = contribution.dense()


def test_no_change_is_no_contribution_and_changes_no_prediction(method: Method) -> None:
    for state in rounds_of(method):
        still = state.tensors.select(method.plan(state).trainable)
        for pass_name, mean in means_of(method, state, [still]).items():
            assert mean.without(n for n in mean if n.endswith(".votes")).norm() == 0, pass_name
        after = method.apply(state, nothing(method, state))
        assert after.round == state.round + 1
        assert (head(after.tensors) - head(state.tensors)).norm() == 0


def test_head_is_averaged(method: Method) -> None:
    state = start(method)
    afters = [trained(method, state, seed) for seed in range(4)]
    found = head(method.apply(state, means_of(method, state, afters)).tensors)
    want = head(afters[0] + afters[1] + afters[2] + afters[3]) * 0.25
    assert (found - want).norm() < 1e-6


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


def test_apply_and_contribute_leave_their_arguments(method: Method) -> None:
    state = start(method)
    after = trained(method, state, 1)
    kept = (state.tensors.to_bytes(), after.to_bytes())
    means = means_of(method, state, [after])
    stored = {name: mean.to_bytes() for name, mean in means.items()}
    method.apply(state, means)
    assert (state.tensors.to_bytes(), after.to_bytes()) == kept
    assert {name: mean.to_bytes() for name, mean in means.items()} == stored


def test_memory_goes_through(method: Method) -> None:
    state = start(method)
    memory = Tensors({"m": torch.ones(2)})
    remembering = type(state)(state.tensors, state.round, memory)
    assert method.apply(remembering, nothing(method, state)).memory is memory


def test_a_sum_of_nobody_has_the_layout(method: Method) -> None:
    state = start(method)
    for pass_name in method.plan(state).passes:
        assert Layout.of(PlainSum(method.layout(state, pass_name)).total()) == method.layout(state, pass_name)
