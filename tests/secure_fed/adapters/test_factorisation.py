"""Shapes of tensor trains: the paper's, and the rule for all others."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secure_fed.learning.models.adapters.tensor_train import PRINTED, by_rule, factorisation

SIDES = st.integers(1, 9000)


@pytest.mark.parametrize(
    ("m", "n", "shape"),
    [
        (768, 64, [8, 8, 12, 8, 8]),
        (64, 768, [8, 8, 12, 8, 8]),
        (4096, 64, [16, 16, 16, 4, 4, 4]),
        (64, 4096, [4, 4, 4, 16, 16, 16]),
        (768, 768, [12, 8, 8, 8, 8, 12]),
        (16, 768, [4, 4, 8, 8, 12]),
    ],
)
def test_printed_shapes(m: int, n: int, shape: list[int]) -> None:
    assert list(factorisation(m, n).shape) == shape


def test_the_rule_gives_what_table_6_prints() -> None:
    odd = [sides for sides, printed in PRINTED.items() if by_rule(*sides) != printed]
    assert odd == [(16, 768)], "the example in the text has its largest factor at the end"


@pytest.mark.parametrize(
    ("m", "n", "shape"),
    [
        (1024, 64, [8, 8, 16, 8, 8]),
        (1024, 1024, [16, 8, 8, 8, 8, 16]),
        (5120, 64, [16, 16, 20, 4, 4, 4]),
        (128, 64, [4, 4, 8, 8, 8]),
        (16, 4, [4, 4, 2, 2]),
        (769, 64, [769, 8, 8]),
        (7, 1, [7, 1]),
    ],
)
def test_shapes_by_rule(m: int, n: int, shape: list[int]) -> None:
    assert list(factorisation(m, n).shape) == shape


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
