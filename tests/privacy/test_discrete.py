"""The sampler of discrete noise: its law against exact probabilities and another sampler, its coins, and broken variants.

Whole numbers of weight exp(-k^2 / 2): their thresholds, their law, and words that equal a threshold.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from privacy import distributed
from privacy.distributed import discrete_gaussian, resolved, thresholds, wholes
from privacy.entropy import SeededEntropy, Stream, SystemEntropy, Words
from privacy.errors import PlanError
from tests.cells import chosen, every
from tests.privacy.discrete_laws import Slow, fit

WHOLES_LAW = np.exp(-np.square(np.arange(12)) / 2)
WHOLES_LAW /= WHOLES_LAW.sum()
TOO_UNLIKELY = 1e-6  # streams are seeded, so nothing here fails by chance


def stream(*label: str | int) -> Stream:
    return SeededEntropy(0).stream("discrete", *label)


def test_words_are_uniform_bits_and_uniforms_are_made_of_them() -> None:
    words = stream("words").words(100_001)
    assert words.shape == (100_001,)
    for byte in words.view(np.uint8).reshape(-1, 8).T:
        assert stats.chisquare(np.bincount(byte, minlength=256)).pvalue > TOO_UNLIKELY
    assert np.array_equal(stream("words").uniform(100_001), (words >> np.uint64(11)) * 2.0**-53)


class Scripted(Stream):
    """A stream that repeats the given words."""

    def __init__(self, *words: int) -> None:
        self._next = itertools.cycle(words)

    def words(self, count: int) -> Words:
        return np.array([next(self._next) for _ in range(count)], np.uint64)


@pytest.mark.parametrize("sigma", chosen([1, 2, 4, 16, 128], [1, 128]))
def test_small_sigmas_have_the_exact_probabilities(sigma: int) -> None:
    samples = discrete_gaussian(sigma, 1_000_000, stream(sigma))
    assert samples.dtype == np.int64
    assert fit(samples, sigma) > TOO_UNLIKELY
    for other in (2 / 3, 0.98, 1.02, 3 / 2):
        assert fit(samples, other * sigma) < TOO_UNLIKELY


@pytest.mark.parametrize("sigma", [1, 2])
def test_a_rounded_gaussian_is_another_law(sigma: int) -> None:
    """A rounded Gaussian's variance is larger by 1 / 12; with that corrected, its tails still differ at sigma = 1."""
    normal = np.random.default_rng(0).standard_normal(1_000_000)
    assert fit(np.rint(sigma * normal).astype(np.int64), sigma) < TOO_UNLIKELY


@pytest.mark.parametrize("exponent", chosen([10, 20, 31, 32, 40], [10, 32, 40]))
def test_large_sigmas_are_normal_in_scale_and_uniform_in_their_last_bits(exponent: int) -> None:
    sigma, count = 1 << exponent, 100_000
    samples = discrete_gaussian(sigma, count, stream("large", exponent))
    scaled = samples / sigma
    # So many samples do not resolve a grid of 2^-10, the coarsest here.
    assert stats.kstest(scaled, "norm").pvalue > TOO_UNLIKELY
    for scale in (2 / 3, 3 / 2):
        assert stats.kstest(scale * scaled, "norm").pvalue < TOO_UNLIKELY
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(scaled**power) - moment) < 5 * math.sqrt(spread / count)
    for shift in (0, exponent // 2, exponent - 5):
        assert stats.chisquare(np.bincount((samples >> shift) & 15, minlength=16)).pvalue > TOO_UNLIKELY
    assert abs(np.mean(samples > 0) - 0.5) < 5 * 0.5 / math.sqrt(count)


def test_another_sampler_agrees() -> None:
    slow, count = Slow(0), 5_000
    others = np.array([slow.gaussian(2) for _ in range(count)])
    ours = discrete_gaussian(2, count, stream("slow"))
    table = [np.bincount(np.clip(one, -5, 5) + 5, minlength=11) for one in (others, ours)]
    assert stats.chi2_contingency(table).pvalue > TOO_UNLIKELY
    table[1] = np.bincount(np.clip(discrete_gaussian(4, count, stream("slow")), -5, 5) + 5, minlength=11)
    assert stats.chi2_contingency(table).pvalue < TOO_UNLIKELY


def test_samples_are_independent_within_and_across_calls() -> None:
    drawn = stream("independent")
    first, second = (discrete_gaussian(4, 300_000, drawn).astype(np.float64) for _ in range(2))
    for one, other in ((first, second), (first[1:], first[:-1]), (first[1::2], first[::2]), (first[7:], first[:-7])):
        for power in (1, 2):
            assert abs(np.corrcoef(one**power, other**power)[0, 1]) < 5.5 / math.sqrt(len(one))


def test_nothing_but_the_stream_decides() -> None:
    once, again = (discrete_gaussian(1 << 20, 100_000, stream("again")) for _ in range(2))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, discrete_gaussian(1 << 20, 100_000, stream("other")))
    secret = [discrete_gaussian(1 << 30, 50, SystemEntropy().stream()).tolist() for _ in range(2)]
    assert not set(secret[0]) & set(secret[1])


