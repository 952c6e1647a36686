"""The protection that a configuration gives: where noise is added, who is counted, and which settings are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from privacy.errors import BudgetExhausted, PrivacyError
from privacy.mechanisms import AdaptiveGaussian, Gaussian, NoMechanism
from privacy.sampling_and_turns import FixedSize, Poisson
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
    """With noise in the gradients, contributions stay unclipped; otherwise they are clipped."""
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


def test_without_privacy_nothing_is_clipped() -> None:
    assert protection({}) == Protection()
    assert federation({}).assembly.initial.clip_norm == math.inf
    assert federation(NOISE).assembly.initial.clip_norm == 0.1


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


def test_momentum_is_fine_where_nothing_is_shrunk() -> None:
    momentum = {"federation.server_optimizer": "momentum"}
    for settings in (
        {**NOISE, "method.name": "fra_lora", "method.denoise": "truncate"},
        {**NOISE, "method.name": "fedlora"},
        {**EXAMPLE, **Z, "method.name": "fra_lora"},
    ):
        toys.config(settings | momentum)


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
