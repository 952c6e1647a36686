"""The protection that a configuration gives: where noise is added, who is counted, which settings are refused, and the
releases that a plan allows, against naive counts for each client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from privacy import accounting
from privacy.errors import BudgetExhausted, PrivacyError
from privacy.filters import Cost
from privacy.mechanisms import AdaptiveGaussian, Gaussian, NoMechanism
from privacy.participation import FixedSize, Poisson
from privacy.plan import Target, for_contributions, for_gradients, for_sums, usual_participations
from secure_fed.errors import ConfigError
from secure_fed.methods.method import Card
from secure_fed.rounds.cohort import cohort_sampler
from secure_fed.rounds.engine import run_round
from secure_fed.rounds.protection import Protection, protect
from tests.cells import every
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.private_toys import CLIENT, EXAMPLE, NOISE, federation

GROUP = {**EXAMPLE, "privacy.unit": "person", "privacy.person_column": "patient"}
Z = {"privacy.noise_multiplier": 1.0}
MASKS = {"secure_aggregation.enabled": True, "secure_aggregation.corrupt": 0.2, "secure_aggregation.dropout": 0.3}
SHARES = {**CLIENT, **Z, **MASKS, "privacy.noise": "distributed"}
HIDDEN = {**SHARES, "privacy.hidden_cohort": True}
HIDDEN_TARGET = {**{name: value for name, value in HIDDEN.items() if name not in Z}, "privacy.epsilon": 4.0}
FIXED = {"federation.sampling": "fixed"}


def protection(settings: dict[str, Any], card: Card | None = None, clients: int = 4, units: int = 50) -> Protection:
    config = toys.config(settings)
    names = [f"client-{number}" for number in range(clients)]
    sampler = cohort_sampler(config, clients)
    return protect(config, card or Card("toy", "", "", True), names, [units] * clients, sampler, passes=1)


# Where noise is added.


@pytest.mark.parametrize(
    ("settings", "place", "hidden", "sampler"),
    [
        ({}, "nowhere", False, FixedSize),
        (CLIENT | Z, "sum", True, Poisson),
        (CLIENT | Z | {"privacy.noise": "local"}, "contribution", False, FixedSize),
        (EXAMPLE | Z, "gradients", False, FixedSize),
        (GROUP | Z, "gradients", False, FixedSize),
    ],
    ids=["none", "client", "local", "example", "person"],
)
def test_a_unit_has_its_place_and_its_sampling(
    settings: dict[str, Any], place: str, hidden: bool, sampler: type
) -> None:
    two = {**settings, "federation.cohort": 2}
    found = protection(two)
    assert (found.placement.name, found.hides_cohort) == (place, hidden)
    assert isinstance(cohort_sampler(toys.config(two), 4), sampler)
    for kind, expected in (("fixed", FixedSize), ("poisson", Poisson)):
        drawn = cohort_sampler(toys.config({**two, "federation.sampling": kind}), 4)
        assert isinstance(drawn, expected)
        assert (drawn.expected, drawn.rate) == (2.0, 0.5)


@pytest.mark.parametrize("settings", [CLIENT | {"privacy.epsilon": 4.0}, HIDDEN_TARGET], ids=["central", "hidden"])
def test_nothing_that_is_planned_depends_on_how_many_the_coins_hold_out(settings: dict[str, Any]) -> None:
    """The sampling rate, the divisor of a mean and the noise are planned for all clients, whose number is public."""
    config = toys.config({**settings, "federation.cohort": 6})
    found = []
    for held_out in (0, 1, 11):
        names = [f"client-{number}" for number in range(12 - held_out)]
        sampler = cohort_sampler(config, len(names), range(held_out))
        plan = protect(config, Card("toy", "", "", True), names, [50] * len(names), sampler, passes=1).plan
        assert plan is not None
        found.append((sampler.rate, sampler.expected, plan.sampling_rate, plan.noise_multiplier, plan.epsilon()))
        draws = [sampler.draw(np.random.default_rng(seed).random) for seed in range(50)]
        assert {client for draw in draws for client in draw} == set(range(len(names)))
    assert set(found) == {(0.5, 6.0, 0.5, *found[0][3:])}
    fixed = toys.config({**settings, "federation.cohort": 6, "privacy.hidden_cohort": False} | FIXED)
    drawn = [cohort_sampler(fixed, 12 - held_out, range(held_out)) for held_out in (0, 5, 8)]
    assert drawn == [FixedSize(12, 6), FixedSize(7, 6), FixedSize(4, 4)]


@pytest.mark.parametrize(
    ("settings", "sampler", "contributors"), [(SHARES, FixedSize, 5), (HIDDEN, Poisson, 10)], ids=["seen", "hidden"]
)
def test_shares_of_noise_are_those_of_whoever_stays_and_does_not_collude(
    settings: dict[str, Any], sampler: type, contributors: int
) -> None:
    """Of 5 clients 1 may vanish and 1 collude; of 10, 3 and 2. The server need not keep the cohort secret."""
    settings = {**settings, "federation.cohort": 5}
    found = protection(settings, clients=10)
    assert (found.placement.name, found.hides_cohort, found.hidden) == ("shares", False, sampler is Poisson)
    assert isinstance(cohort_sampler(toys.config(settings), 10), sampler)
    assert found.shares is not None
    assert (found.shares.contributors, found.shares.shares) == (contributors, {5: 3, 10: 5}[contributors])
    least = found.shares.std(0.1, 7, found.shares.shares)
    assert least == pytest.approx(0.1, rel=1e-3), "the noise of those counted on is what was asked for"
    assert found.mean_noise_std(0.1, 5.0, 7) == found.shares.std(0.1, 7, contributors) / 5 > least / 5


def test_the_mechanism_on_contributions() -> None:
    """Without privacy, and with noise in the gradients, contributions stay unclipped; otherwise they are clipped."""
    assert protection({}) == Protection()
    assert [federation(own).assembly.initial.clip_norm for own in ({}, NOISE)] == [math.inf, 0.1]
    assert isinstance(protection({}).contribution_mechanism, NoMechanism)
    assert isinstance(protection(EXAMPLE | Z).contribution_mechanism, NoMechanism)
    assert protection(EXAMPLE | Z).mechanism == Gaussian(1.0)
    assert protection(NOISE).contribution_mechanism == Gaussian(1.0)
    adaptive = protection({**NOISE, "privacy.clip_quantile": 0.7}).contribution_mechanism
    assert isinstance(adaptive, AdaptiveGaussian)
    assert (adaptive.quantile, adaptive.noise_multiplier) == (0.7, 1.0)


def test_the_noise_on_a_mean() -> None:
    assert protection({}).mean_noise_std(math.inf, 4.0, 5) == 0.0
    assert protection(EXAMPLE | Z).mean_noise_std(0.1, 4.0, 5) == 0.0
    assert protection(CLIENT | Z).mean_noise_std(0.1, 4.0, 5) == pytest.approx(0.1 / 4)
    local = protection({**CLIENT, "privacy.noise_multiplier": 3.0, "privacy.noise": "local"})
    assert local.mean_noise_std(0.1, 4.0, 5) == pytest.approx(3 * 0.1 / 2), "four noises added, and divided by four"


# What is refused.


@every(
    ("settings", "setting"),
    [
        (CLIENT, "privacy.epsilon"),
        ({**NOISE, "federation.weighting": "examples"}, "federation.weighting"),
        ({**NOISE, "federation.nonfinite": "fail"}, "federation.nonfinite"),
        ({**NOISE, "evaluation.per_client": True}, "evaluation.per_client"),
        ({**EXAMPLE, **Z, "federation.weighting": "examples"}, "federation.weighting"),
        ({**CLIENT, **Z, "privacy.noise": "distributed"}, "secure_aggregation.enabled"),
        ({**SHARES, "federation.sampling": "poisson"}, "federation.sampling"),
        ({**HIDDEN, "federation.sampling": "fixed"}, "federation.sampling"),
        ({**EXAMPLE, **Z, "privacy.unit": "person"}, "privacy.person_column"),
        ({**CLIENT, "privacy.epsilon": -1.0}, "privacy.epsilon"),
        ({**CLIENT, "privacy.noise_multiplier": 0.0}, "privacy.noise_multiplier"),
        ({**NOISE, "privacy.clip_norm": 0.0}, "privacy.clip_norm"),
        ({**NOISE, "privacy.delta": 1.0}, "privacy.delta"),
    ],
)
def test_settings_that_void_a_guarantee_are_refused(settings: dict[str, Any], setting: str) -> None:
    with refused(ConfigError, setting):
        toys.config(settings)


LEDGERS = {"data_set": "ours", "unit_name": "patient", "ledger_heads": "heads.sqlite"}  # of no ledger
OF_A_UNIT = {
    **{"epsilon": 3.0, "delta": 1e-6, "noise_multiplier": 2.0, "clip_norm": 2.0},
    **{"ledger": "a.sqlite", "on_exhausted": "stop"},
}


@every(
    ("settings", "setting", "value"),
    [
        *(({}, f"privacy.{name}", value) for name, value in OF_A_UNIT.items()),
        *((NOISE, f"privacy.{name}", value) for name, value in LEDGERS.items()),
        (EXAMPLE | Z, "privacy.noise", "local"),
        (EXAMPLE | Z, "privacy.clip_quantile", 0.5),
        (CLIENT | Z | {"privacy.noise": "local"}, "privacy.clip_quantile", 0.5),
        (SHARES, "privacy.clip_quantile", 0.5),
        (NOISE, "privacy.hidden_cohort", True),
        (NOISE, "privacy.person_column", "patient"),
        (EXAMPLE | Z, "privacy.person_examples", 3),
        (NOISE, "privacy.participations", 3),
        (EXAMPLE | Z, "training.max_grad_norm", 1.0),
    ],
)
def test_settings_that_nothing_reads_are_refused(settings: dict[str, Any], setting: str, value: Any) -> None:
    toys.config(settings)
    with refused(ConfigError, setting):
        toys.config({**settings, setting: value})


def test_a_delta_that_gives_a_unit_away_is_refused_before_data_are_read() -> None:
    """It is held against all clients, or all examples together."""
    for settings, allowed in ((NOISE, 0.2), ({**EXAMPLE, **Z}, 0.0049)):
        for delta in (0.5, 1 / 4 if settings is NOISE else 0.005):
            with refused(ConfigError, "privacy.delta"):
                protection({**settings, "privacy.delta": delta})
        protection({**settings, "privacy.delta": allowed})
    with refused(ConfigError, "privacy.delta"):
        toys.config({**NOISE, "federation.clients": 100_000, "federation.cohort": 10})


def test_a_method_says_why_it_cannot_protect_a_unit() -> None:
    card = replace(Card("votes", "", "", True), units=("example",), refusals={"client": "one vote has no bound"})
    with refused(ConfigError, "privacy.unit"):
        protection(NOISE, card)
    protection(EXAMPLE | Z, card)


def test_a_plan_above_its_own_limit_is_refused_at_once() -> None:
    with refused(BudgetExhausted, hide=r"epsilon \d\S+"):
        federation({**NOISE, "privacy.epsilon": 1.0})


@pytest.mark.parametrize("settings", [NOISE, EXAMPLE | Z], ids=["client", "example"])
def test_nothing_is_released_outside_a_run(settings: dict[str, Any]) -> None:
    """A call of run_round without Federation.run has no budget to charge."""
    built = federation(settings)
    with refused(PrivacyError):
        run_round(built.assembly.initial, built.assembly.server, built.assembly.transport, 0.05)


def test_groups_need_data_from_files() -> None:
    with refused(ConfigError, "privacy.unit"):
        federation(GROUP | Z)


DELTA = 1e-5
UNITS = (8, 40, 300)  # each client's examples; Poisson batches of 8, one epoch a round
NAMES = [f"site-{units}" for units in UNITS]
DRAWS = [Poisson(units, min(1.0, 8 / units)) for units in UNITS]
STEPS = [-(-units // 8) for units in UNITS]


def each(z: float, counts: Sequence[int]) -> list[float]:
    """Each client's epsilon, computed one by one."""
    return [accounting.epsilon(draw.release(z), count, DELTA) for draw, count in zip(DRAWS, counts, strict=True)]


