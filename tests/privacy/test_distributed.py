"""Distributed noise: the guarantee against exact sums of shares, the grid, and the error of a total."""

from __future__ import annotations

import math

import numpy as np
import pytest
from mpmath import mp, mpf  # type: ignore[import-untyped]
from scipy import stats

from privacy import distributed
from privacy.accounting import EVERY_ORDER, by_rdp, calibrate, discrete, epsilon, unamplified
from privacy.distributed import DistributedGaussian, Grid, Integers, norm_bound, squared_bound
from privacy.entropy import Floats, SeededEntropy, Stream, SystemEntropy
from privacy.errors import PlanError
from privacy.mechanisms import Gaussian
from protocols.thresholds import counted_shares
from tests.cells import every
from tests.privacy.discrete_laws import divergence, shares, shifted

TOO_UNLIKELY = 1e-4  # streams are seeded, so nothing here fails by chance
MANY = [
    (1.0, 100, 100, 32),
    (0.89, 70, 36, 32),
    (3.0, 1000, 600, 32),
    (0.3, 3, 1, 32),
    (1.0, 10_000, 8000, 32),
    (1.0, 50, 20, 64),
]


def stream(*label: str | int) -> Stream:
    return SeededEntropy(0).stream("distributed", *label)


def vectors(count: int, dim: int, norm: float) -> Floats:
    values = np.random.default_rng(0).standard_normal((count, dim))
    return np.asarray(values * (norm / np.linalg.norm(values, axis=1, keepdims=True)))


