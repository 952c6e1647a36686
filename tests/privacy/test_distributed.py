"""Distributed noise: the sampler of discrete noise, random rounding, and the guarantee against exact sums of shares.

The sampler's law is compared with exact probabilities, its coins and thresholds with words that equal a fraction, and broken
variants are seen. Rounding keeps the mean and never exceeds its norm. Totals fit the modulus and have the stated error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from privacy import distributed
from privacy.accounting import calibrate, epsilon, unamplified
from privacy.distributed import (
    DistributedGaussian,
    Grid,
    Integers,
    discrete_gaussian,
    norm_bound,
    rounded,
    squared_bound,
    squared_norm,
    thresholds,
    wholes,
)
from privacy.entropy import Floats, SeededEntropy, Stream, Words
from privacy.errors import PlanError
from privacy.mechanisms import Gaussian
from protocols.thresholds import counted_shares
from tests.cells import chosen, every

TOO_UNLIKELY = 1e-6  # streams are seeded, so nothing here fails by chance


def stream(*label: str | int) -> Stream:
    return SeededEntropy(0).stream("discrete", *label)


class Scripted(Stream):
    """A stream that repeats the given words."""

    def __init__(self, *words: int) -> None:
        self._next = itertools.cycle(words)

    def words(self, count: int) -> Words:
        return np.array([next(self._next) for _ in range(count)], np.uint64)


def probabilities(sigma: float, reach: int) -> Floats:
    """(2 reach + 1,) probabilities of N_Z(0, sigma^2) at -reach .. reach, normalised over these values."""
    x = np.arange(-reach, reach + 1)
    weights = np.exp(-(x**2) / (2 * sigma**2))
    return np.asarray(weights / weights.sum())


def fit(samples: NDArray[np.int64], sigma: float) -> float:
    """The p-value of Pearson's test that samples follow N_Z(0, sigma^2); rare values (fewer than 10 expected) are one class."""
    law = probabilities(sigma, int(40 * sigma))
    reach = len(law) // 2
    cut = int(np.flatnonzero(law * len(samples) >= 10)[-1]) - reach
    expected = law[reach - cut : reach + cut + 1] * len(samples)
    clipped = np.clip(samples, -cut - 1, cut + 1)
    counts = np.bincount(clipped + cut + 1, minlength=2 * cut + 3)
    beyond = len(samples) - expected.sum()
    if beyond < 10:  # too few for a class of their own: counted with the lowest value
        counts[1] += counts[0] + counts[-1]
        expected[0] += beyond
        observed, wanted = counts[1:-1], expected
    else:
        observed = np.append(counts[1:-1], counts[0] + counts[-1])
        wanted = np.append(expected, beyond)
    return float(stats.chisquare(observed, wanted * (len(samples) / wanted.sum())).pvalue)


def shares(sigma: float, count: int, reach: int) -> Floats:
    """(2 reach + 1,) probabilities of the sum of `count` independent shares N_Z(0, sigma^2), at -reach .. reach."""
    one = probabilities(sigma, reach)
    total = one
    for _ in range(count - 1):
        total = np.convolve(total, one)
    beyond = (len(total) - len(one)) // 2  # outer values, which lack the tails cut off from a share
    return total[beyond : len(total) - beyond]


def shifted(law: Floats, by: int) -> tuple[Floats, Floats]:
    """The probabilities of by + X and of X, at the values that both arrays cover; the values left out are negligible."""
    return law[:-by], law[by:]


@pytest.mark.parametrize("sigma", chosen([1, 2, 4, 16, 128], [1, 128]))
def test_small_sigmas_have_the_exact_probabilities(sigma: int) -> None:
    samples = discrete_gaussian(sigma, 1_000_000, stream(sigma))
    assert samples.dtype == np.int64
    assert fit(samples, sigma) > TOO_UNLIKELY
    for other in (2 / 3, 0.98, 1.02, 3 / 2):
        assert fit(samples, other * sigma) < TOO_UNLIKELY
    normal = np.random.default_rng(0).standard_normal(1_000_000)
    assert sigma > 1 or fit(np.rint(sigma * normal).astype(np.int64), sigma) < TOO_UNLIKELY  # rounded: another law
    assert [len(discrete_gaussian(sigma, count, stream("count"))) for count in (0, 1, 2, 17)] == [0, 1, 2, 17]


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


