"""The laws that cohorts are drawn by. Seeds are fixed, so nothing here fails by chance."""

from __future__ import annotations

import numpy as np
import pytest

from privacy.sampling import FixedSize, Poisson, Sampler

DRAWS = 4000


def cohorts(sampler: Sampler, seed: int = 0, draws: int = DRAWS) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [sampler.draw(rng) for _ in range(draws)]


def within(found: float, expected: float, deviation: float) -> bool:
    """Within five standard deviations."""
    return abs(found - expected) <= 5 * deviation


@pytest.mark.parametrize(
    "sampler", [FixedSize(20, 5), FixedSize(7, 7), FixedSize(9, 1), Poisson(20, 0.25), Poisson(5, 1.0)]
)
def test_a_cohort_is_a_sorted_set_of_clients(sampler: FixedSize | Poisson) -> None:
    for cohort in cohorts(sampler, draws=200):
        assert cohort == sorted(set(cohort))
        assert all(type(client) is int and 0 <= client < sampler.population for client in cohort)


@pytest.mark.parametrize("sampler", [FixedSize(20, 5), Poisson(20, 0.25)])
def test_a_draw_depends_on_the_generator_alone(sampler: Sampler) -> None:
    assert cohorts(sampler, 1, 20) == cohorts(sampler, 1, 20)
    assert cohorts(sampler, 1, 20) != cohorts(sampler, 2, 20)


def test_a_fixed_cohort_has_exactly_its_size() -> None:
    assert FixedSize(20, 5).expected == 5.0
    assert {len(cohort) for cohort in cohorts(FixedSize(20, 5))} == {5}
    assert FixedSize(4, 4).draw(np.random.default_rng(0)) == [0, 1, 2, 3]


def test_a_fixed_cohort_is_uniform_over_clients_and_over_pairs() -> None:
    drawn = cohorts(FixedSize(20, 5))
    for client in range(20):
        share = np.mean([client in cohort for cohort in drawn])
        assert within(share, 5 / 20, np.sqrt(0.25 * 0.75 / DRAWS))
    pair = 5 * 4 / (20 * 19)
    for first, second in ((0, 1), (3, 17), (18, 19)):
        share = np.mean([first in cohort and second in cohort for cohort in drawn])
        assert within(share, pair, np.sqrt(pair * (1 - pair) / DRAWS))


def test_a_poisson_cohort_is_a_coin_for_each_client() -> None:
    sampler = Poisson(20, 0.25)
    assert sampler.expected == 5.0
    drawn = cohorts(sampler)
    for client in range(20):
        share = np.mean([client in cohort for cohort in drawn])
        assert within(share, 0.25, np.sqrt(0.25 * 0.75 / DRAWS))
    for first, second in ((0, 1), (3, 17), (18, 19)):  # one coin says nothing of another
        share = np.mean([first in cohort and second in cohort for cohort in drawn])
        assert within(share, 0.0625, np.sqrt(0.0625 * 0.9375 / DRAWS))


def test_a_poisson_cohort_has_a_binomial_size() -> None:
    sizes = np.array([len(cohort) for cohort in cohorts(Poisson(20, 0.25))])
    variance = 20 * 0.25 * 0.75
    assert within(float(sizes.mean()), 5.0, np.sqrt(variance / DRAWS))
    assert abs(sizes.var() / variance - 1) < 0.12  # five deviations of a variance estimated from 4000
    empty = 0.75**20
    assert within(float((sizes == 0).mean()), empty, np.sqrt(empty / DRAWS))
    assert (sizes == 0).any()


def test_the_ends_of_the_rate() -> None:
    rng = np.random.default_rng(0)
    assert Poisson(5, 0.0).draw(rng) == []
    assert Poisson(5, 1.0).draw(rng) == [0, 1, 2, 3, 4]
