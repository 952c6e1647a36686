"""The mechanism that does nothing, on which everything without privacy runs."""

from __future__ import annotations

import math

import pytest

from privacy.mechanisms import NoMechanism


@pytest.mark.parametrize("norm", [0.0, 1e-9, 7.0, 1e30, math.inf])
def test_no_mechanism_leaves_a_contribution_of_any_size(norm: float) -> None:
    assert NoMechanism().scale(lambda: norm) == 1.0


def test_no_mechanism_does_not_even_measure() -> None:
    def norm() -> float:
        raise AssertionError("measuring takes time")

    assert NoMechanism().scale(norm) == 1.0


def test_no_mechanism_hands_out_the_very_total() -> None:
    total = object()
    assert NoMechanism().release(total) is total
