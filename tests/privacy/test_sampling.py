"""The laws of cohorts and batches, and that the accounted event describes the draws.

Coins are seeded, so no test fails by chance.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent
from numpy.typing import NDArray
from scipy import stats

from privacy import accounting
from privacy.accounting import Release
from privacy.entropy import SeededEntropy, SystemEntropy
from privacy.errors import PlanError
from privacy.sampling import FixedSize, Poisson, Sampler, Uniform
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


@every(
    "sampler", [FixedSize(20, 5), FixedSize(7, 7), FixedSize(9, 1), Poisson(20, 0.25), Poisson(5, 1.0), Poisson(5, 0.0)]
)
def test_a_draw_is_a_sorted_set_of_members(sampler: FixedSize | Poisson) -> None:
    uniform = coins()
    for _ in range(200):
        draw = sampler.draw(uniform)
        assert draw == sorted(set(draw))
        assert all(type(member) is int and 0 <= member < sampler.population for member in draw)


@pytest.mark.parametrize("sampler", BOTH)
def test_a_draw_depends_on_the_coins_alone(sampler: Sampler) -> None:
    np.random.seed(0)
    once = drawn(sampler, 1, 20)
    np.random.seed(1)
    assert (once == drawn(sampler, 1, 20)).all()
    assert (once != drawn(sampler, 2, 20)).any()


@pytest.mark.parametrize("sampler", BOTH)
def test_draws_follow_one_another(sampler: Sampler) -> None:
    """Successive draws are independent: a member is in both of two in a row with probability rate^2."""
    members = drawn(sampler)
    twice = int((members[:-1:2] & members[1::2]).sum())
    assert plausible(twice, members[::2].size, sampler.rate**2)


@pytest.mark.parametrize("sampler", BOTH)
def test_secret_coins_are_other_ones_every_time(sampler: Sampler) -> None:
    """Label and global seed are the same in both runs; 60 cohorts of about 5 of 20 do not coincide by chance."""
    runs = []
    for _ in range(2):
        np.random.seed(0)
        stream = SystemEntropy().stream("cohort")
        runs.append([sampler.draw(stream.uniform) for _ in range(60)])
    assert runs[0] != runs[1]


@pytest.mark.parametrize("sampler", BOTH)
def test_seeded_generators_of_numpy_are_coins_too(sampler: Sampler) -> None:
    assert sampler.draw(np.random.default_rng(3).random) == sampler.draw(np.random.default_rng(3).random)


def test_coins_are_compared_with_the_rate_strictly() -> None:
    """A coin equal to the rate leaves the member out, as P(u < q) = q requires: all are in at rate 1, none at rate 0."""
    below = np.nextafter(0.25, 0)
    assert Poisson(4, 0.25).draw(given(0.25, below, 0.0, 0.9)) == [1, 2]
    assert Poisson(2, 0.0).draw(given(0.0, 0.5)) == []
    assert Poisson(2, 1.0).draw(given(1 - 2.0**-53, 0.0)) == [0, 1]


def test_the_smallest_coins_are_the_sample() -> None:
    assert FixedSize(4, 2).draw(given(0.5, 0.1, 0.9, 0.2)) == [1, 3]
    assert FixedSize(3, 0).draw(given(0.5, 0.1, 0.9)) == []
    assert FixedSize(3, 3).draw(given(0.5, 0.1, 0.9)) == [0, 1, 2]


def test_a_fixed_sample_is_that_of_sorting_all_coins() -> None:
    """Among equal coins the first members are taken, as in a stable sort."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        population = int(rng.integers(1, 30))
        size, values = int(rng.integers(0, population + 1)), rng.integers(0, 6, population) / 8
        want = sorted(np.argsort(values, kind="stable")[:size].tolist())
        assert FixedSize(population, size).draw(given(*values)) == want