def test_samples_are_independent_within_and_across_calls() -> None:
    drawn = stream("independent")
    first, second = (discrete_gaussian(4, 100_000, drawn).astype(np.float64) for _ in range(2))
    for one, other in ((first, second), (first[1:], first[:-1]), (first[1::2], first[::2]), (first[7:], first[:-7])):
        for power in (1, 2):
            assert abs(np.corrcoef(one**power, other**power)[0, 1]) < 5.5 / math.sqrt(len(one))


@pytest.mark.parametrize("at_once", chosen([1, 7, 1000], [7, 1000]))
def test_the_law_does_not_depend_on_how_many_are_made_in_one_go(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Surplus samples at the end of a block are dropped regardless of their values."""
    monkeypatch.setattr(distributed, "_PROPOSALS_AT_ONCE", at_once)
    drawn = stream("blocks", at_once)
    count = 100_000 if at_once == 1000 else 3000
    samples = discrete_gaussian(2, count, drawn)
    assert fit(samples, 2) > TOO_UNLIKELY


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
    for bits in (3, 64, 192):  # more bits begin with the same
        fine = [threshold >> bits for threshold in thresholds(2 * bits)]
        assert fine[: len(thresholds(bits))] == list(thresholds(bits))
        assert distributed.thresholds(bits, 60) == thresholds(bits)


def test_a_word_at_a_threshold_asks_for_another() -> None:
    for k, (coarse, fine) in enumerate(zip(thresholds(64), thresholds(128), strict=False)):
        rest = fine & (2**64 - 1)
        assert wholes(1, Scripted(coarse, rest - 1)).tolist() == [k]
        assert wholes(1, Scripted(coarse, rest + 1))[0] > k
        assert wholes(1, Scripted(coarse - 1, 0)).tolist() == [k]


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
    for unit in (2.0**20 + 1 / 3, 2.0**45 + 0.7):  # no smaller than the root of an integer
        numerator, denominator = norm_bound(unit, 1000).as_integer_ratio()
        assert numerator**2 >= squared_bound(unit, 1000) * denominator**2


@given(st.integers(1, 200), st.floats(0.0, 1000.0), st.floats(0.0, 1.0), st.integers(0, 10**6))
def test_no_result_is_longer_and_every_coordinate_is_next_to_its_value(
    dim: int, unit: float, length: float, seed: int
) -> None:
    values = vector(dim, unit * length, seed)
    result = rounded(values, unit, stream(seed))
    assert result.dtype == np.int64
    assert sum(int(one) ** 2 for one in result) <= squared_bound(unit, dim) <= norm_bound(unit, dim) ** 2 * (1 + 1e-15)
    assert ((result == np.floor(values)) | (result == np.floor(values) + 1)).all()


def test_the_mean_is_the_vector() -> None:
    """Apart from the norm condition, which most draws meet, neither one coordinate nor their sum is off by more than chance."""
    norm, draws, drawn = 30.0, 4000, stream("mean", "30.0")
    values = vector(500, norm)
    errors = np.mean([rounded(values, norm, drawn) for _ in range(draws)], axis=0) - values
    share = values - np.floor(values)
    spread = np.sqrt(share * (1 - share) / draws)
    assert (np.abs(errors) < 5.5 * spread + 0.1 / math.sqrt(500)).all()
    along = float(errors @ values) / norm  # the condition shortens by a small part of one rounding error
    assert abs(along) < 0.05 * math.sqrt(500) / 2
    assert abs(float(errors.sum())) < 6 * math.sqrt(float((spread**2).sum())) + 0.5


def test_what_is_too_long_is_drawn_again_and_never_clipped() -> None:
    """The first two draws round every coordinate up, the third at random: the result is the third draw, unchanged."""
    dim, unit = 400, 10.0
    values = np.full(dim, unit / math.sqrt(dim))  # halves: rounded up, their norm is 20
    assert dim > squared_bound(unit, dim)
    result = rounded(values, unit, Told(0.0, 0.0))
    expected = (Told().uniform(dim) < 0.5).astype(np.int64)
    assert result.tolist() == expected.tolist()


def test_norms_of_long_vectors_are_exact() -> None:
    values = np.random.default_rng(0).integers(-(2**61), 2**61, 2_100_000)
    values[:2] = (2**61, -(2**61))
    halves = values[:1_050_000], values[1_050_000:]
    assert squared_norm(values) == sum(map(squared_norm, halves))
    assert squared_norm(np.full(2_100_000, 2**42 - 1)) == 2_100_000 * (2**42 - 1) ** 2
    assert squared_norm(values[:50]) == sum(one**2 for one in values[:50].tolist())


MANY = [
    (1.0, 100, 100, 32),
    (0.89, 70, 36, 32),
    (3.0, 1000, 600, 32),
    (0.3, 3, 1, 32),
    (1.0, 10_000, 8000, 32),
    (1.0, 50, 20, 64),
]


def vectors(count: int, dim: int, norm: float) -> Floats:
    values = np.random.default_rng(0).standard_normal((count, dim))
    return np.asarray(values * (norm / np.linalg.norm(values, axis=1, keepdims=True)))


def guaranteed(grid: Grid, counted: int) -> float:
    """The multiplier of the continuous Gaussian noise that hides no more than the shares of a grid."""
    return math.sqrt(counted * grid.sigma**2 - 4) / grid.bound


def allowed(epsilons: Floats, z: float, rate: float) -> tuple[Floats, Floats]:
    """The hockey-stick divergences of (1 - q) N(0, z^2) + q N(1, z^2) from N(0, z^2) and the other way round, by thresholds."""
    x = np.linspace(-12 * z, 12 * z + 1, 40_001)[:, None]
    absent, present = stats.norm.sf(x / z), (1 - rate) * stats.norm.sf(x / z) + rate * stats.norm.sf((x - 1) / z)
    gone, here = stats.norm.cdf(x / z), (1 - rate) * stats.norm.cdf(x / z) + rate * stats.norm.cdf((x - 1) / z)
    factors = np.exp(epsilons)
    return (present - factors * absent).max(0), (gone - factors * here).max(0)


@every("rate", [1.0, 0.3])
@every("count", [1, 3])
@every("shift", [1, 6, 20])
def test_shares_hide_what_the_gaussian_of_their_guarantee_hides(rate: float, count: int, shift: int) -> None:
    """Of shares of the smallest sigma, exactly, at every epsilon; Gaussian noise of the same variance would hide more."""
    law = shares(4, count, 60 * count + shift)
    there, absent = shifted(law, shift)
    present = (1 - rate) * absent + rate * there
    epsilons = np.linspace(0, 5, 26)
    found = [
        np.array([np.maximum(one - np.exp(at) * other, 0).sum() for at in epsilons])
        for one, other in ((present, absent), (absent, present))
    ]

    def above(z: float) -> float:
        bounds = allowed(epsilons, z, rate)
        return max(float((one - bound).max()) for one, bound in zip(found, bounds, strict=True))

    assert above(math.sqrt(count * 16 - 4) / shift) <= 1e-9
    assert above(math.sqrt(count * 16) / shift) > 1e-6


@every("setting", MANY)
@every("dim", [1, 1000, 300_000])
def test_the_grid_gives_the_noise_multiplier_and_no_more(setting: tuple[float, int, int, int], dim: int) -> None:
    mechanism = DistributedGaussian(*setting)  # type: ignore[arg-type]
    grid = mechanism.grid(dim)
    assert grid.bound == norm_bound(grid.unit, dim)
    found = guaranteed(grid, mechanism.shares)
    assert found >= mechanism.noise_multiplier * (1 - 1e-15)
    assert found == pytest.approx(mechanism.noise_multiplier, rel=1e-9 + 2 / grid.bound**2)
    assert mechanism.grid(dim) is grid


@every("setting", MANY)
def test_totals_fit_the_modulus_and_twice_the_grid_would_not(setting: tuple[float, int, int, int]) -> None:
    mechanism, dim = DistributedGaussian(*setting), 300_000  # type: ignore[arg-type]
    n, grid = mechanism.contributors, mechanism.grid(dim)
    assert grid.sigma & (grid.sigma - 1) == 0
    far = math.sqrt(2 * math.log(2 * dim * 2.0**40))  # 2 exp(-far^2 / 2) is 2^-40 / dim
    most = n * (grid.unit + 1) + far * grid.sigma * math.sqrt(n)
    assert most <= 2 ** (mechanism.bits - 1) - 1
    assert 2 * most > 2 ** (mechanism.bits - 1) or grid.sigma == 2**40


@pytest.mark.parametrize("bits", [32, 64])
def test_a_total_is_the_sum_and_noise_of_the_said_size(bits: int) -> None:
    """Also where half of the clients drop out: every survivor adds its own share of the noise."""
    dim, clip_norm = 20_000, 0.7
    mechanism = DistributedGaussian(0.8, 12, 5, bits)  # type: ignore[arg-type]
    values = vectors(12, dim, clip_norm * 0.999)
    encoded = [mechanism.encoded(one, clip_norm, stream("client", i, bits)) for i, one in enumerate(values)]
    for survivors in (12, 6):
        total = sum(encoded[:survivors], np.zeros(dim, np.int64))
        noise = mechanism.decoded(total, clip_norm, dim) - values[:survivors].sum(axis=0)
        std = mechanism.std(clip_norm, dim, survivors)
        assert std == pytest.approx(0.8 * clip_norm * math.sqrt(survivors / 5), rel=1e-3)
        assert stats.kstest(noise / std, "norm").pvalue > TOO_UNLIKELY
        for scale in (2 / 3, 3 / 2):
            assert stats.kstest(scale * noise / std, "norm").pvalue < TOO_UNLIKELY


def test_totals_may_be_told_modulo_the_modulus() -> None:
    mechanism, dim = DistributedGaussian(1.0, 8, 8), 1000
    values = vectors(8, dim, 1.0)
    total = sum(
        (mechanism.encoded(one, 1.0, stream("wrap", i)) for i, one in enumerate(values)), np.zeros(dim, np.int64)
    )
    plain = mechanism.decoded(total, 1.0, dim)
    for residues in (total % 2**32, total - 2**32, total + 5 * 2**32):
        assert np.array_equal(mechanism.decoded(residues, 1.0, dim), plain)


def noiseless(sigma: int, count: int, stream: Stream) -> Integers:
    return np.zeros(count, np.int64)


def test_one_client_moves_an_integer_total_by_at_most_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """By brute force, in integer units, on cohorts that differ in one client; the grid is coarse, so that rounding shows."""
    monkeypatch.setattr(distributed, "discrete_gaussian", noiseless)
    mechanism, dim = DistributedGaussian(1.0, 200_000, 200_000), 10_000
    grid, drawn = mechanism.grid(dim), stream("sensitivity")
    assert grid.bound > 1.00001 * grid.unit
    worst = np.full(dim, 1 / math.sqrt(dim))
    corner = np.concatenate([[1.0], np.zeros(dim - 1)])
    others = sum(mechanism.encoded(one, 1.0, drawn) for one in vectors(3, dim, 1.0))
    moved = []
    for one in (worst, -worst, corner, *vectors(20, dim, 1.0)):
        difference = (others + mechanism.encoded(one, 1.0, drawn)) - others
        moved.append(math.sqrt(sum(int(entry) ** 2 for entry in difference)))
    assert grid.unit < max(moved) <= grid.bound
    assert not mechanism.encoded(np.zeros(dim), 1.0, drawn).any()


def test_the_variance_that_smooths_the_integers_is_charged() -> None:
    """Three shares of sigma 4 count as a variance of 44."""
    assert squared_bound(distributed._unit(1.0, 3, 4, 1), 1) == 43
    assert squared_bound(distributed._unit(math.sqrt(44 / 48), 3, 4, 1), 1) == 47


def test_noise_is_hardly_longer_than_central_noise_of_the_same_epsilon() -> None:
    """For 100 clients without dropouts or colluders, 300,000 coordinates and 32 bits."""
    assert 1 - 1e-9 <= DistributedGaussian(2.0, 100, 100).std(1.0, 300_000, 100) / 2.0 <= 1.0001


def test_colluders_do_not_count() -> None:
    """Of 70 clients 47 survive and 34 collude. If the colluders' shares are counted, a promised epsilon of 3 is about 6."""
    dim, delta, rounds, survivors, colluders = 10_000, 1e-5, 10, 47, 34
    z = calibrate(unamplified, rounds, 3.0, delta)
    careful = DistributedGaussian(z, 70, survivors - colluders)
    careless = DistributedGaussian(z, 70, survivors)
    assert guaranteed(careful.grid(dim), survivors - colluders) == pytest.approx(z, rel=1e-6)
    really = guaranteed(careless.grid(dim), survivors - colluders)
    assert epsilon(unamplified(really), rounds, delta) == pytest.approx(6.1, abs=0.3)
    assert careful.std(1.0, dim, 70) == pytest.approx(z * math.sqrt(70 / 13), rel=1e-4)
    assert careless.std(1.0, dim, 70) == pytest.approx(z * math.sqrt(70 / 47), rel=1e-4)


def test_clients_clip_as_with_central_noise() -> None:
    mechanism, central = DistributedGaussian(1.0, 10, 10), Gaussian(1.0)
    for norm in (0.0, 0.5, 3.0, math.inf, math.nan):
        assert mechanism.scale(lambda norm=norm: norm, 1.0) == central.scale(lambda norm=norm: norm, 1.0)  # type: ignore[misc]
    assert (mechanism.counters, mechanism.counted(lambda: 1.0, 1.0), mechanism.adapted(0.3, {})) == ((), {}, 0.3)


def test_a_single_honest_share_protects_less() -> None:
    """docs/deployment_threats.md: ten members, of whom one may drop out and one collude, so that eight shares count."""
    rounds, delta, counted = 20, 1e-5, counted_shares(10, 0.1, 0.1)
    stated = calibrate(unamplified, rounds, 8.0, delta)
    assert counted == 8
    assert epsilon(unamplified(stated), rounds, delta) <= 8
    assert epsilon(unamplified(stated / math.sqrt(counted)), rounds, delta) == pytest.approx(30, abs=1)


@every(
    "ask",
    [
        *(lambda sigma=sigma: discrete_gaussian(sigma, 1, stream()) for sigma in (0, -2, 3, 12, 1 << 41)),
        lambda: DistributedGaussian(1.0, 10, 10).encoded(vectors(1, 100, 1.1)[0], 1.0, stream()),
        lambda: DistributedGaussian(1.0, 10, 10).encoded(np.array([math.nan]), 1.0, stream()),
        *(lambda z=z: DistributedGaussian(z, 5, 5) for z in (0.0, 1e-200, 1e200, math.inf, math.nan)),
        *(lambda counted=counted: DistributedGaussian(1.0, 5, counted) for counted in (6, 0, -1)),
        lambda: DistributedGaussian(1e4, 100_000, 1).grid(300_000),
        lambda: DistributedGaussian(1.0, 1_000_000, 10**6).grid(10**8),  # rounding would be worse than the noise
        lambda: DistributedGaussian(1e10, 10**12, 1, 64).grid(300_000),
        lambda: rounded(vector(100, 50.0), 5.0, stream()),
        *(
            lambda bad=bad: rounded(np.array([0.0, bad]), 5.0, stream())
            for bad in (math.nan, math.inf, -math.inf, 1e300)
        ),
    ],
)
def test_what_cannot_be_noised_or_rounded_is_refused(ask: Callable[[], object]) -> None:
    with pytest.raises(PlanError):
        ask()
