"""LoRA initialised from the layer's weights, and a trained state expressed as a change of the model's original weights."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from secure_fed.learning.models.adapters.lora import LoraAdapter, LoraForm, Pair, pairs
from secure_fed.learning.models.adapters.parameters import read
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed import small_models

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


@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
@pytest.mark.parametrize("alpha", [3.0, 12.0])
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


@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
def test_the_model_computes_what_it_did(architecture: str) -> None:
    base, (model, _) = small_models.make(architecture), made(architecture)
    assert torch.allclose(small_models.logits(model), small_models.logits(base), atol=1e-6)


def test_the_start_is_a_function_of_the_weights_alone() -> None:
    (one, found), (two, _) = made("bert"), made("bert", seed=5)
    assert numbers(one, found).to_bytes() == numbers(two, found).to_bytes()
    assert all(np.array_equal(matrix(one, pair.module), matrix(two, pair.module)) for pair in found)


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


def test_on_the_meta_device_there_are_shapes() -> None:
    with torch.device("meta"):
        model = small_models.ARCHITECTURES["bert"]()
        found = pairs(ADAPTER.inject(model, small_models.head_of(model), 0))
    assert [tuple(model.get_parameter(name).shape) for name in (found[0].a, found[0].b)] == [(3, 16), (16, 3)]


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


@pytest.mark.parametrize("start", ["zero", "singular"])
@pytest.mark.parametrize("architecture", ["bert", "llama", "gpt2"])
@pytest.mark.parametrize(("moved", "rank"), [(("lora_A", "lora_B"), 6), (("lora_B",), 3), (("lora_A",), 6)])
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


def test_an_untrained_state_is_no_change() -> None:
    model, found = made("bert")
    initial = numbers(model, found)
    form = ADAPTER.form(initial, initial)
    assert all(float((b @ a).abs().max()) == 0 for a, b in form.factors.values())
