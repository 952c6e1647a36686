"""What every method promises, over the table of methods."""

from __future__ import annotations

import pytest
import torch

from secure_fed.config import MethodConfig
from secure_fed.low_rank import truncated
from secure_fed.methods import METHODS, build
from secure_fed.methods.method import CHANGE, Method, State
from secure_fed.summation import PlainSum
from secure_fed.tensors import Layout, Tensors
from tests.secure_fed import small_models

RANK = 3
HEAD_PREFIXES = ("classifier.", "bert.pooler.")


def method_of(name: str, **settings: object) -> Method:
    only = {"switch_round": 2} if name == "fra_then_ffa" else {}
    return build(MethodConfig(name=name, rank=RANK, alpha=6.0, **{**only, **settings}))  # type: ignore[arg-type]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Method:
    return method_of(request.param)


def start(method: Method, seed: int = 7) -> State:
    model = small_models.make("bert")
    return State(method.prepare(model, small_models.head_of(model), seed))


def trained(method: Method, state: State, seed: int, size: float = 0.1) -> Tensors:
    """What local training might have made."""
    generator = torch.Generator().manual_seed(seed)
    names = method.plan(state).trainable
    return Tensors(
        (n, state.tensors.tensor(n) + size * torch.randn(state.tensors[n].shape, generator=generator)) for n in names
    )


def mean_of(method: Method, state: State, afters: list[Tensors]) -> Tensors:
    total = PlainSum(method.layout(state, CHANGE))
    for after in afters:
        total.add(method.contribute(CHANGE, state.tensors, after, {}))
    return total.total() * (1 / len(afters))


def one_round(method: Method, state: State, clients: int = 4) -> State:
    afters = [trained(method, state, 100 * state.round + client) for client in range(clients)]
    return method.apply(state, {CHANGE: mean_of(method, state, afters)})


def products(method: Method, tensors: Tensors) -> dict[str, torch.Tensor]:
    """s B A of every adapted matrix, float64."""
    out = {}
    for name in tensors:
        if ".lora_A." in name:
            b = tensors.tensor(name.replace(".lora_A.", ".lora_B.")).double()
            out[name.split(".lora_A.")[0]] = method.adapter.scaling * b @ tensors.tensor(name).double()
    return out


def head(tensors: Tensors) -> Tensors:
    return tensors.select(name for name in tensors if name.startswith(HEAD_PREFIXES))


