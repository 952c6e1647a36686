"""oneDNN's products and derivatives equal those of `functional.linear` up to rounding; torch computes all others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from secure_fed.learning.models import matrix_products
from secure_fed.learning.models.adapters.per_example import EachOwn
from secure_fed.learning.models.matrix_products import hasten, hasten_thin, product
from tests.cells import every

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch carries no oneDNN")


@pytest.fixture(autouse=True)
def _onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_products, "faster", lambda: True)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_onednn(found: Tensor) -> bool:
    return type(found.grad_fn).__name__ == "_ProductBackward"


def derivatives(y: Tensor, moving: list[Tensor]) -> list[Tensor]:
    """The output, and the first and second derivatives of what is computed from it."""
    first = torch.autograd.grad(y.square().sum(), moving, create_graph=True)
    return [y, *first, *torch.autograd.grad(sum(one.square().sum() for one in first), moving)]


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_and_its_first_and_second_derivatives_are_those_of_torch(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def derived(linear: object) -> list[Tensor]:
        x, weight, offset = numbers(2, 8, 16), numbers(16, 16, seed=1) / 4, numbers(16, seed=2) if bias else None
        moving = [one.requires_grad_() for one in (x, weight, offset) if one is not None]
        return derivatives(linear(linear(x, weight, offset).tanh(), weight, offset), moving)  # type: ignore[operator]

    taken = []

    def hastened(*given: Tensor | None) -> Tensor:
        taken.append(by_onednn(found := product(*given)))
        return found

    monkeypatch.setattr(matrix_products, "FEW", 1)
    torch.testing.assert_close(derived(hastened), derived(functional.linear), rtol=1e-4, atol=1e-4)
    assert taken == [True, True]


def test_a_row_is_the_same_whoever_shares_its_product() -> None:
    x, weight, offset = numbers(32, 24, 128), numbers(96, 128, seed=1), numbers(96, seed=2)
    together = product(x, weight, offset)
    for count in (1, 2, 3, 8, 31):
        assert torch.equal(product(x[:count].clone(), weight, offset), together[:count])


@every(
    ("x", "weight"),
    [
        (numbers(4, 128), numbers(128, 128)),  # an example has one row, as in a pooler
        (numbers(4, 15, 128), numbers(128, 128)),  # fewer than 2,048 numbers an example
        (numbers(4, 64, 128), numbers(31, 128)),
        (numbers(4, 64, 128).double(), numbers(128, 128).double()),
        (numbers(4, 64, 128).bfloat16(), numbers(128, 128).bfloat16()),
        (numbers(4, 2, 64, 128), numbers(128, 128)),
    ],
)
def test_what_is_small_or_of_another_type_is_left_to_torch(x: Tensor, weight: Tensor) -> None:
    found = product(x.clone().requires_grad_(), weight)
    assert not by_onednn(found)
    assert torch.equal(found, functional.linear(x, weight))


def test_the_large_layers_of_a_model_take_it_and_tensors_of_each_example_do_not() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
    x = numbers(3, 20, 128).requires_grad_()
    before = model(x)
    hasten(model)
    assert by_onednn(model(x))
    assert not by_onednn(before)
    torch.testing.assert_close(model(x), before)
    own = EachOwn.of(numbers(3, 128, 128).requires_grad_())
    found = torch.func.functional_call(model, {"2.weight": own}, (x,))
    assert not by_onednn(found)
    alone = torch.func.functional_call(model, {"2.weight": own.rows[1]}, (x[1:2],))
    torch.testing.assert_close(found[1], alone[0])


def test_products_of_any_lengths_have_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, shapes = numbers(128, 128), set[int]()
    filled = matrix_products._filled

    def noted(x: Tensor) -> Tensor:
        shapes.add(len(found := filled(x)))
        return found

    monkeypatch.setattr(matrix_products, "_filled", noted)
    for length in (*range(16, 513, 5), 512):
        x = numbers(1, length, 128)
        torch.testing.assert_close(product(x, weight), functional.linear(x, weight), rtol=1e-4, atol=1e-4)
    assert len(shapes) <= 5 * 8 + 1
    assert max(shapes) == 512


def test_the_layers_of_gpt2_take_it() -> None:
    layer = Conv1D(96, 128)
    x, few = numbers(3, 24, 128), numbers(3, 8, 128)
    before = layer(x), layer(few)
    hasten(layer)
    assert by_onednn(layer(x))
    assert not by_onednn(layer(few))
    torch.testing.assert_close((layer(x), layer(few)), before)


def test_a_forward_of_somebody_elses_stays_and_a_copy_computes_with_its_own_tensors() -> None:
    layer, own, x = nn.Linear(128, 128), nn.Linear(128, 128), numbers(2, 20, 128)
    own.forward = torch.zeros_like  # type: ignore[method-assign]
    hasten(own)
    assert not own(x).any()
    hasten(layer)
    twin = copy.deepcopy(layer)
    nn.init.zeros_(twin.weight)
    nn.init.zeros_(twin.bias)
    assert not twin(x).any()
    assert layer(x).any()
    assert layer.state_dict().keys() == {"weight", "bias"}


def test_a_torch_without_the_operation_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise TypeError("another signature")

    assert matrix_products._there()
    monkeypatch.setattr(matrix_products, "_by_onednn", other)
    assert not matrix_products._there()


def test_an_intel_processor_keeps_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(matrix_products, "_processor", lambda: "vendor_id : GenuineIntel")
    matrix_products.faster.cache_clear()
    try:
        assert not matrix_products.faster()
    finally:
        matrix_products.faster.cache_clear()


@pytest.mark.parametrize("shape", [(3, 40), (40, 3)])
def test_a_thin_product_and_its_first_and_second_derivatives_are_those_of_torch(shape: tuple[int, int]) -> None:
    layer = nn.Linear(shape[1], shape[0], bias=False).double()
    layer.weight.data = numbers(*shape, seed=1).double() / shape[1] ** 0.5
    x = numbers(2, 5, shape[1]).double()

    def derived() -> list[Tensor]:
        return derivatives(layer(x.requires_grad_()).tanh(), [x, layer.weight])

    def in_float32() -> list[Tensor]:
        nonlocal x
        layer.float()
        x = x.detach().float()
        assert (type(layer(x).grad_fn).__name__ == "_ThinBackward") == ("forward" in vars(layer))
        return derived()

    expected = derived()
    torch.testing.assert_close(in_float32(), [one.float() for one in expected], rtol=1e-4, atol=1e-5)
    hasten_thin(layer)
    assert layer(torch.empty(0, shape[1])).shape == (0, shape[0]), "an expert without a token"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x.detach().float())
    y.float().sum().backward()
    torch.testing.assert_close(in_float32(), [one.float() for one in expected], rtol=1e-4, atol=1e-5)
