"""B E A beside linear layers: the parameters added, the forward pass, gradients, initial values, pruning and export."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.learning.models.adapters.parameters import read
from secure_fed.learning.models.adapters.triplet import (
    Triplet,
    TripletAdapter,
    TripletLayer,
    importance,
    kept,
    triplets,
)
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed import small_models
from tests.secure_fed.adapters.gradients import both
from tests.secure_fed.example_gradients import one_by_one, together

ADAPTER = TripletAdapter(LoraAdapter(rank=3, alpha=6.0))


def made(architecture: str, seed: int = 0, adapter: TripletAdapter = ADAPTER) -> tuple[nn.Module, list[str]]:
    model = small_models.make(architecture)
    return model, adapter.inject(model, small_models.head_of(model), seed)


def fill(model: nn.Module, names: list[str]) -> Tensors:
    """Fills every triplet, E included, with random numbers, and returns the tensors."""
    generator = torch.Generator().manual_seed(4)
    for name in names:
        parameter = model.get_parameter(name)
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return read(model, names)


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """(m, n) of a linear layer's matrix; GPT-2's layers store the transpose."""
    rows, columns = layer.get_parameter("weight").shape
    return (rows, columns) if isinstance(layer, nn.Linear) else (columns, rows)


@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
def test_what_is_put_in(architecture: str) -> None:
    model, names = made(architecture)
    found = triplets(names)
    shapes = [shape_of(model.get_submodule(triplet.module)) for triplet in found]
    assert sum(model.get_parameter(name).numel() for name in names) == sum(3 * (m + n + 1) for m, n in shapes)
    for triplet, (m, n) in zip(found, shapes, strict=True):
        assert [tuple(model.get_parameter(name).shape) for name in triplet[1:]] == [(3, n), (3,), (m, 3)]
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert free == {*names, *small_models.head_of(model)}


@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
def test_the_model_computes_what_it_did_and_keeps_its_names(architecture: str) -> None:
    base = small_models.make(architecture)
    model, names = made(architecture)
    assert torch.equal(small_models.logits(model), small_models.logits(base))
    before = dict(base.named_parameters())
    assert {name for name, _ in model.named_parameters()} == {*before, *names}
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in before.items())


@pytest.mark.parametrize("architecture", ["bert", "distilbert", "llama", "gpt2", "deberta_v3"])
def test_the_model_computes_the_changed_matrices(architecture: str) -> None:
    """Against a model without adapters whose weights are W + s sum_i B_:i E_i A_i, added rank by rank."""
    model, names = made(architecture)
    tensors = fill(model, names)
    dense = small_models.make(architecture)
    for module, a, e, b in triplets(names):
        layer = dense.get_submodule(module)
        weight = layer.get_parameter("weight").data
        matrix = weight if isinstance(layer, nn.Linear) else weight.T  # a view
        for i in range(3):
            matrix += 2.0 * tensors.tensor(e)[i] * torch.outer(tensors.tensor(b)[:, i], tensors.tensor(a)[i])
    assert torch.allclose(small_models.logits(model), small_models.logits(dense), atol=1e-4)
    assert not torch.allclose(small_models.logits(model), small_models.logits(small_models.make(architecture)), 0.1)


def test_the_start_is_a_function_of_the_seed() -> None:
    one, two, other = (read(*made("bert", seed)) for seed in (1, 1, 2))
    assert one.to_bytes() == two.to_bytes()
    for name in one:
        tensor = one.tensor(name)
        if name.endswith(".E"):
            assert not tensor.any()
        else:
            assert not torch.equal(tensor, other.tensor(name))
            assert tensor.abs().max() < 0.1
    entries = torch.cat([one.tensor(name).flatten() for name in one if not name.endswith(".E")])
    assert float(entries.std()) == pytest.approx(0.02, rel=0.1)
    model = small_models.make("bert")
    random_state = torch.random.get_rng_state()
    with torch.device("meta"):  # the default device draws nothing
        names = ADAPTER.inject(model, small_models.head_of(model), 1)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert read(model, names).to_bytes() == one.to_bytes()


def test_on_the_meta_device_there_are_shapes() -> None:
    with torch.device("meta"):
        model = small_models.ARCHITECTURES["bert"]()
    names = ADAPTER.inject(model, small_models.head_of(model), 0)
    assert all(model.get_parameter(name).is_meta for name in names)
    assert [tuple(m.shape) for m in read(model, names).values()] == [
        tuple(m.shape) for m in read(*made("bert")).values()
    ]


def test_a_copy_of_the_model_calls_its_own_triplets() -> None:
    model, names = made("bert")
    before = small_models.logits(model)
    twin = copy.deepcopy(model)
    fill(twin, names)
    assert torch.equal(small_models.logits(model), before)
    assert not torch.allclose(small_models.logits(twin), before)


def test_triplets_of_a_bfloat16_model_are_float32() -> None:
    model = small_models.make("bert").to(torch.bfloat16)
    names = ADAPTER.inject(model, small_models.head_of(model), 0)
    fill(model, names)
    assert {model.get_parameter(name).dtype for name in names} == {torch.float32}
    assert small_models.logits(model).dtype == torch.bfloat16


def test_dropout_stands_before_the_triplet_and_in_training_alone() -> None:
    linear = nn.Linear(6, 4)
    model = nn.Sequential(linear)
    names = TripletAdapter(LoraAdapter(rank=2, dropout=0.5, target_modules=("0",))).inject(model, [], 0)
    fill(model, names)
    x = torch.randn(3, 6)
    assert torch.equal(model.eval()(x), model.eval()(x))
    torch.manual_seed(0)
    dropped = model.train()(x)
    torch.manual_seed(0)
    thinned = nn.functional.dropout(x, 0.5)
    added = model.get_submodule("0.triplet")
    assert torch.allclose(dropped, nn.functional.linear(x, linear.weight, linear.bias) + added(thinned))


def test_torchs_own_encoder_uses_its_triplets_when_it_evaluates() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2)
    names = TripletAdapter(LoraAdapter(rank=2, target_modules="all-linear")).inject(encoder, [], 0)
    fill(encoder, names)
    x = torch.randn(2, 5, 16)
    trained = encoder.train()(x)
    with torch.no_grad():
        assert torch.allclose(encoder.eval()(x), trained, atol=1e-5)


def test_what_cannot_be_adapted() -> None:
    model, _ = made("bert")
    with pytest.raises(MethodError, match="BertForSequenceClassification already holds triplets"):
        ADAPTER.inject(model, small_models.head_of(model), 0)
    wrapped = small_models.make("bert")
    LoraAdapter(rank=2).inject(wrapped, small_models.head_of(wrapped), 0)
    with pytest.raises(MethodError, match="already holds PEFT adapters"):
        ADAPTER.inject(wrapped, small_models.head_of(wrapped), 0)
    fresh = small_models.make("bert")
    with pytest.raises(MethodError, match=r"method\.rank = 17 is above 16"):
        TripletAdapter(LoraAdapter(rank=17)).inject(fresh, [], 0)
    with pytest.raises(MethodError, match=r"set method\.target_modules"):
        ADAPTER.inject(nn.Sequential(nn.Linear(3, 3)), [], 0)
    assert not any(isinstance(module, TripletLayer) for module in fresh.modules())


def test_importance_and_what_is_kept() -> None:
    tensors = Tensors(
        {
            "m.triplet.A": torch.tensor([[1.0, -3.0], [0.0, 0.5]]),
            "m.triplet.E": torch.tensor([-2.0, 0.25]),
            "m.triplet.B": torch.tensor([[1.0, 2.0], [-1.0, 2.0], [1.0, -2.0]]),
            "head": torch.ones(2),
        }
    )
    assert triplets(tensors) == [Triplet("m", "m.triplet.A", "m.triplet.E", "m.triplet.B")]
    assert importance(tensors)["m"].tolist() == [2 + 2 + 1, 0.25 + 0.25 + 2]
    left = kept(tensors, {"m": torch.tensor([False, True])})
    assert left.tensor("m.triplet.A").tolist() == [[0.0, 0.5]]
    assert left.tensor("m.triplet.E").tolist() == [0.25]
    assert left.tensor("m.triplet.B").tolist() == [[2.0], [2.0], [-2.0]]
    assert left["head"] is tensors["head"]
    none = kept(left, {"m": torch.tensor([False])})
    assert [tuple(none[n].shape) for n in ("m.triplet.A", "m.triplet.E", "m.triplet.B")] == [(0, 2), (0,), (3, 0)]
    assert importance(none)["m"].shape == (0,)
    assert Tensors.from_bytes(none.to_bytes()).to_bytes() == none.to_bytes()


def test_form_folds_the_sizes_into_b_and_leaves_out_what_has_none() -> None:
    model, names = made("bert")
    tensors = fill(model, names)
    first, second, *_ = triplets(names)
    live = {t.module: torch.tensor([True, True, True]) for t in triplets(names)}
    live |= {first.module: torch.zeros(3, dtype=torch.bool), second.module: torch.tensor([True, False, False])}
    form = ADAPTER.form(kept(tensors, live))
    assert set(form.factors) == {t.module for t in triplets(names)} - {first.module}
    a, b = form.factors[second.module]
    assert torch.equal(a, tensors.tensor(second.a)[:1])
    assert torch.equal(b, tensors.tensor(second.b)[:, :1] * tensors.tensor(second.e)[0])
    assert form.adapter.scaling == 2.0


@pytest.mark.parametrize("architecture", ["bert", "distilbert", "llama", "gpt2"])
def test_per_example_gradients_are_made_in_one_pass(architecture: str) -> None:
    model, names = made(architecture)
    path, found, expected = both(model, [*names, *small_models.head_of(model)])
    assert path is together
    for name in names:
        assert expected[name].flatten(1).norm(dim=1).min() > 1e-9
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-12)


def test_where_examples_share_positions_they_are_made_one_at_a_time() -> None:
    model, names = made("deberta_v3", adapter=TripletAdapter(LoraAdapter(rank=2, target_modules=("query_proj",))))
    assert both(model, names)[0] is one_by_one


def test_per_example_gradients_with_a_module_without_ranks() -> None:
    model, names = made("bert")
    gone, left = triplets(names)[0], triplets(names)[1]
    tensors = kept(read(model, names), {t.module: torch.full((3,), t != gone) for t in triplets(names)})
    for name in gone[1:]:
        model.get_parameter(name).data = tensors.tensor(name)
    path, found, expected = both(model, [*names, *small_models.head_of(model)])
    assert path is together
    assert {name: tuple(found[name].shape[1:]) for name in gone[1:]} == {gone.a: (0, 16), gone.e: (0,), gone.b: (16, 0)}
    for name in left[1:]:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-8, atol=1e-12)


def without(model: nn.Module, names: list[str], modules: set[str]) -> dict[str, Tensor]:
    """The tensors of the model's triplets, with no ranks left in these modules."""
    tensors = fill(model, names)
    live = {t.module: torch.full((3,), t.module not in modules) for t in triplets(names)}
    return {name: kept(tensors, live).tensor(name).requires_grad_() for name in names}


class Counted:
    """Counts the triplets' calls in a forward pass, and the numbers that it saves for the backward pass."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = self.saved = 0
        forward = TripletLayer.forward

        def counting(layer: TripletLayer, x: Tensor) -> Tensor:
            self.calls += 1
            return forward(layer, x)

        def pack(tensor: Tensor) -> Tensor:
            self.saved += tensor.numel()
            return tensor

        with monkeypatch.context() as patched, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            patched.setattr(TripletLayer, "forward", counting)
            self.logits = functional_call(model, tensors, (), small_models.batch()).logits


def test_a_module_without_ranks_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not called and saves nothing; below the first module with ranks there is no backward pass."""
    model, names = made("bert")
    model.requires_grad_(False)
    modules = [triplet.module for triplet in triplets(names)]
    all_, last, none = (
        Counted(model, without(model, names, gone), monkeypatch)
        for gone in (set[str](), set(modules[:-1]), set(modules))
    )
    assert (all_.calls, last.calls, none.calls) == (4, 1, 0)
    assert none.saved == 0
    assert not none.logits.requires_grad
    assert 0 < last.saved < all_.saved / 2
    assert torch.equal(none.logits, small_models.make("bert")(**small_models.batch()).logits)
