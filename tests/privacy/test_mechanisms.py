"""Clip factors against their definition, and the numbers that mechanisms state about themselves."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from privacy.entropy import SeededEntropy, Stream
from privacy.mechanisms import Gaussian, NoMechanism, clip_factor
from tests.cells import every

NO_NUMBERS = (math.nan, math.inf, -math.inf, -1.0, -1e-300)


def stream(*label: str | int) -> Stream:
    return SeededEntropy(0).stream("mechanisms", *label)


def norm_of(*tensors: Tensor) -> float:
    """The norm of all tensors together, in float64, as a client measures it."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for tensor in tensors))


def exact_square_norm(*tensors: Tensor) -> Fraction:
    return sum((Fraction(value) ** 2 for tensor in tensors for value in tensor.flatten().tolist()), Fraction(0))


@every("norm", [0.0, 1e-9, 7.0, 1e30, math.inf, math.nan])
def test_no_mechanism_leaves_a_contribution_of_any_size(norm: float) -> None:
    assert NoMechanism().scale(lambda: norm, 1.0) == 1.0


def test_no_mechanism_does_not_even_measure() -> None:
    def norm() -> float:
        raise AssertionError("measuring takes time")

    nothing = NoMechanism()
    assert nothing.scale(norm, 1.0) == 1.0
    assert nothing.counted(norm, 1.0) == {}


def test_no_mechanism_hands_out_the_very_total_and_keeps_the_clip_norm() -> None:
    total, nothing = {"b": torch.ones(3), "a": torch.ones(())}, NoMechanism()
    noised = nothing.noised(total, 1.0, stream())
    assert noised is not total
    assert all(noised[name] is total[name] for name in total)
    assert (nothing.std(5.0), nothing.noise_multiplier, nothing.counters) == (0.0, 0.0, ())
    assert nothing.adapted(3.0, {}) == 3.0


def test_a_gaussian_says_what_it_does() -> None:
    gaussian = Gaussian(1.5)
    assert (gaussian.noise_multiplier, gaussian.std(4.0), gaussian.counters) == (1.5, 6.0, ())
    assert gaussian.counted(lambda: 1.0, 1.0) == {}
    assert gaussian.adapted(3.0, {}) == 3.0
    assert gaussian.scale(lambda: 8.0, 2.0) == clip_factor(8.0, 2.0)


@given(
    st.floats(min_value=0, max_value=1e200) | st.sampled_from(NO_NUMBERS),
    st.floats(min_value=1e-20, max_value=1e20),
)
def test_clip_factors_are_those_of_the_definition(norm: float, clip_norm: float) -> None:
    """min(1, C / norm), to one part in a million and never above; 0 if the norm is negative or not finite."""
    factor = clip_factor(norm, clip_norm)
    if not math.isfinite(norm) or norm < 0:
        assert factor == 0
        return
    naive = min(1.0, clip_norm / norm) if norm else 1.0
    assert factor <= naive
    assert factor * norm <= clip_norm
    assert factor >= naive * (1 - 1.01e-6) or (factor == 0 and naive < 1.2e-38)


@every("norm", NO_NUMBERS)
def test_what_has_no_norm_contributes_zeros(norm: float) -> None:
    assert clip_factor(norm, 1.0) == 0
    assert Gaussian(1.0).scale(lambda: norm, 1.0) == 0


@every("clip_norm", [math.nan, -1.0])
def test_no_clip_norm_bounds_nothing(clip_norm: float) -> None:
    assert clip_factor(2.0, clip_norm) == 0


def test_clip_factors_at_the_ends() -> None:
    assert clip_factor(0.0, 1.0) == 1
    assert clip_factor(0.0, 0.0) == 1
    assert clip_factor(1.0, 0.0) == 0
    assert clip_factor(1.0, math.inf) == 1
    assert clip_factor(math.inf, math.inf) == 0
    assert clip_factor(0.999, 1.0) == 1
    assert 1 - 2e-6 < clip_factor(1.0, 1.0) < 1
    assert 0 < clip_factor(1e30, 1.0) < 1e-30


EXTREME = [1e-45, 1.4e-45, 1e-40, 1.1754944e-38, 1e-30, 1e-10, 1.0, 1e10, 1e30, 3.4e38]


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30),
    st.integers(min_value=1, max_value=300),
    st.sampled_from(EXTREME) | st.floats(min_value=1e-45, max_value=1e38),
)
@example([1e35], 300, 1e-8)  # the factor underflows in float32
@example([3e38], 300, 0.1)
@example([1e-3], 300, 1e-42)  # and so do the scaled coordinates
@example([1e-45], 300, 1e-44)
@example([1e30, -1e30, 1e-30], 300, 1.0)
@example([0.1], 100, 1.0)
def test_what_was_scaled_in_float32_is_never_longer_than_the_clip_norm(
    values: list[float], repeated: int, clip_norm: float
) -> None:
    tensors = torch.tensor(values).repeat(repeated), torch.tensor(values[::-1])
    factor = clip_factor(norm_of(*tensors), clip_norm)
    scaled = [tensor * factor for tensor in tensors]
    assert norm_of(*scaled) <= clip_norm
    assert exact_square_norm(scaled[0][: len(values)], scaled[1]) <= Fraction(clip_norm) ** 2  # in exact arithmetic
    if 1e-30 <= clip_norm < norm_of(*tensors) < 1e30 * clip_norm:
        assert norm_of(*scaled) >= clip_norm * (1 - 1e-5)  # nor much shorter


def test_without_the_hair_rounding_makes_contributions_longer_than_the_clip_norm() -> None:
    """A factor of exactly 1 / norm leaves some contributions longer than 1, which the test above would catch."""
    generator = torch.Generator().manual_seed(0)
    contributions = [torch.randn(1000, generator=generator) for _ in range(50)]
    norms = [norm_of(contribution * (1 / norm_of(contribution))) for contribution in contributions]
    assert max(norms) > 1
    assert max(norm_of(one * clip_factor(norm_of(one), 1.0)) for one in contributions) <= 1
