"""The noise on a released sum: its law, its grid, and that nothing but the stream determines it."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from privacy.entropy import SeededEntropy, Stream, SystemEntropy
from privacy.errors import PlanError
from privacy.mechanisms import Gaussian, perturbed
from tests.cells import every

TOO_UNLIKELY = 1e-4  # a p-value below which a law is rejected; noise is seeded, so nothing here fails by chance


def stream(*label: str | int) -> Stream:
    return SeededEntropy(0).stream("mechanisms", *label)


def grid_of(std: float) -> float:
    """The largest power of two up to 2^-20 std, found by halving and doubling."""
    grid = 1.0
    while grid > std * 2.0**-20:
        grid /= 2
    while 2 * grid <= std * 2.0**-20:
        grid *= 2
    return grid


@every("std", [0.003, 1.0, 7.0])
@every("at", [0.0, 1.0, -123.456])
def test_released_noise_is_normal_and_other_scales_are_rejected(at: float, std: float) -> None:
    total = torch.full((20_000,), at, dtype=torch.float64)
    noise = (perturbed(total, std, stream(str(at), str(std))).double() - total).numpy() / std
    assert stats.kstest(noise, "norm").pvalue > TOO_UNLIKELY
    for scale in (2 / 3, 3 / 2):
        assert stats.kstest(scale * noise, "norm").pvalue < TOO_UNLIKELY


def test_every_coordinate_of_every_tensor_gets_noise_of_its_own() -> None:
    """Over many releases, each coordinate is N(0, std^2) and uncorrelated with every other one."""
    total = {"b": torch.tensor([[1.0, -2.0], [0.0, 5.0]]), "a": torch.tensor(3.0), "c": torch.zeros(2)}
    gaussian, drawn, flat = Gaussian(2.0), stream("coordinates"), torch.tensor([3.0, 1.0, -2.0, 0.0, 5.0, 0.0, 0.0])
    releases = [gaussian.noised(total, 0.5, drawn) for _ in range(4000)]
    noise = np.array([torch.cat([one[name].flatten() for name in "abc"]).sub(flat).numpy() for one in releases])
    for column in noise.T:
        assert stats.kstest(column, "norm").pvalue > TOO_UNLIKELY
    correlation = np.corrcoef(noise.T)[np.triu_indices(7, 1)]
    squares = np.corrcoef(noise.T**2)[np.triu_indices(7, 1)]
    assert max(np.abs(correlation).max(), np.abs(squares).max()) < 4.5 / math.sqrt(len(noise))


@given(
    st.floats(min_value=1e-25, max_value=1e25),
    st.lists(st.floats(min_value=-1e30, max_value=1e30), min_size=1, max_size=20),
)
def test_what_is_released_lies_on_the_grid(std: float, values: list[float]) -> None:
    """Releases are multiples of 2^(floor(log2 std) - 20), also where float32 then rounds them to a coarser grid."""
    released = perturbed(torch.tensor(values, dtype=torch.float64), std, stream("grid"))
    assert released.dtype == torch.float32
    steps = [Fraction(value) / Fraction(grid_of(std)) for value in released.tolist()]
    assert all(step.denominator == 1 for step in steps)


def test_the_grid_hides_what_unrounded_noise_shows() -> None:
    """A total below half a step releases the same bits as zero does; unrounded float64 noise would show the difference."""
    std, tiny = 1.0, 2.0**-40
    zeros = torch.zeros(1000, dtype=torch.float64)
    assert torch.equal(perturbed(zeros, std, stream("bits")), perturbed(zeros + tiny, std, stream("bits")))
    raw = torch.from_numpy(stream("bits").normal((1000,)))
    assert not torch.equal(raw, raw + tiny)


@every("ratio", [2.0**10, 2.0**24, 2.0**30, 2.0**45, 2.0**60])
def test_rounding_a_large_total_to_float32_is_post_processing(ratio: float) -> None:
    """The noise is added on the grid in float64, and then rounded to float32. The other order would lose small noise."""
    std = 0.75
    total = torch.full((2000,), ratio * std, dtype=torch.float64) + torch.arange(2000) * std
    noise = stream("large").normal((2000,)) * std
    before = np.round((noise + total.numpy()) / grid_of(std)) * grid_of(std)
    assert perturbed(total, std, stream("large")).tolist() == before.astype(np.float32).tolist()


def test_a_std_of_zero_copies() -> None:
    total = torch.tensor([1.0, 1 / 3, 1e-30])
    released = Gaussian(0.0).noised({"a": total}, 5.0, stream())["a"]
    assert torch.equal(released, total)
    assert released.data_ptr() != total.data_ptr()


@every("std", [math.nan, math.inf, -1.0, 1e-310])
def test_noise_that_cannot_be_drawn_is_refused(std: float) -> None:
    with pytest.raises(PlanError, match="noise multiplier times clip norm"):
        perturbed(torch.zeros(3), std, stream())


@every("shape", [(), (0,), (2, 0, 3), (1,), (5,), (2, 3, 4)])
@every("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_types(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    total = torch.full(shape, 2.5, dtype=dtype)
    released = perturbed(total, 1.0, stream("shapes"))
    assert released.shape == shape
    assert released.dtype == torch.float32
    assert torch.equal(total, torch.full(shape, 2.5, dtype=dtype))  # the argument is unchanged
    assert torch.equal(released, perturbed(total.double(), 1.0, stream("shapes")))
    assert released.numel() == 0 or not torch.equal(released, total.float())


def test_views_and_graphs_are_no_obstacle() -> None:
    parameter = torch.arange(12.0).reshape(3, 4).requires_grad_()
    released = perturbed(parameter.T, 1.0, stream("views"))
    assert not released.requires_grad
    assert torch.equal(released, perturbed(parameter.detach().T.contiguous(), 1.0, stream("views")))


def test_names_are_noised_in_their_order_whatever_the_order_of_the_total() -> None:
    total = {name: torch.zeros(3) for name in ("b", "a", "B", "a.1")}
    backwards = dict(reversed(total.items()))
    once, again = (Gaussian(1.0).noised(one, 1.0, stream("order")) for one in (total, backwards))
    assert list(once) == list(again) == ["B", "a", "a.1", "b"]
    assert all(torch.equal(once[name], again[name]) for name in once)
    flat = stream("order")
    assert all(torch.equal(once[name], perturbed(torch.zeros(3), 1.0, flat)) for name in sorted(once))


def test_nothing_but_the_stream_decides_the_noise() -> None:
    def seeded() -> list[float]:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        released: list[float] = Gaussian(1.0).noised({"a": torch.zeros(4)}, 1.0, SystemEntropy().stream())["a"].tolist()
        return released

    first, second = seeded(), seeded()
    assert not set(first) & set(second)


def test_an_empty_total_is_released_as_noise() -> None:
    """The release of an empty cohort is noise, which does not reveal that the cohort was empty."""
    released = Gaussian(1.0).noised({"a": torch.zeros(1000)}, 1.0, stream("empty"))["a"]
    assert stats.kstest(released.numpy(), "norm").pvalue > TOO_UNLIKELY