def test_a_sum_is_calibrated_to_just_below_the_target() -> None:
    sampler = Poisson(100, 0.1)
    plan = for_sums(Target(3.0, None, DELTA), sampler, 20)
    z = plan.noise_multiplier
    assert 0.99 * 3 < plan.epsilon() <= 3
    assert plan.epsilon() == accounting.epsilon(sampler.release(z), 20, DELTA)
    assert plan.epsilon_participants() == accounting.epsilon(accounting.unamplified(z), 20, DELTA) > 3
    assert (plan.releases, plan.limits, plan.limit(""), plan.participations) == (20, {}, 20, None)
    assert plan.cost() == Cost(plan.epsilon(), DELTA)
    assert plan.epsilon(21) > plan.epsilon(20) > plan.epsilon(19)


def test_a_cost_has_what_the_ledger_adds_up() -> None:
    plan = for_sums(Target(None, 2.0, DELTA), Poisson(3, 1.0), 4)
    assert plan.cost(orders=(8.0,)).rdp == pytest.approx((4 * 8 / (2 * 2.0**2),))
    assert plan.cost(2, (8.0,)).rdp == pytest.approx((2 * 8 / (2 * 2.0**2),))
    assert (plan.cost(0).epsilon, plan.cost(0).delta) == (0.0, 0.0)


