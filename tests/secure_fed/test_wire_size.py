"""The computed length of a safetensors file is the length of the file."""

from __future__ import annotations

import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from secure_fed.tensors.tensors import _TYPES, LowRank, Tensors, wire_size
from tests.cells import every

Part = tuple[str, tuple[int, ...], torch.dtype]


def written(parts: list[Part]) -> int:
    return len(safetensors.torch.save({name: torch.empty(shape, dtype=dtype) for name, shape, dtype in parts}))


NAMES = st.text('aZ7._"\\/ \x00\n\x1f\x7f\u00e9\u2028\u4e2d\uffff\U0001f600', max_size=12)
SHAPES = st.lists(st.integers(0, 12), max_size=4).map(tuple)
PARTS = st.lists(st.tuples(NAMES, SHAPES, st.sampled_from(list(_TYPES))), max_size=8, unique_by=lambda part: part[0])


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
