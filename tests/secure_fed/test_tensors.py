"""Tensors as a vector space, their wire form and its length in bytes, and the layout."""

from __future__ import annotations

import math

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fed.tensors.tensors import _TYPES, Layout, LayoutError, LowRank, Tensors, wire_size
from tests.cells import every
from tests.golden import refused

torch.set_num_threads(1)


def low_rank(rows: int = 6, columns: int = 4, rank: int = 2, seed: int = 0) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    return LowRank(torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator))


def mixed(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return Tensors({"w": torch.randn(3, 2, generator=generator), "d": low_rank(seed=seed), "b": torch.randn(5)})


def test_names_are_sorted_whatever_order_they_come_in() -> None:
    assert list(Tensors({"b": torch.ones(1), "a": torch.ones(1)})) == ["a", "b"]
    assert list(Tensors({"b": torch.ones(1)}) | {"a": torch.ones(1)}) == ["a", "b"]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), factor=st.floats(-3, 3))
def test_arithmetic_is_that_of_the_dense_vectors(seed: int, factor: float) -> None:
    x, y = mixed(seed), mixed(seed + 1)
    layout = Layout.of(x)
    want = layout.flatten(x) + factor * layout.flatten(y)
    assert torch.allclose(layout.flatten(x + y * factor), want, atol=1e-5)
    assert torch.allclose(layout.flatten(x - y * -factor), want, atol=1e-5)
    assert torch.allclose(layout.flatten(x.dense() + factor * y), want, atol=1e-5)


def test_sums_and_multiples_of_factors_stay_factors() -> None:
    total = mixed(1) + mixed(2) * 0.5
    member = total["d"]
    assert isinstance(member, LowRank)
    assert member.rank == 4
    assert not isinstance(total.dense()["d"], LowRank)


def test_different_names_do_not_add() -> None:
    with refused(ValueError):
        Tensors({"a": torch.ones(1), "b": torch.ones(1)}) + Tensors({"a": torch.ones(1), "c": torch.ones(1)})


def test_select_and_without() -> None:
    x = mixed()
    assert list(x.select(["w", "b"])) == ["b", "w"]
    assert list(x.without(["w"])) == ["b", "d"]
    with pytest.raises(KeyError):
        x.select(["missing"])


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), rank=st.integers(0, 6), seed=st.integers(0, 1000))
def test_norm_of_factors_is_that_of_their_product(rows: int, columns: int, rank: int, seed: int) -> None:
    member = low_rank(rows, columns, rank, seed)
    want = float((member.left.double() @ member.right.double()).norm())
    assert Tensors({"d": member}).norm() == pytest.approx(want, rel=1e-6, abs=1e-12)


def test_norm_is_over_everything_together() -> None:
    x = mixed()
    assert x.norm() == pytest.approx(float(Layout.of(x).flatten(x).double().norm()), rel=1e-6)
    assert Tensors().norm() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_the_norm(bad: float) -> None:
    for member in (torch.tensor([1.0, bad]), LowRank(torch.tensor([[bad]]), torch.ones(1, 2))):
        x = Tensors({"x": member})
        assert not x.is_finite()
        assert not math.isfinite(x.norm())


def test_wire_form_keeps_bits_names_and_factors() -> None:
    x = mixed() | {"half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}
    again = Tensors.from_bytes(x.to_bytes())
    assert list(again) == list(x)
    assert isinstance(again["d"], LowRank)
    assert all(torch.equal(part, again.parts()[name]) for name, part in x.parts().items())
    assert x.wire_size == len(x.to_bytes())
    assert x.numel == 6 + 5 + 2 + (6 + 4) * 2


def test_factors_that_do_not_multiply_are_refused() -> None:
    with refused(ValueError):
        LowRank(torch.ones(3, 2), torch.ones(3, 2))


def test_flatten_follows_the_names_and_unflatten_inverts_it() -> None:
    x = Tensors({"b": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "a": torch.tensor([0.0])})
    layout = Layout.of(x)
    assert layout.flatten(x).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert layout.unflatten(layout.flatten(x)).tensor("b").tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert layout.size == 5

    assert Layout.of(Tensors()).flatten(Tensors()).shape == (0,)


def test_a_digest_is_that_of_the_dense_shapes_and_names() -> None:
    x = mixed()
    assert Layout.of(x) == Layout.of(x.dense())
    assert Layout.of(x).digest == Layout.of(x.dense()).digest
    shapes = [{"a": torch.ones(2, 3)}, {"a": torch.ones(3, 2)}, {"b": torch.ones(2, 3)}, {"a": torch.ones(6)}]
    assert len({Layout.of(Tensors(members)).digest for members in shapes}) == 4


def test_another_layout_is_refused() -> None:
    layout = Layout.of(mixed())
    with refused(LayoutError):
        layout.flatten(mixed().without(["b"]))
    with refused(LayoutError):
        layout.unflatten(torch.zeros(3))


Part = tuple[str, tuple[int, ...], torch.dtype]


def written(parts: list[Part]) -> int:
    return len(safetensors.torch.save({name: torch.empty(shape, dtype=dtype) for name, shape, dtype in parts}))


NAMES = st.text('aZ7._"\\/ \x00\n\x1f\x7f\u00e9\u2028\u4e2d\uffff\U0001f600', max_size=12)
SHAPES = st.lists(st.integers(0, 12), max_size=4).map(tuple)
PARTS = st.lists(st.tuples(NAMES, SHAPES, st.sampled_from(list(_TYPES))), max_size=8, unique_by=lambda part: part[0])


@settings(max_examples=50)
@given(parts=PARTS)
def test_any_names_shapes_and_types(parts: list[Part]) -> None:
    assert wire_size(tuple(parts)) == written(parts)


@every("count", [0, 1, 2, 9, 10, 11, 99, 100, 101, 400])
def test_offsets_of_every_length(count: int) -> None:
    """Later offsets have more digits, so the order of tensors by type shows in the length of the file."""
    types = (torch.float32, torch.bool, torch.float64, torch.bfloat16)
    parts: list[Part] = [(f"layer.{number}.weight", (number % 5 + 1, 3), types[number % 4]) for number in range(count)]
    assert wire_size(tuple(parts)) == written(parts)


@every("dtype", _TYPES)
def test_each_type_goes_to_its_place_beside_each_other(dtype: torch.dtype) -> None:
    """The other tensor's offsets have one digit or two, depending on whether nine numbers lie before it."""
    for other in _TYPES:
        parts: list[Part] = [("a", (9,), dtype), ("b", (1,), other), ("c", (0,), other)]
        assert wire_size(tuple(parts)) == written(parts)


def test_no_number_is_needed() -> None:
    """40 TB of float32 on the meta device, and a product that counts as its factors."""
    large = Tensors({"w": torch.empty(10**7, 10**6, device="meta")})
    assert 4 * 10**13 < large.wire_size < 4 * 10**13 + 200
    product = LowRank(torch.empty(10**6, 2, device="meta"), torch.empty(2, 10**6, device="meta"))
    assert 16 * 10**6 < Tensors({"d": product}).wire_size < 16 * 10**6 + 300
