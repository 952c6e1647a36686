"""The laws of cohorts and batches, and that the accounted event describes the draws.

Coins are seeded, so no test fails by chance.
"""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent
from numpy.typing import NDArray
from scipy import stats

from privacy import accounting
from privacy.accounting import Release
from privacy.entropy import SeededEntropy
from privacy.errors import PlanError
from privacy.sampling_and_turns import FixedSize, Poisson, Sampler, Uniform
from tests.cells import every

DRAWS = 4000
TOO_UNLIKELY = 1e-4  # a p-value below which a law is rejected
BOTH: tuple[Sampler, ...] = (FixedSize(20, 5), Poisson(20, 0.25))


def coins(seed: int = 0) -> Uniform:
    return SeededEntropy(seed).stream("coins").uniform


def drawn(sampler: Sampler, seed: int = 0, draws: int = DRAWS) -> NDArray[np.bool_]:
    """(draws, population): whether each member is in each draw."""
    uniform, population = coins(seed), len(sampler.draw(lambda count: np.zeros(count)))
    found = [sampler.draw(uniform) for _ in range(draws)]
    members = np.zeros((draws, max(population, 20)), dtype=bool)
    for row, draw in zip(members, found, strict=True):
        row[draw] = True
    return members


def given(*numbers: float) -> Uniform:
    """A source of coins that returns these numbers."""

    def uniform(count: int) -> NDArray[np.float64]:
        assert count == len(numbers)
        return np.array(numbers)

    return uniform


def plausible(successes: int, trials: int, probability: float) -> bool:
    return bool(stats.binomtest(int(successes), trials, probability).pvalue > TOO_UNLIKELY)


@pytest.mark.parametrize("sampler", BOTH)
def test_a_draw_depends_on_the_coins_alone(sampler: Sampler) -> None:
    np.random.seed(0)
    once = drawn(sampler, 1, 20)
    np.random.seed(1)
    assert (once == drawn(sampler, 1, 20)).all()
    assert (once != drawn(sampler, 2, 20)).any()


def test_a_poisson_draw_is_a_coin_for_each_member() -> None:
    """A coin equal to the rate leaves the member out, as P(u < q) = q requires: all are in at rate 1, none at rate 0."""
    rng = np.random.default_rng(0)
    for rate in (0.0, 0.001, 0.25, 0.5, 0.999, 1.0):
        assert Poisson(0, rate).draw(given()) == []
        for population in (1, 4, 30, 500):
            values = np.where(rng.random(population) < 0.2, rate, rng.random(population))
            values[:1] = np.nextafter(rate, -1).clip(0)
            values = values.clip(0, 1 - 2.0**-53)
            want = [member for member, value in enumerate(values) if value < rate]
            assert Poisson(population, rate).draw(given(*values)) == want


def test_a_fixed_sample_is_that_of_sorting_all_coins() -> None:
    """Among equal coins the first members are taken, as in a stable sort."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        population = int(rng.integers(1, 30))
        size, values = int(rng.integers(0, population + 1)), rng.integers(0, 6, population) / 8
        want = sorted(np.argsort(values, kind="stable")[:size].tolist())
        found = FixedSize(population, size).draw(given(*values))
        assert found == want
        assert all(type(member) is int for member in found)


@every(("population", "rate"), [(4, 0.5), (20, 0.25), (5_000, 0.05), (100_000, 0.001), (50, 1.0)])
@every("chance", [0.01, 2.0**-40])
def test_what_is_seldom_exceeded_is(population: int, rate: float, chance: float) -> None:
    """The result is at least the binomial quantile, and at most a standard deviation and one above it."""
    members, law = Poisson(population, rate).seldom_exceeded(chance), stats.binom(population, rate)
    assert law.sf(members) <= chance
    assert law.isf(chance) <= members <= min(law.isf(chance) + law.std() + 1, population)


def inclusion(release: Release) -> float:
    """The probability that a member is in a draw, according to the release's event."""
    event = release.event
    if isinstance(event, PoissonSampledDpEvent):
        return float(event.sampling_probability)
    if isinstance(event, SampledWithoutReplacementDpEvent):
        return float(event.sample_size / event.source_dataset_size)
    return 1.0


@pytest.mark.parametrize("sampler", [*BOTH, Poisson(20, 0.01), Poisson(20, 1.0), FixedSize(20, 1), FixedSize(20, 20)])
def test_what_is_accounted_for_is_what_is_drawn(sampler: Sampler) -> None:
    members = drawn(sampler)
    assert inclusion(sampler.release(1.0)) == sampler.rate
    assert plausible(members.sum(), members.size, sampler.rate)
    assert sampler.expected == pytest.approx(20 * sampler.rate)
    wrong = min(2 * sampler.rate, 1.0)
    assert wrong == sampler.rate or not plausible(members.sum(), members.size, wrong)


def test_a_poisson_release_is_poisson_with_a_member_more_or_less() -> None:
    release = Poisson(1000, 0.01).release(1.5)
    assert release.event == PoissonSampledDpEvent(0.01, GaussianDpEvent(1.5))
    assert (release.adjacency, release.accountant) == ("add-remove", "pld")
    assert release == accounting.poisson_sampled(0.01, 1.5)


def test_a_fixed_size_release_is_without_replacement_with_a_member_replaced() -> None:
    """Replacing a member moves a sum by 2 C, so an accountant of sensitivity 1 gets half the noise multiplier."""
    release = FixedSize(1000, 10).release(1.5)
    assert release.event == SampledWithoutReplacementDpEvent(1000, 10, GaussianDpEvent(0.75))
    assert (release.adjacency, release.accountant) == ("replace-one", "rdp")


def test_a_sample_of_everybody_is_not_amplified() -> None:
    everybody = Poisson(10, 1.0).release(1.5)
    assert (everybody.event, everybody.adjacency) == (GaussianDpEvent(1.5), "add-remove")
    assert FixedSize(10, 10).release(1.5) == accounting.replaced(1.5)


def test_a_fixed_size_release_is_never_taken_for_a_poisson_one() -> None:
    """At the same rate and noise it costs more: an account of Poisson samples would understate epsilon."""
    fixed, poisson = FixedSize(1000, 10).release(1.0), Poisson(1000, 0.01).release(1.0)
    assert not isinstance(fixed.event, PoissonSampledDpEvent)
    assert accounting.epsilon(fixed, 10, 1e-5) > 1.5 * accounting.epsilon(poisson, 10, 1e-5)


@every("sampler", [Poisson(10, 0.0), Poisson(10, 1.5), FixedSize(10, 0), FixedSize(10, 11)])
def test_what_cannot_be_accounted_for_is_refused(sampler: Sampler) -> None:
    for asked, z in ((sampler, 1.0), *((one, z) for one in BOTH for z in (0.0, -1.0, float("nan"), float("inf")))):
        with pytest.raises(PlanError):
            asked.release(z)
