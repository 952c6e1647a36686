"""Mechanisms: clip factors against their definition, the law of the noise and its grid, and adaptive clipping.

Nothing but the stream determines the noise. Of adaptive clipping: the cost of the count, the sensitivity of vector and count,
and the step of the clip norm.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from privacy.entropy import SeededEntropy, Stream
from privacy.errors import PlanError
from privacy.mechanisms import COUNTER, AdaptiveGaussian, Gaussian, NoMechanism, clip_factor, perturbed
from tests.cells import every

TOO_UNLIKELY = 1e-4  # a p-value below which a law is rejected; noise is seeded, so nothing here fails by chance
NO_NUMBERS = (math.nan, math.inf, -math.inf, -1.0, -1e-300)


def stream(*label: str | int) -> Stream:
    return SeededEntropy(0).stream("mechanisms", *label)


def norm_of(*tensors: Tensor) -> float:
    """The norm of all tensors together, in float64, as a client measures it."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for tensor in tensors))


def exact_square_norm(*tensors: Tensor) -> Fraction:
    return sum((Fraction(value) ** 2 for tensor in tensors for value in tensor.flatten().tolist()), Fraction(0))


def test_no_mechanism_hands_out_the_very_total_and_does_not_even_measure() -> None:
    def norm() -> float:
        raise AssertionError("measuring takes time")

    total, nothing = {"b": torch.ones(3), "a": torch.ones(())}, NoMechanism()
    assert (nothing.scale(norm, 1.0), nothing.counted(norm, 1.0)) == (1.0, {})
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
    st.floats(min_value=0, max_value=1e200) | st.sampled_from(NO_NUMBERS), st.floats(min_value=1e-20, max_value=1e20)
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


def test_clip_factors_at_the_ends() -> None:
    ends = {(0.0, 1.0): 1, (0.0, 0.0): 1, (1.0, 0.0): 0, (1.0, math.inf): 1, (math.inf, math.inf): 0, (0.999, 1.0): 1}
    for (norm, clip_norm), factor in (ends | {(2.0, math.nan): 0, (2.0, -1.0): 0}).items():
        assert clip_factor(norm, clip_norm) == factor
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
    releases = [gaussian.noised(total, 0.5, drawn) for _ in range(1500)]
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


@every("std", [math.nan, math.inf, -1.0, 1e-310])
def test_noise_that_cannot_be_drawn_is_refused(std: float) -> None:
    with pytest.raises(PlanError, match="noise multiplier"):
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


def test_views_and_graphs_are_no_obstacle_and_a_std_of_zero_copies() -> None:
    view = torch.arange(12.0).reshape(3, 4).requires_grad_().T
    for std in (1.0, 0.0):
        released = perturbed(view, std, stream("views"))
        assert not (std and released.requires_grad)
        assert released.data_ptr() != view.data_ptr()
        assert torch.equal(released, perturbed(view.detach().contiguous(), std, stream("views")))
    assert torch.equal(released, view)


def test_names_are_noised_in_their_order_whatever_the_order_of_the_total() -> None:
    total = {name: torch.zeros(3) for name in ("b", "a", "B", "a.1")}
    backwards = dict(reversed(total.items()))
    once, again = (Gaussian(1.0).noised(one, 1.0, stream("order")) for one in (total, backwards))
    assert list(once) == list(again) == ["B", "a", "a.1", "b"]
    assert all(torch.equal(once[name], again[name]) for name in once)
    flat = stream("order")
    assert all(torch.equal(once[name], perturbed(torch.zeros(3), 1.0, flat)) for name in sorted(once))


@given(st.floats(min_value=0.1, max_value=50), st.floats(min_value=1.01, max_value=1000))
def test_vector_and_count_together_are_one_gaussian_of_the_multiplier_that_is_accounted_for(
    z: float, ratio: float
) -> None:
    mechanism = AdaptiveGaussian(z, 0.5, ratio * z / 2)
    z_v, s_b = mechanism.vector.noise_multiplier, mechanism.count_std
    assert z**-2 == pytest.approx(z_v**-2 + (2 * s_b) ** -2, rel=1e-9)
    assert z_v > z
    assert mechanism.std(3.0) == pytest.approx(3 * z_v)


@given(st.floats(min_value=0.1, max_value=50), st.floats(min_value=0.1, max_value=1e5))
def test_the_usual_noise_on_the_count_costs_the_vector_no_more_than_seven_percent(z: float, expected: float) -> None:
    mechanism = AdaptiveGaussian.of(z, 0.5, expected)
    assert mechanism.count_std >= expected / 20
    assert 1 < mechanism.vector.noise_multiplier / z < 1.07 or mechanism.count_std > 1e6 * z


