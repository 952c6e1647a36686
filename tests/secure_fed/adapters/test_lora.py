"""LoRA: adapted layers, refusals before the model is changed, initial values, and states as changes of the original weights.

B E A beside linear layers: the forward pass, initial values, pruning, gradients without ranks, and export.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning.models.adapters.lora import LoraAdapter, LoraForm, Pair, pairs
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
from tests.cells import every
from tests.golden import refused
from tests.secure_fed import small_models
from tests.secure_fed.example_gradients import together
from tests.secure_fed.test_per_example import check, texts, without_dropout


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def adapted(architecture: str, **settings: object) -> set[str]:
    model = small_models.make(architecture)
    found = pairs(LoraAdapter(rank=2, **settings).inject(model, small_models.head_of(model), 0))  # type: ignore[arg-type]
    return {pair.module.rpartition(".")[2] for pair in found}


@every(
    ("architecture", "settings", "endings"),
    [
        ("bert", {}, {"query", "value"}),
        ("roberta", {}, {"query", "value"}),
        ("distilbert", {}, {"q_lin", "v_lin"}),  # not among PEFT's defaults
        ("llama", {}, {"q_proj", "v_proj"}),
        ("gpt2", {}, {"c_attn"}),
        ("bert", {"target_modules": ("key", "attention.output.dense")}, {"key", "dense"}),
        ("bert", {"target_modules": r".*layer\.1\..*\.(query|key)"}, {"query", "key"}),
        (
            "llama",
            {"target_modules": "all-linear"},
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        ),
    ],
)
def test_targets_are_those_of_peft(architecture: str, settings: dict[str, Any], endings: set[str]) -> None:
    assert adapted(architecture, **settings) == endings


def test_the_head_gets_no_adapter() -> None:
    """ "dense" also matches the pooler and a layer of RoBERTa's classifier."""
    for architecture in ("bert", "roberta"):
        model = small_models.make(architecture)
        head = small_models.head_of(model)
        found = pairs(LoraAdapter(rank=2, target_modules=("dense",)).inject(model, head, 0))
        assert len(found) == 6
        assert all(".layer." in pair.module for pair in found)
        assert all(model.get_parameter(name).requires_grad for name in head)


def test_any_module_with_linear_layers() -> None:
    model = plain()
    found = pairs(LoraAdapter(rank=2, target_modules=("0", "2")).inject(model, ["4.weight", "4.bias"], 0))
    assert found == [
        Pair("0", "0.lora_A.default.weight", "0.lora_B.default.weight"),
        Pair("2", "2.lora_A.default.weight", "2.lora_B.default.weight"),
    ]
    assert pairs(name for name, _ in model.named_parameters()) == found
    assert all(
        0 < model.get_parameter(pair.a).abs().max() <= side**-0.5 for pair, side in zip(found, (6, 8), strict=True)
    )


def test_scale_reaches_the_layers() -> None:
    for adapter in (LoraAdapter(2, 5.0, target_modules=("0",)), LoraAdapter(2, 5.0, True, target_modules=("0",))):
        model = plain()
        adapter.inject(model, [], 0)
        assert model[0].scaling["default"] == pytest.approx(adapter.scaling)


@pytest.mark.parametrize("target_modules", [("query", "qery"), ("LayerNorm",), ("classifier",), "query", "("])
def test_targets_that_are_not_there(target_modules: tuple[str, ...] | str) -> None:
    model = small_models.make("bert")
    with refused(ConfigError if target_modules == "(" else MethodError):
        LoraAdapter(rank=2, target_modules=target_modules).inject(model, small_models.head_of(model), 0)
    assert not pairs(name for name, _ in model.named_parameters()), "the model was touched"


def test_the_refusal_of_layers_that_train_in_full_names_the_setting_they_are_in() -> None:
    """The default targets are in no head of their own; they are there by `method.modules_to_save`."""
    for wanted in ("", ("query",)):
        model = small_models.make("bert")
        head = [name for name, _ in model.named_parameters() if ".query." in name]
        with refused(MethodError):
            LoraAdapter(rank=2, target_modules=wanted).inject(model, head, 0)