def close(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((left - right).norm() <= tolerance * right.norm())


def test_prepare_is_a_function_of_its_arguments(method: Method) -> None:
    torch.manual_seed(1)
    first = start(method).tensors
    torch.manual_seed(2)
    again, other = start(method).tensors, start(method, seed=8).tensors
    assert first.to_bytes() == again.to_bytes()
    assert first.to_bytes() != other.to_bytes()


def test_prepare_leaves_what_the_model_computes_and_the_random_state(method: Method) -> None:
    model = small_models.make("bert")
    before = small_models.logits(model)
    random_state = torch.random.get_rng_state()
    tensors = method.prepare(model, small_models.head_of(model), seed=3)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert torch.equal(small_models.logits(model), before)
    for name in tensors:
        assert torch.equal(tensors.tensor(name), model.get_parameter(name))
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert free == set(tensors)
    assert tensors.tensor("classifier.weight").data_ptr() != model.get_parameter("classifier.weight").data_ptr()


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
def test_plan_layout_and_contribution_agree(method: Method, rounds: int) -> None:
    state = start(method)
    for _ in range(rounds):
        state = one_round(method, state)
    plan = method.plan(state)
    assert state.round == rounds
    assert plan.passes == (CHANGE,)
    assert set(plan.trainable) <= set(state.tensors)
    assert set(plan.trainable) <= set(plan.down) <= set(state.tensors)
    contribution = method.contribute(CHANGE, state.tensors, trained(method, state, 1), {})
    assert Layout.of(contribution) == method.layout(state, CHANGE)


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
def test_no_change_is_no_contribution_and_changes_nothing(method: Method, rounds: int) -> None:
    state = start(method)
    for _ in range(rounds):
        state = one_round(method, state)
    still = method.contribute(CHANGE, state.tensors, state.tensors.select(method.plan(state).trainable), {})
    assert still.norm() == 0
    after = method.apply(state, {CHANGE: PlainSum(method.layout(state, CHANGE)).total()})
    assert after.round == rounds + 1
    assert Layout.of(after.tensors) == Layout.of(state.tensors)
    for module, product in products(method, after.tensors).items():
        assert close(product, products(method, state.tensors)[module])
    assert (head(after.tensors) - head(state.tensors)).norm() == 0


def test_mean_is_exact_where_the_card_says_so(method: Method) -> None:
    """Three rounds in (past the switch of fra_then_ffa), against products formed and averaged in float64."""
    state = start(method)
    exact = []
    for _ in range(3):
        afters = [trained(method, state, seed) for seed in range(4)]
        found = products(method, method.apply(state, {CHANGE: mean_of(method, state, afters)}).tensors)
        clients = [products(method, state.tensors | after) for after in afters]
        for module, product in found.items():
            want = sum(client[module] for client in clients) / len(clients)
            u, s, vt = torch.linalg.svd(want)
            best = u[:, :RANK] * s[:RANK] @ vt[:RANK]
            exact.append(close(product, best))
        state = one_round(method, state)
    assert all(exact) == method.card.mean_exact


def test_head_is_averaged(method: Method) -> None:
    state = start(method)
    afters = [trained(method, state, seed) for seed in range(4)]
    found = head(method.apply(state, {CHANGE: mean_of(method, state, afters)}).tensors)
    want = head(afters[0] + afters[1] + afters[2] + afters[3]) * 0.25
    assert len(found) == 4
    assert (found - want).norm() < 1e-6


def test_apply_takes_dense_means_too(method: Method) -> None:
    """A server optimiser with memory forms what it is given."""
    state = start(method)
    mean = mean_of(method, state, [trained(method, state, seed) for seed in range(2)])
    factored, formed = (products(method, method.apply(state, {CHANGE: m}).tensors) for m in (mean, mean.dense()))
    for module in factored:
        assert close(factored[module], formed[module])


def test_head_tensors_may_be_missing(method: Method) -> None:
    """What is personal is in neither `after` nor the mean."""
    state = start(method)
    afters = [trained(method, state, seed).without(["classifier.bias"]) for seed in range(2)]
    contributions = [method.contribute(CHANGE, state.tensors, after, {}) for after in afters]
    after = method.apply(state, {CHANGE: (contributions[0] + contributions[1]) * 0.5})
    assert "classifier.bias" not in contributions[0]
    assert torch.equal(after.tensors.tensor("classifier.bias"), state.tensors.tensor("classifier.bias"))


def test_apply_and_contribute_leave_their_arguments(method: Method) -> None:
    state = start(method)
    after = trained(method, state, 1)
    kept = (state.tensors.to_bytes(), after.to_bytes())
    mean = mean_of(method, state, [after])
    stored = mean.to_bytes()
    method.apply(state, {CHANGE: mean})
    assert (state.tensors.to_bytes(), after.to_bytes()) == kept
    assert mean.to_bytes() == stored


def test_memory_goes_through(method: Method) -> None:
    state = start(method)
    memory = Tensors({"m": torch.ones(2)})
    remembering = State(state.tensors, state.round, memory)
    assert method.apply(remembering, {CHANGE: PlainSum(method.layout(state, CHANGE)).total()}).memory is memory


def test_every_adapted_direction_can_still_learn(method: Method) -> None:
    """No A row and B column are both zero after a round, or neither would ever have a gradient."""
    state = start(method)
    clients = [state.tensors.select(method.plan(state).trainable)] * 2
    state = method.apply(state, {CHANGE: mean_of(method, state, clients)})
    for name in state.tensors:
        if ".lora_A." in name:
            a = state.tensors.tensor(name)
            b = state.tensors.tensor(name.replace(".lora_A.", ".lora_B."))
            assert (a.norm(dim=1) + b.norm(dim=0) > 0.1).all()


@pytest.mark.parametrize("name", ["fra_lora", "fra_then_ffa"])
def test_products_are_not_transposed(name: str) -> None:
    """Square matrices hide a swap of the factors in the shapes; the numbers must not."""
    method = method_of(name, target_modules=("query", "dense"))
    state = one_round(method, start(method))
    found = products(method, one_round(method, state).tensors)
    assert {tuple(product.shape) for product in found.values()} == {(16, 16), (24, 16), (16, 24)}
    afters = [trained(method, state, 100 + client) for client in range(4)]
    for module, product in found.items():
        clients = [products(method, state.tensors | after)[module] for after in afters]
        want = truncated(sum(clients[1:], clients[0]) / 4, RANK)
        best = want.u * want.s @ want.vt
        assert close(product, best)
        if product.shape[0] == product.shape[1]:
            assert not close(product.T, best, 0.1)
