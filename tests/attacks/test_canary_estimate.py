"""The estimate of Andrew et al.: against integrals, and against the Gaussian mechanism."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from attacks.canary_estimate import andrew_epsilon, excess


@pytest.mark.parametrize("p", [(0.0, 1.0), (1.0, 1.0), (0.5, 0.7), (-2.0, 2.0)])
@pytest.mark.parametrize("q", [(0.0, 1.0), (1.5, 1.0), (0.0, 1.3), (1.0, 1.0 + 1e-9)])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0])
def test_the_excess_is_the_integral_of_the_positive_part(
    p: tuple[float, float], q: tuple[float, float], epsilon: float
) -> None:
    def positive(x: float) -> float:
        return max(float(stats.norm.pdf(x, *p)) - math.exp(epsilon) * float(stats.norm.pdf(x, *q)), 0.0)

    expected = integrate.quad(positive, -25, 25, limit=500, points=np.linspace(-6, 6, 25))[0]
    assert excess(p, q, epsilon) == pytest.approx(expected, abs=1e-6)


def test_the_estimate_is_that_of_the_gaussian_mechanism_where_the_cosines_have_its_laws() -> None:
    """mu-GDP: delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)."""
    dimension, mu = 400, 1.3
    cosines = (mu + stats.norm.ppf((np.arange(20000) + 0.5) / 20000)) / math.sqrt(dimension)
    found = andrew_epsilon(cosines, dimension, 1e-5)
    delta = stats.norm.cdf(mu / 2 - found / mu) - math.exp(found) * stats.norm.cdf(-mu / 2 - found / mu)
    assert delta == pytest.approx(1e-5, rel=0.05)


def test_the_estimate_grows_with_what_canaries_show_and_is_zero_for_nothing() -> None:
    null = stats.norm.ppf((np.arange(4000) + 0.5) / 4000)
    found = [andrew_epsilon(shift + null, 1, 1e-2) for shift in (0.0, 0.5, 1.0, 4.0, 60.0)]
    assert found[0] == pytest.approx(0, abs=1e-2)
    assert found == sorted(found)
    assert math.isfinite(found[-1])
    assert andrew_epsilon(3 * null, 1, 1e-2) > 1  # a law that is wider tells too
    assert andrew_epsilon(null / 3, 1, 1e-2) > 1


@pytest.mark.parametrize(
    ("cosines", "dimension", "delta"),
    [([0.1], 10, 1e-5), ([0.1, math.nan], 10, 1e-5), ([0.1, 0.2], 0, 1e-5), ([0.1, 0.2], 10, 0.0)],
)
def test_an_estimate_of_nothing_is_refused(cosines: list[float], dimension: int, delta: float) -> None:
    with pytest.raises(ValueError, match="an estimate takes two finite cosines"):
        andrew_epsilon(np.array(cosines), dimension, delta)
