"""LoRA: adapted layers, refusals before the model is changed, initial values, and states as changes of the original weights."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning.models.adapters.lora import LoraAdapter, LoraForm, Pair, pairs
from secure_fed.learning.models.adapters.parameters import read
from secure_fed.tensors.tensors import Tensors
from tests.cells import every
from tests.golden import refused
from tests.secure_fed import small_models


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