def test_fixed_cohorts_have_a_neighbour_replaced_for_participants_too() -> None:
    plan = for_sums(Target(None, 2.0, DELTA), FixedSize(10, 2), 4)
    assert plan.release.adjacency == plan.seen.adjacency == "replace-one"
    assert plan.epsilon_participants() == accounting.epsilon(accounting.replaced(2.0), 4, DELTA) >= plan.epsilon()


def test_a_noise_multiplier_alone_has_no_limit_and_beside_it_epsilon_is_one() -> None:
    everybody = Poisson(3, 1.0)
    alone = for_sums(Target(None, 0.5, DELTA), everybody, 50)
    assert (alone.noise_multiplier, alone.releases) == (0.5, 50)
    assert alone.epsilon() > 50
    assert for_sums(Target(100.0, 2.0, DELTA), everybody, 5).releases == 5
    with refused(BudgetExhausted, hide=r"epsilon \d\S+"):
        for_sums(Target(3.0, 2.0, DELTA), everybody, 5)
    stopped = for_sums(Target(3.0, 2.0, DELTA, stop_early=True), everybody, 5)
    assert 0 < stopped.releases < 5
    assert stopped.epsilon() <= 3 < stopped.epsilon(stopped.releases + 1)


def test_local_noise_is_counted_with_a_client_replaced() -> None:
    plan = for_contributions(Target(4.0, None, DELTA), 0.3, NAMES, passes=2, participations=3)
    assert 0.99 * 4 < plan.epsilon() <= 4
    assert plan.epsilon() == plan.epsilon_participants()
    assert plan.release == accounting.replaced(plan.noise_multiplier)
    assert plan.limits == dict.fromkeys(NAMES, 6)
    assert plan.participations == 3