@pytest.mark.parametrize("at_once", chosen([1, 7, 1000], [7, 1000]))
def test_the_law_does_not_depend_on_how_many_are_made_in_one_go(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Surplus samples at the end of a block are dropped regardless of their values."""
    monkeypatch.setattr(distributed, "_PROPOSALS_AT_ONCE", at_once)
    drawn = stream("blocks", at_once)
    count = 100_000 if at_once == 1000 else 3000
    samples = discrete_gaussian(2, count, drawn)
    assert fit(samples, 2) > TOO_UNLIKELY


@every("count", [0, 1, 2, 17])
def test_as_many_as_asked_for(count: int) -> None:
    assert discrete_gaussian(8, count, stream("count")).shape == (count,)


def survives_without_failing(x: Words, times: NDArray[np.int64], drawn: Stream) -> NDArray[np.bool_]:
    return np.ones(len(x), np.bool_)


def test_broken_samplers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def law(count: int = 100_000, **changed: object) -> float:
        with monkeypatch.context() as patch:
            for name, value in changed.items():
                patch.setattr(distributed, name, value)
            return fit(discrete_gaussian(4, count, stream("broken")), 4)

    one_in, wholes = distributed._one_in, distributed.wholes
    rng = np.random.default_rng(0)
    assert law() > TOO_UNLIKELY
    assert law(_survives_each=survives_without_failing) < TOO_UNLIKELY
    assert (
        law(wholes=lambda count, drawn: rng.geometric(1 - math.exp(-0.5), count) - 1) < TOO_UNLIKELY
    )  # weight exp(-k / 2)
    assert law(_top=lambda bits: np.uint64((1 << 64) - (1 << 63))) < TOO_UNLIKELY
    no_series = {"_one_in": lambda sides, count, drawn: one_in(min(sides, 2), count, drawn)}
    assert law(1_000_000, **no_series) < TOO_UNLIKELY
    zero_is_positive = {"wholes": lambda count, drawn: np.maximum(wholes(count, drawn), 1)}
    assert law(**zero_is_positive) < TOO_UNLIKELY


def test_zero_counted_twice_is_seen() -> None:
    samples = discrete_gaussian(16, 1_000_000, stream("twice"))
    zeros = samples[samples == 0]
    assert fit(np.concatenate([samples, zeros]), 16) < TOO_UNLIKELY


@every("power", [1, 2])
@every("divisor", [1, 2])
@every("x", [0.0, 0.25, 0.71, 1 - 2.0**-20])
def test_a_coin_has_the_probability_it_says(power: int, divisor: int, x: float) -> None:
    count = 200_000
    tossed = distributed._survives(np.full(count, int(x * 2.0**64), np.uint64), power, divisor, stream("coin"))
    said = math.exp(-(x**power) / divisor)
    assert stats.binomtest(int(tossed.sum()), count, said).pvalue > TOO_UNLIKELY


def test_a_word_at_the_fraction_is_not_below_it() -> None:
    x = 5 << 60
    for word, passes in ((x - 1, True), (x, False), (x + 1, False)):
        # Passing the first step and failing the second is one success: odd, so the coin of exp(-x) fails.
        coin = distributed._survives(np.array([x], np.uint64), 1, 1, Scripted(word, (1 << 64) - 1))
        assert bool(coin[0]) is not passes


def test_a_side_is_no_likelier_than_another() -> None:
    """Half words beyond the last multiple of `sides` are redrawn; here 2^32 = 3 * 1431655765 + 1."""
    last = (1 << 32) - 1
    assert distributed._one_in(3, 1, Scripted(1431655764)).tolist() == [True]
    assert distributed._one_in(3, 1, Scripted(1431655765)).tolist() == [False]
    assert distributed._one_in(3, 1, Scripted(last, 0)).tolist() == [True]
    assert distributed._one_in(3, 1, Scripted(last, last, last - 1)).tolist() == [False]
    assert distributed._one_in(4, 1, Scripted(last, 0)).tolist() == [False]


@every("sigma", [0, -2, 3, 12, 1 << 41])
def test_other_sigmas_are_refused(sigma: int) -> None:
    with pytest.raises(PlanError, match="power of two up to"):
        discrete_gaussian(sigma, 1, stream())


def fit_wholes(found: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    """The p-value of Pearson's test, with 4 and more as one class."""
    counts = np.bincount(np.minimum(found, 4), minlength=5)
    expected = np.append(WHOLES_LAW[:4], WHOLES_LAW[4:].sum()) * len(found)
    return float(stats.chisquare(counts, expected).pvalue)


def exp_minus(exponent: Fraction, terms: int = 400) -> Fraction:
    """exp(-exponent) by its series, with an error below 1e-100 for the exponents here, which are at most 60.5."""
    total, term = Fraction(0), Fraction(1)
    for n in range(terms):
        total += term
        term *= -exponent / (n + 1)
    return total


def test_the_thresholds_are_those_of_exact_fractions() -> None:
    weights = [exp_minus(Fraction(k * k, 2)) for k in range(12)]
    total, below = sum(weights), Fraction(0)
    for weight, threshold in zip(weights, thresholds(64), strict=False):
        below += weight
        assert threshold == math.floor(below / total * 2**64)
    assert len(thresholds(64)) == 10
    assert thresholds(64)[-1] == 2**64 - 1


@pytest.mark.parametrize("bits", [3, 64, 192])
def test_more_bits_begin_with_the_same(bits: int) -> None:
    fine = [threshold >> bits for threshold in thresholds(2 * bits)]
    assert fine[: len(thresholds(bits))] == list(thresholds(bits))
    assert distributed.thresholds(bits, 60) == thresholds(bits)


def test_the_law_of_many() -> None:
    found = wholes(1_000_000, SeededEntropy(0).stream("wholes"))
    assert found.dtype == np.int64
    assert fit_wholes(found) > TOO_UNLIKELY
    assert found.max() < 12


def of_small_words(count: int, *, careless: bool = False) -> list[int]:
    """Samples from words of three bits, which often equal a threshold. careless: such a word counts as not below it."""
    rng, table, found = np.random.default_rng(0), thresholds(3), []
    for _ in range(count):
        word = int(rng.integers(8))
        if word in table and not careless:
            found.append(resolved(word, lambda: int(rng.integers(8)), 3))
        else:
            found.append(sum(word >= threshold for threshold in table))
    return found


def test_words_that_decide_nothing_are_gone_on_with() -> None:
    assert fit_wholes(np.array(of_small_words(50_000))) > TOO_UNLIKELY
    assert fit_wholes(np.array(of_small_words(50_000, careless=True))) < TOO_UNLIKELY


class Given(Stream):
    """A stream whose first call gives copies of `first`, and whose second gives copies of `then`."""

    def __init__(self, first: int, then: int) -> None:
        self._words = [first, then]

    def words(self, count: int) -> Words:
        return np.full(count, self._words.pop(0), np.uint64)


def test_a_word_at_a_threshold_asks_for_another() -> None:
    for k, (coarse, fine) in enumerate(zip(thresholds(64), thresholds(128), strict=False)):
        rest = fine & (2**64 - 1)
        assert wholes(1, Given(coarse, rest - 1)).tolist() == [k]
        assert wholes(1, Given(coarse, rest + 1))[0] > k
        assert wholes(1, Given(coarse - 1, 0)).tolist() == [k]