def test_rank_above_the_layers_size() -> None:
    model = plain()
    with refused(MethodError):
        LoraAdapter(rank=7, target_modules=("0", "2")).inject(model, [], 0)
    assert not pairs(name for name, _ in model.named_parameters())
    LoraAdapter(rank=6, target_modules=("0", "2")).inject(model, [], 0)


def test_one_layer_in_two_places() -> None:
    layer = nn.Linear(4, 4)
    with refused(MethodError):
        LoraAdapter(rank=2, target_modules=("0",)).inject(nn.Sequential(layer, nn.ReLU(), layer), [], 0)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with refused(MethodError):
        LoraAdapter(rank=2, target_modules=("1",)).inject(tied, [], 0)


def test_another_name_for_the_same_place_is_no_second_place() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])
    model.first = model.blocks[0]
    LoraAdapter(rank=2, target_modules="all-linear").inject(model, [], 0)
    assert model.first[0] is model.blocks[0][0]


ADAPTER = LoraAdapter(rank=3, alpha=3.0, start="singular")


def made(architecture: str, adapter: LoraAdapter = ADAPTER, seed: int = 0) -> tuple[nn.Module, list[Pair]]:
    model = small_models.make(architecture)
    return model, pairs(adapter.inject(model, small_models.head_of(model), seed))


def matrix(model: nn.Module, module: str) -> np.ndarray:
    """The layer's matrix, (m, n), float64, whether or not the layer stores the transpose or is wrapped by PEFT."""
    layer = model.get_submodule(module)
    layer = cast(nn.Module, layer.base_layer) if hasattr(layer, "base_layer") else layer
    weight = layer.get_parameter("weight").detach()
    found: np.ndarray = (weight.T if isinstance(layer, Conv1D) else weight).double().numpy()
    return found


def numbers(model: nn.Module, found: list[Pair]) -> Tensors:
    return read(model, [name for pair in found for name in (pair.a, pair.b)])


@every(("architecture", "alpha"), [*((name, 3.0) for name in small_models.ARCHITECTURES), ("gpt2", 12.0)])
def test_a_and_b_hold_the_largest_singular_values_and_the_layer_the_rest(architecture: str, alpha: float) -> None:
    """Against numpy's own decomposition: s B A = sum_{i < r} s_i u_i v_i^T, balanced, and W_res = W - s B A."""
    adapter = LoraAdapter(rank=3, alpha=alpha, start="singular")
    base = small_models.make(architecture)
    model, found = made(architecture, adapter)
    tensors = numbers(model, found)
    for pair in found:
        u, s, vt = np.linalg.svd(matrix(base, pair.module))
        a, b = (tensors.tensor(name).double().numpy() for name in (pair.a, pair.b))
        best = sum(s[i] * np.outer(u[:, i], vt[i]) for i in range(3))
        np.testing.assert_allclose(alpha / 3 * b @ a, best, atol=1e-7)
        np.testing.assert_allclose(a @ a.T, np.diag(s[:3]) * 3 / alpha, atol=1e-7)
        np.testing.assert_allclose(b.T @ b, np.diag(s[:3]) * 3 / alpha, atol=1e-7)
        np.testing.assert_allclose(matrix(model, pair.module), matrix(base, pair.module) - best, atol=1e-7)
        assert (b[np.abs(b).argmax(0), range(3)] > 0).all(), "signs"


def test_a_matrix_of_lower_rank_leaves_directions_that_can_learn() -> None:
    layer = nn.Linear(6, 8)
    model = nn.Sequential(layer)
    with torch.no_grad():
        layer.weight.copy_(torch.outer(torch.arange(8.0), torch.ones(6)))
    LoraAdapter(rank=3, alpha=3.0, target_modules=("0",), start="singular").inject(model, [], 0)
    a, b = (model.get_parameter(f"0.lora_{side}.default.weight") for side in "AB")
    assert (b.norm(dim=0) > 1).tolist() == [True, False, False]
    assert (a.norm(dim=1) > 0.9).all()


