"""Tensor trains against matrices computed entry by entry, their shapes, and their adapters in every architecture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.inserted import places
from secure_fed.learning.models.adapters.tensor_train import (
    PRINTED,
    TensorTrainLinear,
    TensorTrains,
    by_rule,
    core_shapes,
    factorisation,
)
from tests.cells import every
from tests.golden import refused
from tests.secure_fed import small_models
from tests.secure_fed.adapters.behind import shake

SMALL = TensorTrains(rank=3, bottleneck=4)
# The square layer of the head, whose weight gets a tensor train.
SQUARE = {
    "bert": "bert.pooler.dense",
    "roberta": "classifier.dense",
    "distilbert": "pre_classifier",
    "deberta": "pooler.dense",
    "deberta_v3": "pooler.dense",
    "llama": None,
    "gpt2": None,
}


def layer(m: int, n: int, rank: int, bias: bool = True) -> TensorTrainLinear:
    """A layer with random cores and bias."""
    made = TensorTrainLinear(m, n, rank, bias=bias, generator=torch.Generator().manual_seed(1))
    if made.bias is not None:
        made.bias.data = torch.randn(n, generator=torch.Generator().manual_seed(2))
    return made


def entries(cores: list[Tensor], m: int, n: int) -> Tensor:
    """The matrix (m, n), each entry the product of one slice of every core, eq. (1)."""
    sides = [range(core.shape[1]) for core in cores]
    flat = [
        np.linalg.multi_dot([core[:, i, :].double().numpy() for core, i in zip(cores, index, strict=True)]).item()
        for index in itertools.product(*sides)
    ]
    return torch.tensor(flat, dtype=torch.float64).reshape(m, n)


def contracted(cores: list[Tensor], m: int, n: int) -> Tensor:
    """The same matrix by one einsum over all cores."""
    letters = "abcdefgh"
    terms = [f"{letters[j].upper()}{letters[j]}{letters[j + 1].upper()}" for j in range(len(cores))]
    whole = np.einsum(
        f"{','.join(terms)}->{letters[: len(cores)]}",
        *[core.detach().double().numpy() for core in cores],
        optimize=True,
    )
    return torch.from_numpy(whole).reshape(m, n)


def cores_of(module: nn.Module) -> list[Tensor]:
    names = sorted(name for name, _ in module.named_parameters() if name.startswith("core_"))
    return [module.get_parameter(name).detach() for name in names]


def prepared(architecture: str) -> nn.Module:
    """A model whose trains are moved away from their start."""
    model = small_models.make(architecture)
    shake(model, SMALL.inject(model, small_models.head_of(model), 7))
    return model


# One layer.


@every(("m", "n", "rank"), [(12, 4, 3), (4, 12, 2), (16, 16, 5), (7, 6, 4), (5, 1, 2), (8, 4, 1)])
def test_forward_is_the_product_with_the_matrix_entry_by_entry(m: int, n: int, rank: int) -> None:
    train = layer(m, n, rank)
    x = torch.randn(2, 3, m, generator=torch.Generator().manual_seed(4))
    assert train.bias is not None
    want = x.double() @ entries(cores_of(train), m, n) + train.bias.double()
    assert torch.allclose(train(x).double(), want, atol=1e-6, rtol=1e-5)


@every(("m", "n"), [(768, 64), (64, 768), (768, 768), (4096, 64), (64, 4096)])
def test_forward_is_the_product_with_the_matrix_at_the_papers_sizes(m: int, n: int) -> None:
    train = layer(m, n, 5, bias=False)
    matrix = contracted(cores_of(train), m, n)
    assert torch.allclose(train(torch.eye(m)[:9]).double(), matrix[:9], atol=1e-6, rtol=1e-4)
    assert float(matrix.square().mean()) * m == pytest.approx(1, rel=1e-5)
    if 4096 not in (m, n):  # such a train has cores of side 4, below the rank
        values = torch.linalg.svdvals(matrix)
        assert torch.allclose(values[:5], values[0].expand(5), rtol=1e-5)
        assert float(values[5]) < 1e-5


class Largest(TorchDispatchMode):
    """Records the number of entries of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else (out,):
            if isinstance(part, Tensor):
                self.numel = max(self.numel, part.numel())
        return out


def test_the_matrix_is_never_formed_forward_or_backward() -> None:
    m, rank, tokens = 4096, 5, 7
    train, x = layer(m, m, rank), torch.randn(tokens, m)
    with Largest() as seen:
        train(x).square().sum().backward()
    assert seen.numel == tokens * m, "what goes in and comes out is larger than anything between"
    with Largest() as dense:
        torch.einsum("ra,ab->rb", x[:, :64], torch.ones(64, m) * torch.ones(m))
    assert dense.numel == 64 * m, "the count sees what is formed"


