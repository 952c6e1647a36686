"""A public order: whose turn it is, how often and how far apart turns are, and that nothing but its seed decides."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from privacy import accounting
from privacy.errors import PlanError
from privacy.sampling import PublicOrder
from tests.cells import every

ROUNDS = 23
ORDERS = [
    PublicOrder(12, 3),
    PublicOrder(10, 3),  # the places of a round wrap around the end of the order
    PublicOrder(7, 7),
    PublicOrder(7, 5, seed=4),
    PublicOrder(8, 3, vacant=(0, 5, 9)),
    PublicOrder(1, 1, vacant=tuple(range(12))),
    PublicOrder(5, 1),
]


def turns(order: PublicOrder, rounds: int = ROUNDS) -> dict[int, list[int]]:
    """The rounds in which each member has a turn."""
    return {m: [r for r in range(rounds) if m in order.of_round(r)] for m in range(order.population)}


@every("order", ORDERS)
def test_turns_are_never_closer_than_the_gap_nor_more_than_counted(order: PublicOrder) -> None:
    for rounds in range(1, ROUNDS + 1):
        found = turns(order, rounds)
        assert all(later - earlier >= order.gap for own in found.values() for earlier, later in pairwise(own))
        assert max(map(len, found.values())) <= order.turns(rounds)


@every("order", [order for order in ORDERS if not order.vacant])
def test_gap_and_count_are_reached_so_that_neither_is_too_careful(order: PublicOrder) -> None:
    rounds = order.places + order.gap  # enough rounds for the shortest gap to occur
    found = turns(order, rounds).values()
    assert min(later - earlier for own in found for earlier, later in pairwise(own)) == order.gap
    assert max(map(len, found)) == order.turns(rounds)


@every("order", ORDERS)
def test_a_cohort_is_of_distinct_members_of_the_public_size(order: PublicOrder) -> None:
    cohorts = [order.of_round(round_) for round_ in range(ROUNDS)]
    assert all(cohort == sorted(set(cohort)) and set(cohort) <= set(range(order.population)) for cohort in cohorts)
    assert all(len(cohort) <= order.size for cohort in cohorts)
    if not order.vacant:
        assert {len(cohort) for cohort in cohorts} == {order.size} == {order.most} == {int(order.expected)}


@every("order", ORDERS)
def test_a_member_knows_its_turns(order: PublicOrder) -> None:
    for round_ in range(ROUNDS):
        assert [m for m in range(order.population) if order.has_turn(m, round_)] == order.of_round(round_)


def test_no_coin_is_tossed() -> None:
    assert PublicOrder(12, 3).draw(lambda count: pytest.fail("a coin"), 5) == PublicOrder(12, 3).of_round(5)


def test_the_seed_and_the_places_decide() -> None:
    """The order is the same on every machine and with every library version. A member that leaves moves no other's turns."""
    assert [PublicOrder(9, 3, seed=1).of_round(r) for r in range(3)] == [[3, 5, 7], [0, 2, 4], [1, 6, 8]]
    assert turns(PublicOrder(9, 3)) != turns(PublicOrder(9, 3, seed=1))
    whole, less = turns(PublicOrder(9, 3)), turns(PublicOrder(7, 3, vacant=(6, 2)))
    assert less == {member: whole[place] for member, place in enumerate((0, 1, 3, 4, 5, 7, 8))}


def test_a_place_comes_up_anywhere_in_the_order() -> None:
    """Over seeds, every member is as likely in the first cohort as any other."""
    first = np.array([[m in PublicOrder(20, 5, seed=seed).of_round(0) for m in range(20)] for seed in range(400)])
    assert np.abs(first.mean(axis=0) - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 400)


def test_no_amplification_is_accounted_for() -> None:
    assert PublicOrder(100, 2).release(1.5) == accounting.unamplified(1.5)


@every("population, size, vacant", [(0, 1, ()), (3, 4, ()), (3, 0, ()), (3, 1, (4,)), (3, 1, (-1,)), (3, 1, (1, 1))])
def test_an_order_that_cannot_be_is_refused(population: int, size: int, vacant: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="members a round and each vacant place once"):
        PublicOrder(population, size, vacant)