@pytest.mark.parametrize("way", [1, -1], ids=["worst first", "worst last"])
def test_gradients_are_calibrated_for_the_client_who_fares_worst(way: int) -> None:
    plan = for_gradients(Target(3.0, None, DELTA), NAMES[::way], DRAWS[::way], STEPS[::way], participations=4)
    planned = [4 * steps for steps in STEPS]
    epsilons = each(plan.noise_multiplier, planned)
    assert plan.limits == dict(zip(NAMES, planned, strict=True))
    assert plan.epsilon() == max(epsilons)
    assert 0.99 * 3 < max(epsilons) <= 3
    assert min(epsilons) < 0.6 * max(epsilons), "had another client been taken for the worst, it would show"
    worst = epsilons.index(max(epsilons))
    assert (plan.sampling_rate, plan.releases) == (DRAWS[worst].rate, planned[worst])
    assert plan.epsilon() == plan.epsilon_participants(), "nobody but the client sees its batches"


def test_a_client_without_examples_may_come_first() -> None:
    names, draws, steps = ["empty", *NAMES[:1]], [Poisson(0, 1.0), DRAWS[0]], [0, STEPS[0]]
    plan = for_gradients(Target(3.0, None, DELTA), names, draws, steps, 4)
    alone = for_gradients(Target(3.0, None, DELTA), NAMES[:1], DRAWS[:1], STEPS[:1], 4)
    assert (plan.noise_multiplier, plan.epsilon()) == (alone.noise_multiplier, alone.epsilon())
    assert plan.limits == {"empty": 0, **alone.limits}


