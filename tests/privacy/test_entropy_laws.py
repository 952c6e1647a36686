"""The laws of a stream's numbers: uniform, and normal up to the tails.

Streams are seeded, so no test fails by chance. A seeded stream differs from a private one by its key alone.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from privacy import entropy
from privacy.entropy import SeededEntropy, Stream
from tests.cells import chosen, every

BORDER = entropy._AT_ONCE

TOO_UNLIKELY = 1e-4  # a p-value below which a law is rejected


def stream(*label: str | int) -> Stream:
    return SeededEntropy(0).stream(*label)


class FixedBits(Stream):
    """A stream whose uniforms are given."""

    def __init__(self, *uniforms: float) -> None:
        self._left = list(uniforms)

    def uniform(self, count: int) -> NDArray[np.float64]:
        taken, self._left = self._left[:count], self._left[count:]
        return np.array(taken)


def test_uniforms_lie_on_the_grid_of_53_bits_in_the_half_open_interval() -> None:
    drawn = stream("u").uniform(200_000)
    assert drawn.dtype == np.float64
    assert drawn.min() >= 0
    assert drawn.max() < 1
    grid = drawn * 2.0**53
    assert (grid == np.floor(grid)).all()
    low_bits = grid.astype(np.uint64) & np.uint64(1)
    assert stats.binomtest(int(low_bits.sum()), len(drawn)).pvalue > TOO_UNLIKELY  # 53 bits, the last one included


def test_uniforms_are_uniform() -> None:
    drawn = stream("u").uniform(200_000)
    assert stats.kstest(drawn, "uniform").pvalue > TOO_UNLIKELY
    cells, _ = np.histogram(drawn, bins=256, range=(0, 1))
    assert stats.chisquare(cells).pvalue > TOO_UNLIKELY
    pairs, *_ = np.histogram2d(drawn[::2], drawn[1::2], bins=32, range=[(0, 1), (0, 1)])
    assert stats.chisquare(pairs.ravel()).pvalue > TOO_UNLIKELY
    assert stats.kstest(drawn**0.99, "uniform").pvalue < TOO_UNLIKELY  # and the test is sharp


def test_normals_are_normal_and_other_scales_are_rejected() -> None:
    drawn = stream("n").normal((100_000,))
    assert stats.kstest(drawn, "norm").pvalue > TOO_UNLIKELY
    for scale in (2 / 3, 3 / 2, 0.95, 1.05):
        assert stats.kstest(scale * drawn, "norm").pvalue < TOO_UNLIKELY


def test_tails_are_as_heavy_as_they_should_be() -> None:
    """Noise with thin tails would hide nothing there: the counts beyond 2, 3, 4 and 4.5 sigma must be binomial."""
    count = 3_000_000
    drawn = stream("tails").normal((count,))
    for sigma in (2, 3, 4, 4.5):
        for beyond in (int((drawn > sigma).sum()), int((drawn < -sigma).sum())):
            assert stats.binomtest(beyond, count, stats.norm.sf(sigma)).pvalue > TOO_UNLIKELY
    truncated = np.clip(drawn, -3.9, 3.9)
    assert stats.binomtest(int((truncated > 4).sum()), count, stats.norm.sf(4)).pvalue < TOO_UNLIKELY


@every("angle", [0.0, 0.25, 0.5, 1 - 2.0**-53])
@every("radius", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_the_extreme_uniforms_give_finite_normals(radius: float, angle: float) -> None:
    drawn = FixedBits(radius, angle).normal((2,))
    assert np.isfinite(drawn).all()
    assert np.abs(drawn).max() < 8.6
    assert np.hypot(*drawn) == pytest.approx(math.sqrt(-2 * math.log1p(-radius)))


def test_what_is_missing_of_the_tail_is_negligible() -> None:
    longest = float(FixedBits(1 - 2.0**-53, 0.0).normal((1,))[0])
    assert 8.5 < longest < 8.6
    assert 2 * stats.norm.sf(longest) < 1.1e-17


def test_the_two_halves_of_box_and_muller_are_independent() -> None:
    count = 100_000
    drawn = stream("halves").normal((2 * count,))
    cosines, sines = drawn[:count], drawn[count:]
    for first, second in ((cosines, sines), (cosines**2, sines**2), (np.abs(cosines), np.abs(sines))):
        assert stats.pearsonr(first, second).pvalue > TOO_UNLIKELY
    assert stats.kstest(cosines**2 + sines**2, stats.chi2(2).cdf).pvalue > TOO_UNLIKELY
    quarters, *_ = np.histogram2d(stats.norm.cdf(cosines), stats.norm.cdf(sines), bins=16, range=[(0, 1), (0, 1)])
    assert stats.chisquare(quarters.ravel()).pvalue > TOO_UNLIKELY
    assert stats.pearsonr(cosines**2, cosines**2 + sines**2).pvalue < TOO_UNLIKELY  # dependence is noticed


def test_neighbouring_coordinates_are_independent() -> None:
    drawn = stream("lags").normal((100_000,))
    for lag in (1, 2, 3, 8, 64):
        assert stats.pearsonr(drawn[:-lag], drawn[lag:]).pvalue > TOO_UNLIKELY


@pytest.mark.parametrize(
    "count", chosen([BORDER - 1, BORDER, BORDER + 1, BORDER + 2, 2 * BORDER + 3], [BORDER + 1, 2 * BORDER + 3])
)
def test_across_the_border_between_two_batches(count: int) -> None:
    """Batches leave no trace: every part is normal, no number repeats, and the last batch is there."""
    drawn = stream("border").normal((count,))
    assert drawn.shape == (count,)
    assert np.isfinite(drawn).all()
    assert len(np.unique(drawn)) == count
    around = drawn[max(0, BORDER - 20_000) : BORDER + 20_000]
    for part in (drawn, drawn[:BORDER], around):
        assert stats.kstest(part, "norm").pvalue > TOO_UNLIKELY
    assert len(drawn[BORDER:]) < 1000 or stats.kstest(drawn[BORDER:], "norm").pvalue > TOO_UNLIKELY
    if count >= 2 * BORDER:
        assert stats.pearsonr(drawn[:BORDER], drawn[BORDER : 2 * BORDER]).pvalue > TOO_UNLIKELY


def test_streams_of_different_labels_are_independent() -> None:
    first, second = (stream("contribution", 0, client).normal((100_000,)) for client in (0, 1))
    assert stats.pearsonr(first, second).pvalue > TOO_UNLIKELY
    assert not set(first.tolist()) & set(second.tolist())