def test_a_layer_that_starts_at_zero_has_no_zero_but_its_last_core() -> None:
    train = TensorTrainLinear(12, 4, 3, bias=False, generator=torch.Generator().manual_seed(0), zero=True)
    assert [bool(core.any()) for core in cores_of(train)] == [True, True, True, False]
    assert not train(torch.randn(3, 12)).any()


# In a model.


def by_hand(model: nn.Module, adapted: nn.Module, square: str | None) -> None:
    """Make `model` compute `adapted`'s function, with dense matrices."""

    def matrix(module: nn.Module, m: int, n: int) -> Tensor:
        return contracted(cores_of(module), m, n).float()

    def adapter(name: str) -> Any:
        inside = adapted.get_submodule(f"{name}.tensor_train")
        down, up = matrix(inside.down, 16, 4), matrix(inside.up, 4, 16)  # type: ignore[arg-type]
        down_b, up_b = inside.get_parameter("down.bias"), inside.get_parameter("up.bias")

        def hook(_: nn.Module, args: Any, y: Tensor) -> Tensor:
            inner = y @ down + down_b
            gelu = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
            return y + gelu @ up + up_b

        return hook

    for place in places(model):
        model.get_submodule(place.module).register_forward_hook(adapter(place.module))
    if square is not None:
        dense = model.get_submodule(square)
        dense.weight.data += matrix(adapted.get_submodule(f"{square}.tensor_train"), 16, 16).T  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
def test_a_model_computes_what_its_adapters_say(architecture: str) -> None:
    adapted = prepared(architecture)
    model = small_models.make(architecture)
    before = small_models.logits(model)
    by_hand(model, adapted, SQUARE[architecture])
    want = small_models.logits(model)
    assert (want - before).abs().max() > 1e-3
    assert torch.allclose(small_models.logits(adapted), want, atol=1e-5)


def test_a_rank_above_what_a_matrix_can_need_is_refused() -> None:
    """Neither side of a cut of 16 x 4 numbers is always below 8, the root of 64."""
    model = small_models.make("bert")
    with refused(MethodError):
        TensorTrains(rank=9, bottleneck=4).inject(model, small_models.head_of(model), 0)
    TensorTrains(rank=8, bottleneck=4).inject(small_models.make("bert"), [], 0)


def test_a_square_layer_that_does_not_train_gets_no_train() -> None:
    model = small_models.make("bert")
    assert not any("pooler" in name for name in SMALL.inject(model, ["classifier.weight", "classifier.bias"], 0))
    assert not model.get_parameter("bert.pooler.dense.weight").requires_grad


def test_ranks_are_one_at_the_ends() -> None:
    assert core_shapes((4, 3, 2), 5) == [(1, 4, 5), (5, 3, 5), (5, 2, 1)]
    assert core_shapes((4, 3), 5) == [(1, 4, 5), (5, 3, 1)]


SIDES = st.integers(1, 9000)


@every(
    ("m", "n", "shape"),
    [
        # Printed in the paper.
        (768, 64, [8, 8, 12, 8, 8]),
        (64, 768, [8, 8, 12, 8, 8]),
        (4096, 64, [16, 16, 16, 4, 4, 4]),
        (64, 4096, [4, 4, 4, 16, 16, 16]),
        (768, 768, [12, 8, 8, 8, 8, 12]),
        (16, 768, [4, 4, 8, 8, 12]),
        # By its rule.
        (1024, 64, [8, 8, 16, 8, 8]),
        (1024, 1024, [16, 8, 8, 8, 8, 16]),
        (5120, 64, [16, 16, 20, 4, 4, 4]),
        (128, 64, [4, 4, 8, 8, 8]),
        (16, 4, [4, 4, 2, 2]),
        (769, 64, [769, 8, 8]),
        (7, 1, [7, 1]),
    ],
)
def test_shapes_as_printed_and_by_rule(m: int, n: int, shape: list[int]) -> None:
    assert list(factorisation(m, n).shape) == shape


def test_the_rule_gives_what_table_6_prints() -> None:
    odd = [sides for sides, printed in PRINTED.items() if by_rule(*sides) != printed]
    assert odd == [(16, 768)], "the example in the text has its largest factor at the end"


@given(SIDES, SIDES)
def test_factors_multiply_to_the_sides(m: int, n: int) -> None:
    found = factorisation(m, n)
    assert math.prod(found.rows) == m
    assert math.prod(found.columns) == n
    assert all(factor > 1 for side, factors in ((m, found.rows), (n, found.columns)) if side > 1 for factor in factors)


@given(st.integers(65, 4000), st.integers(65, 4000))
def test_three_factors_are_as_equal_as_can_be(m: int, n: int) -> None:
    divisors = [d for d in range(1, m + 1) if m % d == 0]
    least = min(a + b + m // (a * b) for a, b in itertools.product(divisors, divisors) if m % (a * b) == 0)
    rows = by_rule(m, n).rows
    assert sum(rows) + (3 - len(rows)) == least
    assert list(rows) == sorted(rows, reverse=m == n)