def guaranteed(grid: Grid, counted: int, dim: int) -> float:
    """The noise multiplier that the guarantee gives for a grid, computed with forty digits."""
    with mp.workdps(40):
        terms = (mp.exp(-2 * mp.pi**2 * mpf(grid.sigma) ** 2 * mpf(j) / (j + 1)) for j in range(1, min(counted, 50)))
        gap = 10 * sum(terms, mpf(0)) * max(1, counted // 50 + 1)
        return float(1 / mp.sqrt(mpf(grid.bound) ** 2 / (counted * mpf(grid.sigma) ** 2) + gap * dim))


@every("count", [1, 2, 3, 4])
@every("shift", [1, 2])
def test_the_divergences_of_exact_sums_are_within_the_guarantee(count: int, shift: int) -> None:
    law = shares(1, count, 36)
    ratio = shift**2 / count
    for order in (1.01, 1.5, 2.0, 3.0, 4.0, 8.0):
        exact = divergence(*shifted(law, shift), order)
        assert exact <= order / 2 * (ratio + distributed._tau(count, 1)) * (1 + 1e-12)
        assert exact == pytest.approx(order / 2 * ratio, rel=1e-6)


def test_the_gap_of_shares_is_no_fiction() -> None:
    """A sum of discrete Gaussians is not a discrete Gaussian: at order 4 its divergence exceeds a Gaussian's."""
    found = divergence(*shifted(shares(1, 2, 36), 1), 4.0)
    assert found > (1 + 5e-8) * 4 / 2 / 2
    assert distributed._tau(2, 1) == pytest.approx(10 * math.exp(-(math.pi**2)), rel=1e-12)
    assert distributed._tau(3, 1) == pytest.approx(10 * (math.exp(-(math.pi**2)) + math.exp(-4 / 3 * math.pi**2)))
    assert distributed._tau(1, 1) == 0
    assert distributed._tau(10**9, 64) == 0


@every("setting", MANY)
@every("dim", [1, 1000, 300_000])
def test_the_grid_gives_the_noise_multiplier_and_no_more(setting: tuple[float, int, int, int], dim: int) -> None:
    mechanism = DistributedGaussian(*setting)  # type: ignore[arg-type]
    grid = mechanism.grid(dim)
    assert grid.bound == norm_bound(grid.unit, dim)
    found = guaranteed(grid, mechanism.shares, dim)
    assert found >= mechanism.noise_multiplier
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


@pytest.mark.parametrize("clip_norm", [1e-3, 0.7, 40.0])
def test_but_for_noise_a_total_is_the_sum_to_a_few_units(monkeypatch: pytest.MonkeyPatch, clip_norm: float) -> None:
    monkeypatch.setattr(distributed, "discrete_gaussian", noiseless)
    mechanism, dim = DistributedGaussian(1.0, 9, 6), 500
    values = vectors(9, dim, clip_norm)
    total = sum((mechanism.encoded(one, clip_norm, stream("sum")) for one in values), np.zeros(dim, np.int64))
    off = mechanism.decoded(total, clip_norm, dim) - values.sum(axis=0)
    assert np.abs(off).max() <= 9 * clip_norm / mechanism.grid(dim).unit


def test_the_gap_is_charged() -> None:
    """At sigma 1, eps^2 = Delta^2 / 3 + tau. A Delta^2 of 75 exceeds eps^2 = 25 + tau / 2, and fits 25 + 2 tau."""
    z = 1 / math.sqrt(25 + distributed._tau(3, 1) / 2)
    assert squared_bound(distributed._unit(z, 3, 1, 1), 1) == 74
    assert squared_bound(distributed._unit(1 / math.sqrt(25 + 2 * distributed._tau(3, 1)), 3, 1, 1), 1) == 75


def test_every_release_and_every_client_has_noise_of_its_own() -> None:
    mechanism, dim = DistributedGaussian(1.0, 4, 4), 10_000
    shares_of_noise = [mechanism.encoded(np.zeros(dim), 1.0, stream("own", i)).astype(float) for i in range(6)]
    correlations = np.corrcoef(shares_of_noise)[np.triu_indices(6, 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(dim)
    secret = [mechanism.encoded(np.zeros(8), 1.0, SystemEntropy().stream()).tolist() for _ in range(2)]
    assert secret[0] != secret[1]


def test_epsilon_is_within_five_percent_of_central_noise_of_the_same_error() -> None:
    """By the same accountant, for 100 clients without dropouts or colluders, 300,000 coordinates and 32 bits."""
    dim, delta, rounds = 300_000, 1e-5, 20
    z = calibrate(discrete, rounds, 3.0, delta)
    error = DistributedGaussian(z, 100, 100).std(1.0, dim, 100)
    central = by_rdp(unamplified(error), rounds, delta, EVERY_ORDER)
    charged = epsilon(discrete(z), rounds, delta)
    exact = epsilon(unamplified(error), rounds, delta)
    print(f"distributed {charged:.5f}, central of the same error {central:.5f} by Renyi, {exact:.5f} exactly")
    assert 2.97 < charged <= 3.0
    assert central <= charged * (1 + 1e-9)
    assert charged <= 1.05 * central
    assert charged <= 1.0001 * central  # the actual cost at 32 bits


def test_colluders_do_not_count() -> None:
    """Of 70 clients 47 survive and 34 collude. If the colluders' shares are counted, a promised epsilon of 3 is about 6."""
    dim, delta, rounds, survivors, colluders = 10_000, 1e-5, 10, 47, 34
    z = calibrate(discrete, rounds, 3.0, delta)
    careful = DistributedGaussian(z, 70, survivors - colluders)
    careless = DistributedGaussian(z, 70, survivors)
    assert guaranteed(careful.grid(dim), survivors - colluders, dim) == pytest.approx(z, rel=1e-6)
    really = guaranteed(careless.grid(dim), survivors - colluders, dim)
    assert epsilon(discrete(really), rounds, delta) == pytest.approx(6.1, abs=0.3)
    assert careful.std(1.0, dim, 70) == pytest.approx(z * math.sqrt(70 / 13), rel=1e-4)
    assert careless.std(1.0, dim, 70) == pytest.approx(z * math.sqrt(70 / 47), rel=1e-4)


def test_clients_clip_as_with_central_noise() -> None:
    mechanism, central = DistributedGaussian(1.0, 10, 10), Gaussian(1.0)
    for norm in (0.0, 0.5, 3.0, math.inf, math.nan):
        assert mechanism.scale(lambda norm=norm: norm, 1.0) == central.scale(lambda norm=norm: norm, 1.0)  # type: ignore[misc]
    assert mechanism.counters == ()
    assert mechanism.counted(lambda: 1.0, 1.0) == {}
    assert mechanism.adapted(0.3, {}) == 0.3


def test_what_is_longer_than_the_clip_norm_is_refused() -> None:
    mechanism = DistributedGaussian(1.0, 10, 10)
    with pytest.raises(PlanError, match="clip it to the norm"):
        mechanism.encoded(vectors(1, 100, 1.1)[0], 1.0, stream())
    with pytest.raises(PlanError, match="finite"):
        mechanism.encoded(np.array([math.nan]), 1.0, stream())


def test_noise_that_does_not_fit_is_refused_with_advice() -> None:
    with pytest.raises(PlanError, match="use 64 bits"):
        DistributedGaussian(1e4, 100_000, 1).grid(300_000)
    assert DistributedGaussian(1e4, 100_000, 1, 64).grid(300_000).sigma >= 4
    with pytest.raises(PlanError, match="use 64 bits"):
        DistributedGaussian(1.0, 1_000_000, 10**6).grid(10**8)  # rounding would be worse than the noise
    with pytest.raises(PlanError, match="fewer clients"):
        DistributedGaussian(1e10, 10**12, 1, 64).grid(300_000)


@every(
    ("multiplier", "contributors", "counted", "says"),
    [
        (0.0, 5, 5, "noise multiplier is 0"),
        (math.inf, 5, 5, "positive and finite"),
        (math.nan, 5, 5, "noise multiplier is nan"),
        (1.0, 5, 6, "6 shares"),
        (1.0, 5, 0, "0 shares"),
        (1.0, 5, -1, "between 1 and 5"),
    ],
)
def test_what_cannot_be_is_refused(multiplier: float, contributors: int, counted: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        DistributedGaussian(multiplier, contributors, counted)


def test_a_single_honest_share_protects_less() -> None:
    """docs/deployment_threats.md: ten members, of whom one may drop out and one collude, so that eight shares count."""
    rounds, delta, counted = 20, 1e-5, counted_shares(10, 0.1, 0.1)
    stated = calibrate(discrete, rounds, 8.0, delta)
    assert counted == 8
    assert epsilon(discrete(stated), rounds, delta) <= 8
    assert epsilon(discrete(stated / math.sqrt(counted)), rounds, delta) == pytest.approx(30, abs=1)
