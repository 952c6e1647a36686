"""The factor of a scaled change is computed from float32's grid, and no factor is found without a grid."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attacks.texts.factor_changes import scaled_by
from tests.cells import every


def parameters(seed: int, size: float = 0.1, step: float = 1e-4) -> tuple[Tensor, Tensor]:
    """A change of float32 parameters, as whoever takes the difference has it, and where it began."""
    generator = torch.Generator().manual_seed(seed)
    before = size * torch.randn(40, 50, generator=generator)
    after = before + step * size * torch.randn(40, 50, generator=generator)
    return after - before, before


@every("seed", range(5))
@every("factor", [1e-6, 0.37, 1.0, 7.1, 1e6])
@every("step", [1e-5, 1e-3])
def test_the_factor_is_found(seed: int, factor: float, step: float) -> None:
    change, before = parameters(seed, step=step)
    assert scaled_by([(change * factor, before)]) == pytest.approx(factor, rel=1e-5)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-6, 1e6), st.sampled_from([1e-5, 1e-3, 0.3]))
def test_another_factor_is_never_found(seed: int, factor: float, step: float) -> None:
    """Of changes as large as the parameters the grid may be too fine to be seen; then none is named."""
    change, before = parameters(seed, step=step)
    found = scaled_by([(change * factor, before)])
    assert found is None or found == pytest.approx(factor, rel=1e-5)


def test_tensors_of_all_sizes_share_one_factor() -> None:
    parts = [parameters(seed, size) for seed, size in enumerate((1e-3, 0.1, 20.0))]
    assert scaled_by([(change * 0.37, before) for change, before in parts]) == pytest.approx(0.37, rel=1e-5)


def test_sums_of_updates_are_on_the_grid_of_one() -> None:
    (one, before), generator = parameters(0), torch.Generator().manual_seed(9)
    other = (before + 1e-5 * torch.randn(40, 50, generator=generator)) - before
    assert scaled_by([(one + other, before)]) == pytest.approx(1, rel=1e-5)
    assert scaled_by([(one / math.pi + other / math.e, before)]) is None


@every("seed", range(4))
def test_numbers_on_no_grid_have_no_factor(seed: int) -> None:
    change, before = parameters(seed)
    noise = torch.randn(40, 50, generator=torch.Generator().manual_seed(seed + 1))
    assert scaled_by([(1e-4 * noise, before)]) is None
    assert scaled_by([(change.double() + 1e-7 * noise, before)]) is None


def test_where_there_is_nothing_to_see() -> None:
    change, before = parameters(0)
    assert scaled_by([]) is None
    assert scaled_by([(change, torch.zeros_like(before))]) is None
    assert scaled_by([(torch.zeros_like(change), before)]) is None