@every(
    ("z", "count_std"),
    [*((1.0, s) for s in (0.0, 0.1, 0.5, -1.0, math.nan)), *((z, 1.0) for z in (math.nan, 0.0, -1.0))],
)
def test_too_little_noise_on_vector_or_count_is_refused(z: float, count_std: float) -> None:
    with pytest.raises(PlanError):
        AdaptiveGaussian(z, 0.5, count_std)


MECHANISM = AdaptiveGaussian(1.0, 0.5, 2.0)


def message(contribution: Tensor, clip_norm: float) -> NDArray[np.float64]:
    """One client's vector / C, followed by its count."""
    norm = float(torch.linalg.vector_norm(contribution, dtype=torch.float64))
    factor = MECHANISM.scale(lambda: norm, clip_norm)
    vector = contribution * factor if factor else torch.zeros_like(contribution)
    count = MECHANISM.counted(lambda: norm, clip_norm)[COUNTER]
    return np.append(vector.double().numpy() / clip_norm, float(count))


def test_one_contribution_moves_vector_and_count_by_no_more_than_is_accounted_for() -> None:
    """By brute force over neighbouring cohorts: at most 1 (vector / C) and 1/2 (count); twice that if a member is replaced."""
    generator = torch.Generator().manual_seed(0)
    pool = [torch.randn(4, generator=generator) * scale for scale in (1e-20, 0.1, 0.5, 1, 2, 100, 1e20)]
    pool += [torch.zeros(4), torch.tensor([0.5] * 4), torch.tensor([math.nan, 1, 1, 1]), torch.full((4,), math.inf)]
    pool += [-one for one in pool]
    for clip_norm in (1e-3, 0.5, 1.0, 30.0):
        messages = [message(one, clip_norm) for one in pool]
        whole = np.sum(messages, axis=0)
        for left_out in range(len(pool)):
            moved = whole - np.sum(messages[:left_out] + messages[left_out + 1 :], axis=0)
            assert np.linalg.norm(moved[:-1]) <= 1 + 1e-12
            assert abs(moved[-1]) == 0.5
        for one, other in itertools.combinations(messages, 2):
            assert np.linalg.norm((one - other)[:-1]) <= 2
            assert abs((one - other)[-1]) <= 1


@every(
    ("norm", "count"), [(0.0, 0.5), (1.0, 0.5), *((norm, -0.5) for norm in (1.0 + 1e-12, 1e300, math.nan, math.inf))]
)
def test_the_count_is_of_contributions_no_longer_than_the_clip_norm(norm: float, count: float) -> None:
    counted = MECHANISM.counted(lambda: norm, 1.0)
    assert set(counted) == set(MECHANISM.counters) == {COUNTER}
    assert counted[COUNTER].shape == ()
    assert float(counted[COUNTER]) == count


def test_the_noise_on_count_and_vector_follows_its_laws() -> None:
    mechanism, clip_norm, size = AdaptiveGaussian(1.2, 0.5, 3.0), 0.01, 20_000
    total = {"a": torch.full((size,), 2.0, dtype=torch.float64), COUNTER: torch.full((size,), -7.5)}
    released = mechanism.noised(total, clip_norm, stream("laws"))
    assert set(released) == {"a", COUNTER}
    count = (released[COUNTER].numpy() + 7.5) / 3.0  # in units that do not depend on the clip norm
    vector = (released["a"].double().numpy() - 2.0) / (mechanism.vector.noise_multiplier * clip_norm)
    for noise in (count, vector):
        assert stats.kstest(noise, "norm").pvalue > TOO_UNLIKELY
        for scale in (2 / 3, 3 / 2):
            assert stats.kstest(scale * noise, "norm").pvalue < TOO_UNLIKELY
    assert stats.pearsonr(count, vector).pvalue > TOO_UNLIKELY


def test_the_clip_norm_moves_by_the_formula() -> None:
    mechanism = AdaptiveGaussian(1.0, 0.25, 2.0, rate=0.3)
    for share in (-0.2, 0.0, 0.25, 0.5, 1.0, 1.3):  # noise can move the share out of [0, 1]
        moved = mechanism.adapted(4.0, {COUNTER: torch.tensor(share - 0.5)})
        assert moved == pytest.approx(4.0 * math.exp(-0.3 * (share - 0.25)), rel=1e-6)
    assert mechanism.adapted(4.0, {COUNTER: torch.tensor(0.25 - 0.5), "a": torch.ones(3)}) == 4.0
