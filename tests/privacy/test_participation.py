"""The laws of cohorts and batches, a public order, and that the accounted event describes the draws.

Coins are seeded, so no test fails by chance. Of a public order: whose turn it is, how often and how far apart turns are, and
that nothing but its seed decides. Of a member's own record of its turns: the turns that it refuses, and that it survives a
restart and a torn write.
"""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent
from numpy.typing import NDArray
from scipy import stats

from privacy import accounting
from privacy.accounting import Release
from privacy.entropy import SeededEntropy
from privacy.errors import LedgerError, PlanError
from privacy.participation import Attendance, FixedSize, NotYourTurn, Poisson, PublicOrder, Sampler, Uniform
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


@every("sampler", [Poisson(10, 0.0), Poisson(10, 1.5), FixedSize(10, 0), FixedSize(10, 11)])
def test_what_cannot_be_accounted_for_is_refused(sampler: Sampler) -> None:
    for asked, z in ((sampler, 1.0), *((one, z) for one in BOTH for z in (0.0, -1.0, float("nan"), float("inf")))):
        with pytest.raises(PlanError):
            asked.release(z)


# Turns of a public order.


ORDER, RUN = PublicOrder(9, 3, seed=1), 6
FIRST, SECOND = (round_ for round_ in range(RUN) if ORDER.has_turn(4, round_))  # member 4's turns
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
    if not order.vacant:  # nor are they too careful
        rounds = order.places + order.gap  # enough rounds for the shortest gap to occur
        whole = turns(order, rounds).values()
        assert min(later - earlier for own in whole for earlier, later in pairwise(own)) == order.gap
        assert max(map(len, whole)) == order.turns(rounds)


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
        assert order.draw(lambda count: pytest.fail("a coin"), round_) == order.of_round(round_)


def test_the_seed_and_the_places_decide() -> None:
    """The order is the same on every machine and with every library version. A member that leaves moves no other's turns."""
    assert [PublicOrder(9, 3, seed=1).of_round(r) for r in range(3)] == [[3, 5, 7], [0, 2, 4], [1, 6, 8]]
    assert turns(PublicOrder(9, 3)) != turns(PublicOrder(9, 3, seed=1))
    whole, less = turns(PublicOrder(9, 3)), turns(PublicOrder(7, 3, vacant=(6, 2)))
    assert less == {member: whole[place] for member, place in enumerate((0, 1, 3, 4, 5, 7, 8))}


def test_a_place_comes_up_anywhere_in_the_order() -> None:
    """Over seeds, every member is as likely in the first cohort as any other."""
    first = np.array([np.isin(range(20), PublicOrder(20, 5, seed=seed).of_round(0)) for seed in range(400)])
    assert np.abs(first.mean(axis=0) - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 400)


@every("population, size, vacant", [(0, 1, ()), (3, 4, ()), (3, 0, ()), (3, 1, (4,)), (3, 1, (-1,)), (3, 1, (1, 1))])
def test_an_order_that_cannot_be_is_refused(population: int, size: int, vacant: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="members a round and each vacant place once"):
        PublicOrder(population, size, vacant)


def begun(path: Path | None = None) -> Attendance:
    found = Attendance(ORDER, RUN)
    found.begin(path)
    return found


def refuses(attendance: Attendance, round_: int, member: int = 4) -> bool:
    assert not attendance.admits(member, round_)
    with pytest.raises(NotYourTurn, match=rf"client {member} cannot take part in round {round_ + 1}:"):
        attendance.enter(member, round_)
    return True


def test_a_member_takes_each_of_its_turns_once_and_no_other() -> None:
    attendance = begun()
    others = [round_ for round_ in range(RUN) if round_ not in (FIRST, SECOND)]
    assert all(refuses(attendance, round_) for round_ in others)
    attendance.enter(4, FIRST)
    assert all(attendance.admits(m, FIRST) == ORDER.has_turn(m, FIRST) for m in range(9) if m != 4)
    assert all(refuses(attendance, round_) for round_ in [FIRST, *others])
    attendance.enter(4, SECOND)
    assert all(refuses(attendance, round_) for round_ in range(RUN)), "nor an earlier one, when its time has come"
    assert attendance.last(4) == SECOND


def test_there_are_no_rounds_before_the_first_and_after_the_last() -> None:
    attendance = begun()
    for round_ in (FIRST - 3, FIRST - 30, SECOND + 3, SECOND + 300):
        assert ORDER.has_turn(4, round_), "it would be its turn"
        assert refuses(attendance, round_)


def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    first = begun(tmp_path / "turns")
    first.enter(4, FIRST)
    killed_here = begun(tmp_path / "turns")  # the first process did not call `end`
    assert refuses(killed_here, FIRST)
    killed_here.enter(4, SECOND)
    killed_here.end()
    again = begun(tmp_path / "turns")
    assert refuses(again, FIRST)
    assert refuses(again, SECOND)
    assert (tmp_path / "turns").stat().st_mode & 0o777 == 0o600
    again.begin(None)
    again.enter(4, FIRST)  # another run has a memory of its own


@pytest.mark.parametrize("torn", [1, 7])
def test_a_torn_record_is_dropped_and_the_next_is_whole(tmp_path: Path, torn: int) -> None:
    first = begun(tmp_path / "turns")
    first.enter(4, FIRST)
    first.end()
    with (tmp_path / "turns").open("ab") as file:
        file.write(bytes(torn))
    again = begun(tmp_path / "turns")
    assert refuses(again, FIRST)
    again.enter(4, SECOND)
    assert refuses(begun(tmp_path / "turns"), SECOND)
    assert (tmp_path / "turns").stat().st_size == 16


WRITE = os.write


def full(file: int, record: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("write", [full, lambda file, record: WRITE(file, record[:1])], ids=["full", "cut"])
def test_a_turn_that_a_full_disk_cut_does_not_garble_the_turns_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object
) -> None:
    """A turn that cannot be noted is not taken."""
    path = tmp_path / "attendance"
    memory = begun(path)
    with monkeypatch.context() as patch:
        patch.setattr("privacy.participation.os.write", write)
        with pytest.raises(LedgerError):
            memory.enter(4, SECOND)
    assert memory.last(4) is None
    memory.enter(4, SECOND)  # the disk has room again
    memory.end()
    assert refuses(begun(path), SECOND)
    with pytest.raises(LedgerError):
        begun(tmp_path)


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_record_is_on_disk_before_the_member_trains(
    tmp_path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("privacy.participation.os.fsync", synced.append)
    memory = Attendance(PublicOrder(2, 2), 5)
    memory.begin(tmp_path / "attendance", durable=durable)
    memory.enter(0, 0)
    memory.enter(0, 1)
    assert len(synced) == (2 if durable else 0)
    memory.end()
