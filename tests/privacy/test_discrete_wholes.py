"""Whole numbers of weight exp(-k^2 / 2): their thresholds, their law, and words that equal a threshold."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from privacy import distributed
from privacy.distributed import resolved, thresholds, wholes
from privacy.entropy import SeededEntropy, Stream, Words

TOO_UNLIKELY = 1e-6  # streams are seeded, so nothing here fails by chance
LAW = np.exp(-np.square(np.arange(12)) / 2)
LAW /= LAW.sum()


def fit(found: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    """The p-value of Pearson's test, with 4 and more as one class."""
    counts = np.bincount(np.minimum(found, 4), minlength=5)
    expected = np.append(LAW[:4], LAW[4:].sum()) * len(found)
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
    assert fit(found) > TOO_UNLIKELY
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
    assert fit(np.array(of_small_words(50_000))) > TOO_UNLIKELY
    assert fit(np.array(of_small_words(50_000, careless=True))) < TOO_UNLIKELY


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
