"""B E A beside linear layers: the forward pass, initial values, pruning, gradients without ranks, and export."""

from __future__ import annotations

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
from tests.golden import refused
from tests.secure_fed import small_models
from tests.secure_fed.example_gradients import together
from tests.secure_fed.test_per_example import check, texts, without_dropout

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


def test_a_and_b_start_small_and_e_at_zero() -> None:
    one, other = (read(*made("bert", seed)) for seed in (1, 2))
    for name in one:
        tensor = one.tensor(name)
        if name.endswith(".E"):
            assert not tensor.any()
        else:
            assert not torch.equal(tensor, other.tensor(name))
            assert tensor.abs().max() < 0.1
    entries = torch.cat([one.tensor(name).flatten() for name in one if not name.endswith(".E")])
    assert float(entries.std()) == pytest.approx(0.02, rel=0.1)


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


def test_a_rank_above_the_layers_size_is_refused_before_the_model_is_touched() -> None:
    fresh = small_models.make("bert")
    with refused(MethodError):
        TripletAdapter(LoraAdapter(rank=17)).inject(fresh, [], 0)
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


def test_per_example_gradients_with_a_module_without_ranks() -> None:
    model, names = made("bert")
    gone = triplets(names)[0]
    tensors = kept(read(model, names), {t.module: torch.full((3,), t != gone) for t in triplets(names)})
    for name in gone[1:]:
        model.get_parameter(name).data = tensors.tensor(name)
    assert check(without_dropout(model.double()), [*names, *small_models.head_of(model)], texts()) is together


def pruned(model: nn.Module, names: list[str], modules: set[str]) -> dict[str, Tensor]:
    """The tensors of the model's triplets, with no ranks left in these modules."""
    live = {t.module: torch.full((3,), t.module not in modules) for t in triplets(names)}
    left = kept(fill(model, names), live)
    return {name: left.tensor(name).requires_grad_() for name in names}


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
        Counted(model, pruned(model, names, gone), monkeypatch)
        for gone in (set[str](), set(modules[:-1]), set(modules))
    )
    assert (all_.calls, last.calls, none.calls) == (4, 1, 0)
    assert none.saved == 0
    assert not none.logits.requires_grad
    assert 0 < last.saved < all_.saved / 2
    assert torch.equal(none.logits, small_models.make("bert")(**small_models.batch()).logits)