def test_a_fixed_sample_has_exactly_its_size() -> None:
    assert FixedSize(20, 5).expected == 5.0
    assert set(drawn(FixedSize(20, 5)).sum(1).tolist()) == {5}


def test_a_fixed_sample_is_uniform_over_all_subsets() -> None:
    uniform, sampler = coins(), FixedSize(6, 3)
    subsets = dict.fromkeys(itertools.combinations(range(6), 3), 0)
    for _ in range(DRAWS):
        subsets[tuple(sampler.draw(uniform))] += 1  # type: ignore[index]
    assert stats.chisquare(list(subsets.values())).pvalue > TOO_UNLIKELY


def test_a_fixed_sample_is_uniform_over_members_and_over_pairs() -> None:
    members = drawn(FixedSize(20, 5))
    assert all(plausible(member.sum(), DRAWS, 0.25) for member in members.T)
    for one, other in itertools.combinations(members.T, 2):
        assert plausible((one & other).sum(), DRAWS, 5 * 4 / (20 * 19))


def test_a_poisson_draw_is_a_coin_for_each_member() -> None:
    assert Poisson(20, 0.25).expected == 5.0
    members = drawn(Poisson(20, 0.25))
    assert all(plausible(member.sum(), DRAWS, 0.25) for member in members.T)
    for one, other in itertools.combinations(members.T, 2):  # coins are independent
        assert plausible((one & other).sum(), DRAWS, 0.0625)


def test_a_poisson_draw_has_a_binomial_size_and_may_be_empty() -> None:
    sizes = drawn(Poisson(20, 0.25)).sum(1)
    cells = [*range(1, 10)]  # the first cell has sizes 0 and 1, the last 10 and more
    found = np.bincount(np.clip(sizes, 1, 10), minlength=11)[1:]
    law = stats.binom(20, 0.25)
    expected = np.array([law.cdf(1), *(law.pmf(size) for size in cells[1:]), law.sf(9)]) * DRAWS
    assert stats.chisquare(found, expected).pvalue > TOO_UNLIKELY
    assert plausible((sizes == 0).sum(), DRAWS, 0.75**20)
    assert (sizes == 0).any()
    fixed = np.bincount(np.clip(drawn(FixedSize(20, 5)).sum(1), 1, 10), minlength=11)[1:]
    assert stats.chisquare(fixed, expected).pvalue < TOO_UNLIKELY  # a fixed size is another law


@every(("population", "rate"), [(4, 0.5), (20, 0.25), (5_000, 0.05), (100_000, 0.001), (50, 1.0)])
@every("chance", [0.01, 2.0**-40])
def test_what_is_seldom_exceeded_is(population: int, rate: float, chance: float) -> None:
    """The result is at least the binomial quantile, and at most a standard deviation and one above it."""
    members, law = Poisson(population, rate).seldom_exceeded(chance), stats.binom(population, rate)
    assert law.sf(members) <= chance
    assert law.isf(chance) <= members <= min(law.isf(chance) + law.std() + 1, population)


@every("rate", [1e-4, 0.01, 0.5, 0.999])
def test_a_coin_lands_with_its_rate(rate: float) -> None:
    count = 1_000_000
    assert plausible(len(Poisson(count, rate).draw(coins())), count, rate)


@every(("population", "rate"), [(0, 0.5), (1, 0.0), (1, 1.0)])
def test_small_populations(population: int, rate: float) -> None:
    assert Poisson(population, rate).draw(coins()) == list(range(population * int(rate)))
    assert Poisson(population, rate).expected == population * rate


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
def test_a_draw_that_cannot_be_accounted_for_is_refused(sampler: Sampler) -> None:
    with pytest.raises(PlanError):
        sampler.release(1.0)


@every("sampler", BOTH)
@every("z", [0.0, -1.0, float("nan"), float("inf")])
def test_no_noise_cannot_be_accounted_for(sampler: Sampler, z: float) -> None:
    with pytest.raises(PlanError):
        sampler.release(z)
