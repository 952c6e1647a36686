"""Adaptive clipping: the cost of the count, the sensitivity of vector and count, and that the clip norm finds its quantile."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from privacy.entropy import SeededEntropy, Stream
from privacy.errors import PlanError
from privacy.mechanisms import COUNTER, AdaptiveGaussian, Gaussian
from tests.cells import chosen, every

TOO_UNLIKELY = 1e-4  # a p-value below which a law is rejected; noise is seeded, so nothing here fails by chance


def stream(*label: str | int) -> Stream:
    return SeededEntropy(0).stream("clipping", *label)


class CountForFree(AdaptiveGaussian):
    """A broken mechanism: the vector's noise multiplier is z, as if the count were not released."""

    @property
    def vector(self) -> Gaussian:
        return Gaussian(self.noise_multiplier)


def joint_multiplier(mechanism: AdaptiveGaussian) -> float:
    """The multiplier of vector and count together: the inverse of one contribution's norm in units of the noise."""
    z_v, s_b = mechanism.vector.noise_multiplier, mechanism.count_std
    moved = np.array([1 / z_v, 0.5 / s_b])
    return 1 / float(np.linalg.norm(moved))


@given(st.floats(min_value=0.1, max_value=50), st.floats(min_value=1.01, max_value=1000))
def test_vector_and_count_together_are_one_gaussian_of_the_multiplier_that_is_accounted_for(
    z: float, ratio: float
) -> None:
    mechanism = AdaptiveGaussian(z, 0.5, ratio * z / 2)
    assert joint_multiplier(mechanism) == pytest.approx(z, rel=1e-9)
    z_v, s_b = mechanism.vector.noise_multiplier, mechanism.count_std
    assert z**-2 == pytest.approx(z_v**-2 + (2 * s_b) ** -2, rel=1e-9)
    assert z_v > z
    assert mechanism.std(3.0) == pytest.approx(3 * z_v)


@given(st.floats(min_value=0.1, max_value=50), st.floats(min_value=0.1, max_value=1e5))
def test_the_usual_noise_on_the_count_costs_the_vector_no_more_than_seven_percent(z: float, expected: float) -> None:
    mechanism = AdaptiveGaussian.of(z, 0.5, expected)
    assert joint_multiplier(mechanism) == pytest.approx(z)
    assert mechanism.count_std >= expected / 20
    assert 1 < mechanism.vector.noise_multiplier / z < 1.07 or mechanism.count_std > 1e6 * z


@pytest.mark.parametrize("count_std", [0.51, 0.7, 2.0])
def test_a_count_that_is_not_charged_is_seen(count_std: float) -> None:
    """The joint multiplier of the broken mechanism is below its z of 1, so the test of the formula would fail."""
    assert joint_multiplier(CountForFree(1.0, 0.5, count_std)) < 0.98


@pytest.mark.parametrize("count_std", [0.0, 0.1, 0.5, -1.0, math.nan])
def test_a_count_with_too_little_noise_is_refused(count_std: float) -> None:
    with pytest.raises(PlanError, match="above half"):
        AdaptiveGaussian(1.0, 0.5, count_std)


@pytest.mark.parametrize("z", [math.nan, 0.0, -1.0])
def test_no_noise_is_refused(z: float) -> None:
    with pytest.raises(PlanError, match="must be above 0"):
        AdaptiveGaussian(z, 0.5, 1.0)


MECHANISM = AdaptiveGaussian(1.0, 0.5, 2.0)


def sent(contribution: Tensor, clip_norm: float) -> NDArray[np.float64]:
    """One client's vector / C, followed by its count."""
    norm = float(torch.linalg.vector_norm(contribution, dtype=torch.float64))
    factor = MECHANISM.scale(lambda: norm, clip_norm)
    vector = contribution * factor if factor else torch.zeros_like(contribution)
    count = MECHANISM.counted(lambda: norm, clip_norm)[COUNTER]
    return np.append(vector.double().numpy() / clip_norm, float(count))


def test_one_contribution_moves_vector_and_count_by_no_more_than_is_accounted_for() -> None:
    """By brute force over neighbouring cohorts: at most 1 (vector / C) and 1/2 (count); twice that if a member is replaced."""
    generator = torch.Generator().manual_seed(0)
    pool = [torch.randn(4, generator=generator) * scale for scale in (1e-20, 0.1, 0.5, 1, 2, 100, 1e20)]
    pool += [torch.zeros(4), torch.tensor([0.5] * 4), torch.tensor([math.nan, 1, 1, 1]), torch.full((4,), math.inf)]
    pool += [-one for one in pool]
    for clip_norm in (1e-3, 0.5, 1.0, 30.0):
        messages = [sent(one, clip_norm) for one in pool]
        whole = np.sum(messages, axis=0)
        for left_out in range(len(pool)):
            moved = whole - np.sum(messages[:left_out] + messages[left_out + 1 :], axis=0)
            assert np.linalg.norm(moved[:-1]) <= 1 + 1e-12
            assert abs(moved[-1]) == 0.5
        for one, other in itertools.combinations(messages, 2):
            assert np.linalg.norm((one - other)[:-1]) <= 2
            assert abs((one - other)[-1]) <= 1


