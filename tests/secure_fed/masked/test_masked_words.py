"""Contributions encoded as words, and decoded sums: rounding errors, norms and refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.distributed import DistributedGaussian
from privacy.entropy import SeededEntropy
from protocols.errors import RangeError
from secure_fed.errors import ConfigError
from secure_fed.rounds.masked.encoding import Contribution, Noised, PublicPlan, Rounded
from tests.secure_fed.masked.wide_toys import scale

STREAM = SeededEntropy(0).stream("none")
NAN = math.nan


def summed(encoding: Any, contributions: list[Contribution | None]) -> Contribution:
    """The decoded sum of the encoded contributions, added modulo 2^bits as in the protocol."""
    total: Any = None
    for seed, said in enumerate(contributions):
        words = encoding.encode(said, SeededEntropy(seed).stream("words"))
        assert words.dtype == (np.uint32 if encoding.plan.bits == 32 else np.uint64)
        assert words.shape == (encoding.length,)
        if encoding.largest:
            signed = words.view(f"i{words.itemsize}").astype(np.int64)
            assert np.abs(signed).max() <= encoding.largest
        total = words if total is None else total + words
    said = encoding.decode(total)
    assert isinstance(said, Contribution)
    return said


coordinates = st.floats(-1, 1, allow_nan=False, width=64)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(coordinates, min_size=5, max_size=5), min_size=1, max_size=9),
    st.floats(1e-3, 1e5),
    st.sampled_from([32, 64]),
)
def test_a_sum_is_off_by_half_a_step_for_every_client_at_most(rows: list[list[float]], bound: float, bits: int) -> None:
    values = np.array(rows) * bound
    encoding = Rounded(PublicPlan(5, bits, len(rows), bound))
    found = summed(encoding, [Contribution(row, 1.0, NAN) for row in values])
    half = len(rows) / 2 / scale(len(rows), bound, bits)
    allowed = half * (1 + 1e-9) + 1e-15 * bound * len(rows)
    assert np.abs(found.values - values.sum(0)).max() <= allowed
    assert abs(found.weight - len(rows)) <= allowed / bound
    assert math.isnan(found.loss)
    mean = found.values / found.weight
    both = (1 + np.abs(values).max() / bound) * allowed / len(rows)  # the weight is rounded, too
    assert np.abs(mean - values.mean(0)).max() <= both * (1 + 1e-6)


def test_at_a_range_that_is_a_power_of_two_the_number_of_clients_is_exact() -> None:
    for n in range(1, 40):
        assert summed(Rounded(PublicPlan(3, 32, n, 8.0)), [Contribution(np.full(3, 8.0), 1.0, NAN)] * n).weight == n


def test_everybody_at_the_bound_does_not_wrap_around() -> None:
    for n in (1, 2, 3, 7, 1000):
        for sign in (-1, 1):
            encoding = Rounded(PublicPlan(2, 32, n, 7.3), with_loss=True)
            found = summed(encoding, [Contribution(np.full(2, sign * 7.3), 1.0, sign * 64.0)] * n)
            np.testing.assert_allclose(found.values, sign * 7.3 * n, rtol=1e-5)
            assert found.loss == pytest.approx(sign * 64, rel=1e-5)


def test_weights_count_up_to_the_most_and_losses_once_each() -> None:
    rng = np.random.default_rng(0)
    values, weights, losses = rng.uniform(-1, 1, (4, 6)), np.array([3.0, 10.0, 50.0, 7.0]), np.array([1.0, 2, 3, 5])
    found = summed(
        Rounded(PublicPlan(6, 64, 4, 8.0), most=20.0, with_loss=True),
        [Contribution(*row) for row in zip(values, weights, losses, strict=True)],
    )
    counted = np.minimum(weights, 20)
    np.testing.assert_allclose(found.values, counted @ values, atol=1e-9)
    assert found.weight == pytest.approx(40, abs=1e-9)
    assert found.loss == pytest.approx(losses.mean(), abs=1e-9)


def test_who_says_nothing_adds_nothing() -> None:
    encoding = Rounded(PublicPlan(3, 32, 3, 8.0), with_loss=True)
    found = summed(encoding, [Contribution(np.ones(3), 1.0, 2.0), None, Contribution(np.ones(3), 1.0, NAN)])
    assert found.values.tolist() == [2.0, 2.0, 2.0]
    assert (found.weight, found.loss) == (2.0, pytest.approx(2.0, abs=1e-4))
    assert not encoding.encode(None, STREAM).any()
    nobody = summed(encoding, [None, None])
    assert nobody.weight == 0
    assert math.isnan(nobody.loss)


@pytest.mark.parametrize("loss", [1e9, -1e9, math.inf, -math.inf, NAN])
def test_no_loss_is_too_large_to_be_sent(loss: float) -> None:
    found = summed(Rounded(PublicPlan(1, 32, 2, 8.0), with_loss=True), [Contribution(np.ones(1), 1.0, loss)] * 2)
    assert found.values.tolist() == [2.0]
    assert abs(found.loss) == pytest.approx(1000) if math.isfinite(loss) else math.isnan(found.loss)


def test_what_is_beyond_the_bound_or_no_number_is_refused() -> None:
    encoding = Rounded(PublicPlan(2, 32, 2, 8.0))
    for bad in (8.1, -9.0, math.inf, NAN):
        with pytest.raises(RangeError, match=r"coordinate 1 .*8\.0"):
            encoding.encode(Contribution(np.array([0.0, bad]), 1.0, NAN), STREAM)


# Clip norms.


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 50), st.floats(1e-3, 1e3), st.sampled_from([32, 64]), st.integers(0, 2**32 - 1)
)
def test_rounding_makes_no_admitted_contribution_longer_than_the_clip_norm(
    size: int, clients: int, clip_norm: float, bits: int, seed: int
) -> None:
    encoding = Rounded(PublicPlan(size, bits, clients, max(clip_norm, 1.0), clip_norm))
    longest = encoding.admitted()
    assert 0.99 * clip_norm <= longest <= clip_norm
    rng = np.random.default_rng(seed)
    for values in (rng.normal(size=size), np.eye(1, size)[0], np.ones(size)):
        values = values / np.linalg.norm(values) * longest * (1 - 1e-15)
        words = encoding.encode(Contribution(values, 1.0, NAN), STREAM)
        sent = words.view(f"i{words.itemsize}").astype(np.float64)[:size] / encoding.codec.scale
        assert np.linalg.norm(sent) <= clip_norm * (1 + 1e-12)


def test_without_the_margin_rounding_would_lengthen() -> None:
    encoding = Rounded(PublicPlan(10_000, 32, 50, 1.0, 0.1))
    step = 1 / encoding.codec.scale
    values = np.full(10_000, math.floor(0.1 / 100 / step) * step + 0.51 * step)
    values *= 0.1 / np.linalg.norm(values)
    words = encoding.encode(Contribution(values, 1.0, NAN), STREAM)
    sent = words.view("i4").astype(np.float64)[:-1] / encoding.codec.scale
    assert np.linalg.norm(values) <= 0.1 * (1 + 1e-12)
    assert encoding.admitted() < 0.1
    assert np.linalg.norm(sent) <= 0.1 + (0.1 - encoding.admitted())


def test_too_coarse_a_grid_is_refused_and_the_setting_named() -> None:
    with pytest.raises(
        ConfigError, match=r"1,000,000 coordinates of up to 50 clients to 32 bits.*secure_aggregation\.bits = 64"
    ):
        PublicPlan(1_000_000, 32, 50, 1.0, 1e-4).longest()
    assert PublicPlan(1_000_000, 64, 50, 1.0, 1e-4).longest() > 0.99e-4
    assert math.isinf(PublicPlan(1_000_000, 32, 50, 8.0).longest())


# Noise.


def test_shares_of_noise_are_in_what_anybody_sends() -> None:
    mechanism = DistributedGaussian(1.0, 4, 3, 32)
    encoding = Noised(PublicPlan(500, 32, 4, 0.5, 0.5), mechanism)
    sigma = mechanism.grid(500).sigma
    for said in (None, Contribution(np.full(500, 0.5 / math.sqrt(500)), 1.0, 3.0)):
        words = encoding.encode(said, SeededEntropy(1).stream("x")).view(np.int32).astype(float)
        spread = words.std() / sigma
        assert 0.8 < spread < 1.2
    assert encoding.length == 500
    assert encoding.largest == 0
    found = summed(encoding, [Contribution(np.full(500, 0.5 / math.sqrt(500)), 1.0, 3.0)] * 4)
    assert math.isnan(found.weight)
    assert math.isnan(found.loss)
    residue = found.values - 4 * 0.5 / math.sqrt(500)
    assert residue.std() == pytest.approx(mechanism.std(0.5, 500, 4), rel=0.2)


def test_no_two_shares_are_alike() -> None:
    encoding = Noised(PublicPlan(50, 32, 4, 0.5, 0.5), DistributedGaussian(1.0, 4, 3, 32))
    shares = [encoding.encode(None, SeededEntropy(seed).stream("x")).tobytes() for seed in range(4)]
    assert len(set(shares)) == 4