@pytest.mark.nightly
def test_stopping_early_is_each_clients_own_affair_and_the_worst_of_them_is_told() -> None:
    """The client with the highest planned epsilon may be left with no release; then another client has the highest epsilon."""
    plan = for_gradients(Target(5.0, 0.8, DELTA, stop_early=True), NAMES, DRAWS, STEPS, participations=3)
    allowed, planned = [plan.limits[name] for name in NAMES], [3 * steps for steps in STEPS]
    at_first, epsilons = each(0.8, planned), each(0.8, allowed)
    for count, one_more, most in zip(allowed, each(0.8, [count + 1 for count in allowed]), planned, strict=True):
        assert count == most or one_more > 5
    worst_at_first = at_first.index(max(at_first))
    assert epsilons[worst_at_first] < 0.5 * max(epsilons), "or the test would not see it told in place of the worst"
    assert plan.epsilon() == plan.cost().epsilon == max(epsilons) <= 5
    assert plan.cost().delta == DELTA


def test_a_limit_that_holds_not_even_one_release_is_refused_when_stopping_early_too() -> None:
    target = Target(0.5, 0.8, DELTA, stop_early=True)
    with refused(BudgetExhausted):
        for_sums(target, Poisson(3, 1.0), 4)
    with refused(BudgetExhausted):
        for_contributions(target, 0.5, NAMES, 1, 3)
    for own in (target, Target(1.0, 0.8, DELTA)):
        with refused(BudgetExhausted, hide=r"epsilon \d\S+"):
            for_gradients(own, NAMES[:1], DRAWS[:1], STEPS[:1], 6)


@pytest.mark.parametrize(("rounds", "rate"), [(20, 0.05), (100, 0.1), (3, 1.0), (1, 0.5), (50, 0.001)])
def test_few_clients_are_drawn_more_often_than_is_usual(rounds: int, rate: float) -> None:
    most = usual_participations(rounds, rate)
    assert 1 <= most <= rounds
    assert binom.sf(most, rounds, rate) <= 0.01
    assert most == 1 or binom.sf(most - 1, rounds, rate) > 0.01


def test_a_renyi_ledger_is_charged_for_whoever_costs_most_at_its_order() -> None:
    """The client with the highest epsilon at delta need not cost most at an order: 17 examples against 65, in batches of 16."""
    order, draws, steps = 18.0, [Poisson(17, 16 / 17), Poisson(65, 16 / 65)], [2, 5]
    plan = for_gradients(Target(None, 1.0, DELTA), ("small", "large"), draws, steps, 3)
    each = [accounting.rdp(draw.release(1.0), 3 * count, [order])[0] for draw, count in zip(draws, steps, strict=True)]
    assert plan.cost(orders=[order]).rdp == (max(each),)
    assert each[0] != pytest.approx(each[1])