@every("norm", [math.nan, math.inf])
def test_what_cannot_be_measured_counts_as_long(norm: float) -> None:
    assert float(MECHANISM.counted(lambda: norm, 1.0)[COUNTER]) == -0.5
    assert MECHANISM.scale(lambda: norm, 1.0) == 0


@every(("norm", "count"), [(0.0, 0.5), (1.0, 0.5), (1.0 + 1e-12, -0.5), (1e300, -0.5)])
def test_the_count_is_of_contributions_no_longer_than_the_clip_norm(norm: float, count: float) -> None:
    counted = MECHANISM.counted(lambda: norm, 1.0)
    assert set(counted) == set(MECHANISM.counters) == {COUNTER}
    assert counted[COUNTER].shape == ()
    assert float(counted[COUNTER]) == count


def test_the_noise_on_count_and_vector_follows_its_laws() -> None:
    mechanism, clip_norm, size = AdaptiveGaussian(1.2, 0.5, 3.0), 0.01, 20_000
    total = {"a": torch.full((size,), 2.0, dtype=torch.float64), COUNTER: torch.full((size,), -7.5)}
    released = mechanism.noised(total, clip_norm, stream("laws"))
    assert set(released) == {"a", COUNTER}
    count = (released[COUNTER].numpy() + 7.5) / 3.0  # in units that do not depend on the clip norm
    vector = (released["a"].double().numpy() - 2.0) / (mechanism.vector.noise_multiplier * clip_norm)
    for noise in (count, vector):
        assert stats.kstest(noise, "norm").pvalue > TOO_UNLIKELY
        for scale in (2 / 3, 3 / 2):
            assert stats.kstest(scale * noise, "norm").pvalue < TOO_UNLIKELY
    assert stats.pearsonr(count, vector).pvalue > TOO_UNLIKELY


def test_noise_does_not_depend_on_the_order_of_names() -> None:
    total = {"b": torch.zeros(3), COUNTER: torch.zeros(()), "a": torch.zeros(2)}
    one, other = (MECHANISM.noised(t, 1.0, stream("order")) for t in (total, dict(reversed(total.items()))))
    assert all(torch.equal(one[name], other[name]) for name in total)


def test_the_clip_norm_moves_by_the_formula() -> None:
    mechanism = AdaptiveGaussian(1.0, 0.25, 2.0, rate=0.3)
    for share in (-0.2, 0.0, 0.25, 0.5, 1.0, 1.3):  # noise can move the share out of [0, 1]
        moved = mechanism.adapted(4.0, {COUNTER: torch.tensor(share - 0.5)})
        assert moved == pytest.approx(4.0 * math.exp(-0.3 * (share - 0.25)), rel=1e-6)
    assert mechanism.adapted(4.0, {COUNTER: torch.tensor(0.25 - 0.5)}) == 4.0


def followed(quantile: float, start: float, rounds: int = 250, cohort: int = 100) -> list[float]:
    """The clip norms of all rounds, in a federation with Poisson cohorts and log-normal contribution norms of median 1."""
    rng, entropy = np.random.default_rng(0), SeededEntropy(0)
    mechanism = AdaptiveGaussian.of(1.0, quantile, cohort)
    clip_norms = [start]
    for round_ in range(rounds):
        norms = rng.lognormal(0.0, 0.5, rng.poisson(cohort))
        counts = [float(mechanism.counted(lambda n=n: n, clip_norms[-1])[COUNTER]) for n in norms]  # type: ignore[misc]
        total = {"a": torch.zeros(2), COUNTER: torch.tensor(sum(counts))}
        released = mechanism.noised(total, clip_norms[-1], entropy.stream("sum", round_))
        clip_norms.append(mechanism.adapted(clip_norms[-1], {COUNTER: released[COUNTER] / cohort}))
    return clip_norms


@pytest.mark.parametrize("start", chosen([0.1, 1.0, 10.0], [0.1, 10.0]))
@pytest.mark.parametrize("quantile", chosen([0.3, 0.5, 0.8], [0.3]))
def test_the_clip_norm_finds_the_quantile_from_ten_times_too_small_or_too_large(quantile: float, start: float) -> None:
    target = float(stats.lognorm(0.5).ppf(quantile))
    clip_norms = followed(quantile, start * target)
    assert np.exp(np.mean(np.log(clip_norms[100:]))) == pytest.approx(target, rel=0.05)
    assert max(abs(math.log(norm / target)) for norm in clip_norms[100:]) < 0.25


def test_a_clip_norm_is_made_of_what_was_released_and_nothing_else() -> None:
    """The next clip norm depends on the released count alone; other released tensors do not change it."""
    share = {COUNTER: torch.tensor(0.1)}
    assert MECHANISM.adapted(2.0, share) == MECHANISM.adapted(2.0, share | {"a": torch.ones(3)})