def test_beside_bfloat16_the_factors_are_float32_and_the_rest_is_rounded_once() -> None:
    base = small_models.make("bert").to(torch.bfloat16)
    model = small_models.make("bert").to(torch.bfloat16)
    found = pairs(ADAPTER.inject(model, small_models.head_of(model), 0))
    tensors = numbers(model, found)
    for pair in found:
        assert {model.get_parameter(name).dtype for name in (pair.a, pair.b)} == {torch.float32}
        rest = matrix(model, pair.module)
        product = tensors.tensor(pair.b).double() @ tensors.tensor(pair.a).double()
        missed = np.abs(rest + product.numpy() - matrix(base, pair.module))
        assert (missed <= 2**-8 * np.abs(rest)).all()


# A trained state as factors.


def trained(initial: Tensors, names: tuple[str, ...] = ("lora_A", "lora_B")) -> Tensors:
    generator = torch.Generator().manual_seed(2)
    return Tensors(
        (name, initial.tensor(name) + 0.1 * torch.randn(initial[name].shape, generator=generator) * (part in name))
        for name in initial
        for part in [next((part for part in names if part in name), "nothing")]
    )


def merged(model: nn.Module, form: LoraForm) -> nn.Module:
    """`model` (without adapters) with W + s B A in place of every adapted W."""
    for module, (a, b) in form.factors.items():
        layer = model.get_submodule(module)
        weight = layer.get_parameter("weight").data
        rows: Tensor = weight.T if isinstance(layer, Conv1D) else weight  # a view
        rows += form.adapter.scaling * b @ a
    return model


@every("start", ["zero", "singular"])
@every("architecture", ["bert", "gpt2"])
@every(("moved", "rank"), [(("lora_A", "lora_B"), 6), (("lora_B",), 3), (("lora_A",), 6)])
def test_the_form_is_a_change_of_the_original_weights(
    start: str, architecture: str, moved: tuple[str, ...], rank: int
) -> None:
    """A singular start needs twice the rank, unless A has not changed."""
    adapter = LoraAdapter(rank=3, alpha=6.0, start=start)
    model, found = made(architecture, adapter)
    initial = numbers(model, found)
    after = trained(initial, moved)
    with torch.no_grad():
        for name in after:
            model.get_parameter(name).copy_(after.tensor(name))
    form = adapter.form(initial, after)
    assert form.adapter == LoraAdapter(rank=3, alpha=6.0)
    assert {a.shape[0] for a, _ in form.factors.values()} == {3 if start == "zero" else rank}
    base, whole = small_models.make(architecture), merged(small_models.make(architecture), form)
    for pair in found:
        change = 2.0 * (after.tensor(pair.b).double() @ after.tensor(pair.a).double()).numpy()
        computed = matrix(model, pair.module) + change
        np.testing.assert_allclose(matrix(whole, pair.module), computed, atol=1e-6)
        if start == "singular" or moved != ("lora_A",):  # A beside B = 0 changes nothing
            assert np.abs(computed - matrix(base, pair.module)).max() > 0.01
    assert torch.allclose(small_models.logits(whole), small_models.logits(model), atol=1e-5)


# B E A.


TRIPLET = TripletAdapter(LoraAdapter(rank=3, alpha=6.0))


def with_triplets(architecture: str, seed: int = 0, adapter: TripletAdapter = TRIPLET) -> tuple[nn.Module, list[str]]:
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
    model, names = with_triplets(architecture)
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
    one, other = (read(*with_triplets("bert", seed)) for seed in (1, 2))
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
    model, names = with_triplets("bert")
    tensors = fill(model, names)
    first, second, *_ = triplets(names)
    live = {t.module: torch.tensor([True, True, True]) for t in triplets(names)}
    live |= {first.module: torch.zeros(3, dtype=torch.bool), second.module: torch.tensor([True, False, False])}
    form = TRIPLET.form(kept(tensors, live))
    assert set(form.factors) == {t.module for t in triplets(names)} - {first.module}
    a, b = form.factors[second.module]
    assert torch.equal(a, tensors.tensor(second.a)[:1])
    assert torch.equal(b, tensors.tensor(second.b)[:, :1] * tensors.tensor(second.e)[0])
    assert form.adapter.scaling == 2.0


def test_per_example_gradients_with_a_module_without_ranks() -> None:
    model, names = with_triplets("bert")
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
    model, names = with_triplets("bert")
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
