"""Random rounding: its mean, the norm that it never exceeds, and the sensitivity of a sum of rounded vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.distributed import norm_bound, rounded, squared_bound, squared_norm
from privacy.entropy import Floats, SeededEntropy, Stream
from privacy.errors import PlanError
from tests.cells import every


def stream(*label: str | int) -> Stream:
    return SeededEntropy(0).stream("rounding", *label)


def vector(dim: int, norm: float, seed: int = 0) -> Floats:
    values = np.random.default_rng(seed).standard_normal(dim)
    return values * (norm / np.linalg.norm(values))


class Told(Stream):
    """A stream whose first calls give the numbers `first`, each for all coordinates, before it continues at random."""

    def __init__(self, *first: float) -> None:
        super().__init__(bytes(32))
        self.left = list(first)

    def uniform(self, count: int) -> Floats:
        return np.full(count, self.left.pop(0)) if self.left else super().uniform(count)


def test_the_bound_is_the_published_one() -> None:
    def published(unit: float, dim: int, beta: float) -> float:
        longest = (unit + math.sqrt(dim)) ** 2
        usual = unit**2 + dim / 4 + math.sqrt(2 * math.log(1 / beta)) * (unit + math.sqrt(dim) / 2)
        return math.sqrt(min(longest, usual))

    assert norm_bound(2.0**10, 393_000) / 2**10 == pytest.approx(1.046, abs=5e-4)
    for unit, dim in ((0.5, 1), (3.7, 10), (1e3, 10_000), (1e7, 300_000), (1e13, 300_000)):
        for beta in (math.exp(-0.5), 0.1, 1e-9):
            exact = published(unit, dim, beta)
            assert math.sqrt(max(0.0, exact**2 - 1)) <= norm_bound(unit, dim, beta) * (1 + 1e-15)
            assert norm_bound(unit, dim, beta) <= exact * (1 + 1e-15)


def test_the_bound_is_no_smaller_than_the_root_of_an_integer() -> None:
    for unit in (2.0**20 + 1 / 3, 12_345_678.9, 2.0**45 + 0.7):
        squared = squared_bound(unit, 1000)
        bound = norm_bound(unit, 1000)
        numerator, denominator = bound.as_integer_ratio()
        assert numerator**2 >= squared * denominator**2


@given(st.integers(1, 200), st.floats(0.0, 1000.0), st.floats(0.0, 1.0), st.integers(0, 10**6))
def test_no_result_is_longer_and_every_coordinate_is_next_to_its_value(
    dim: int, unit: float, length: float, seed: int
) -> None:
    values = vector(dim, unit * length, seed)
    result = rounded(values, unit, stream(seed))
    assert result.dtype == np.int64
    assert sum(int(one) ** 2 for one in result) <= squared_bound(unit, dim) <= norm_bound(unit, dim) ** 2 * (1 + 1e-15)
    assert ((result == np.floor(values)) | (result == np.floor(values) + 1)).all()


def test_integers_and_zeros_stay_what_they_are() -> None:
    """So a client that is not drawn, whose vector is zero, contributes only noise."""
    assert not rounded(np.zeros(1000), 1.0, stream()).any()
    assert rounded(np.array([3.0, -4.0, 0.0]), 5.0, stream()).tolist() == [3, -4, 0]


@pytest.mark.parametrize("norm", [3.0, 30.0, 300.0])
def test_the_mean_is_the_vector(norm: float) -> None:
    """Apart from the norm condition, which most draws meet, neither one coordinate nor their sum is off by more than chance."""
    values, draws = vector(500, norm), 4000
    drawn = stream("mean", str(norm))
    errors = np.mean([rounded(values, norm, drawn) for _ in range(draws)], axis=0) - values
    share = values - np.floor(values)
    spread = np.sqrt(share * (1 - share) / draws)
    assert (np.abs(errors) < 5.5 * spread + 0.1 / math.sqrt(500)).all()
    along = float(errors @ values) / norm  # the condition shortens by a small part of one rounding error
    assert abs(along) < 0.05 * math.sqrt(500) / 2
    assert abs(float(errors.sum())) < 6 * math.sqrt(float((spread**2).sum())) + 0.5


@every(("dim", "norm"), [(1, 0.5), (4, 1.0), (400, 10.0), (400, 1000.0), (10_000, 50.0)])
def test_most_draws_are_short_enough(dim: int, norm: float) -> None:
    """At least 39 % of the draws, also for vectors of halves, which rounding lengthens most."""
    values = np.full(dim, norm / math.sqrt(dim))
    drawn = stream("refused")
    limit = squared_bound(norm, dim)
    rounds = [np.floor(values) + (drawn.uniform(dim) < values - np.floor(values)) for _ in range(2000)]
    assert np.mean([float(one @ one) <= limit for one in rounds]) > 0.39


def test_what_is_too_long_is_drawn_again_and_never_clipped() -> None:
    """The first two draws round every coordinate up, the third at random: the result is the third draw, unchanged."""
    dim, unit = 400, 10.0
    values = np.full(dim, unit / math.sqrt(dim))  # halves: rounded up, their norm is 20
    assert dim > squared_bound(unit, dim)
    result = rounded(values, unit, Told(0.0, 0.0))
    expected = (Told().uniform(dim) < 0.5).astype(np.int64)
    assert result.tolist() == expected.tolist()


def test_unconditional_rounding_exceeds_the_bound() -> None:
    dim, unit = 400, 10.0
    values = np.full(dim, unit / math.sqrt(dim))
    drawn, limit = stream("unconditional"), squared_bound(unit, dim)
    longer = sum(int((drawn.uniform(dim) < values).sum()) > limit for _ in range(10_000))
    assert longer > 0
    assert max(squared_norm(rounded(values, unit, drawn)) for _ in range(10_000)) <= limit


@pytest.mark.parametrize("dim", [3, 50])
def test_sensitivity_of_a_sum_by_brute_force(dim: int) -> None:
    """One client more moves an integer sum by at most the bound, and by more than the clip norm at the worst."""
    unit, drawn = 6.0, stream("sensitivity")
    moved = []
    for seed in range(300):
        cohort = [vector(dim, unit, 10 * seed + member) for member in range(3)]
        if seed % 3 == 0:
            cohort[0] = np.full(dim, unit / math.sqrt(dim))
        rounds = [rounded(values, unit, drawn) for values in cohort]
        difference = np.sum(rounds, axis=0) - np.sum(rounds[1:], axis=0)
        moved.append(math.sqrt(sum(int(one) ** 2 for one in difference)))
    assert unit < max(moved) <= norm_bound(unit, dim)


@settings(max_examples=50)
@given(st.lists(st.integers(-(2**61), 2**61), max_size=50))
def test_norms_are_exact(values: list[int]) -> None:
    assert squared_norm(np.array(values, np.int64)) == sum(one**2 for one in values)


def test_norms_of_long_vectors_are_exact() -> None:
    values = np.random.default_rng(0).integers(-(2**61), 2**61, 2_100_000)
    values[:2] = (2**61, -(2**61))
    halves = values[:1_050_000], values[1_050_000:]
    assert squared_norm(values) == sum(map(squared_norm, halves))
    assert squared_norm(np.full(2_100_000, 2**42 - 1)) == 2_100_000 * (2**42 - 1) ** 2


def test_what_is_longer_than_the_unit_is_refused() -> None:
    with pytest.raises(PlanError, match="clip it to the norm 5 first"):
        rounded(vector(100, 50.0), 5.0, stream())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_what_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(PlanError, match="finite"):
        rounded(np.array([0.0, bad]), 5.0, stream())
