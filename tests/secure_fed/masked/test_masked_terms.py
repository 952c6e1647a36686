"""The terms of masked sums: fixed for a run, and each client's own policy. Impossible settings are refused before training."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from privacy.errors import PlanError
from privacy.participation import Poisson
from protocols.errors import ParameterError
from protocols.parameters import Parameters
from protocols.thresholds import choose, colluding
from secure_fed.config import SecureAggregationConfig
from secure_fed.errors import ConfigError
from secure_fed.rounds.masked.terms import Registry, Terms
from secure_fed.rounds.protection import Protection
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.masked.wide_toys import (
    CLIENT,
    CLIPPED,
    DISTRIBUTED,
    HIDDEN,
    MASKED,
    PRIVACY,
    SKETCH,
    federation,
    one_round,
)


def terms(invited: int, *, most: int | None = None, registry: Registry | None = None, **settings: Any) -> Terms:
    """Terms for `invited` clients. most: with cohorts drawn by coins, the largest possible cohort."""
    chosen = SecureAggregationConfig(enabled=True, **settings)
    return Terms(chosen, Protection(), invited, most or invited, most is not None, 1.0, registry)


@every("clients", [3, 5, 10, 40, 150])
@every("active", [False, True])
def test_everybody_settles_on_what_the_protocol_chooses(clients: int, active: bool) -> None:
    registry = Registry(clients) if active else None
    mine = terms(clients, active=active, registry=registry)
    oracle = choose(clients, corrupt=0.1, dropout=0.1, active=active)
    encoding = mine.encoding(10, math.inf)
    parameters = mine.parameters(4, range(clients), bytes(32), encoding.length, encoding.largest)
    assert (parameters.neighbours, parameters.threshold) == (oracle.neighbours, oracle.threshold)
    assert parameters.survivors == oracle.survivors == mine.least(clients)
    assert (parameters.round, parameters.length, parameters.bits) == (4, encoding.length, 32)
    assert parameters.bound == encoding.largest
    policy = mine.policy(clients)
    policy.check(parameters)
    assert (policy.threshold, policy.survivors, policy.corrupt) == (oracle.threshold, oracle.survivors, oracle.corrupt)


@every("settings", [{}, {"corrupt": 0.2, "dropout": 0.3}, {"active": True, "corrupt": 0.1}])
def test_a_sum_that_lost_clients_before_it_began_keeps_to_what_was_settled(settings: dict[str, Any]) -> None:
    """The number of corrupt clients assumed does not fall, nor does the least number of survivors."""
    registry = Registry(20) if settings.get("active") else None
    mine = terms(20, registry=registry, **settings)
    least = mine.least(20)
    for clients in range(least, 21):
        parameters = _settled(mine, clients)
        assert parameters.survivors == least
        policy = mine.policy(clients)
        assert policy.corrupt >= colluding(20, mine.settings.corrupt)
        policy.check(parameters)
    for clients in (3, least - 1, 21):
        with pytest.raises(ParameterError):
            mine.policy(clients)


def test_where_clients_bring_the_noise_the_least_number_is_that_of_the_plan() -> None:
    for settings, n in (({**DISTRIBUTED, "federation.cohort": 8}, 8), ({**HIDDEN, "federation.cohort": 4}, 12)):
        shares = {"secure_aggregation.dropout": 0.25, "secure_aggregation.corrupt": 0.125}
        built = federation({**settings, **shares}, sizes=[2] * 12)
        mine = built.assembly.masks.sums.terms  # type: ignore[union-attr]
        counted = built.assembly.protection.shares
        assert counted is not None
        assert counted.contributors == n
        corrupt, gone = math.ceil(Fraction("0.125") * n), int(Fraction("0.25") * n)
        assert counted.shares == n - gone - corrupt
        for invited in range(n - gone, n + 1):
            assert mine.least(invited) - counted.shares == corrupt


@every("corrupt", [0.0, 0.1, 0.25, 0.34, 0.4])
@every("dropout", [0.0, 0.1, 0.25, 0.34, 0.4])
@every("active", [False, True])
def test_what_is_accepted_at_the_start_holds_for_every_size_that_coins_may_draw(
    corrupt: float, dropout: float, active: bool
) -> None:
    registry = Registry(40) if active else None
    mine = terms(5, most=40, registry=registry, corrupt=corrupt, dropout=dropout, active=active)
    try:
        mine.require_feasible()
    except ConfigError:
        with pytest.raises(ConfigError):
            [mine.choice(clients) for clients in range(5, 41)]
        return
    for clients in range(5, 41):
        parameters = _settled(mine, clients)
        mine.policy(clients).check(parameters)


def test_identities_are_each_client_s_own() -> None:
    registry = Registry(5)
    assert len(set(registry.public.values())) == 5
    assert Registry(5).public != registry.public
    assert terms(5).run != terms(5).run


def _settled(mine: Terms, clients: int) -> Parameters:
    encoding = mine.encoding(10, math.inf)
    return mine.parameters(0, range(clients), bytes(32), encoding.length, encoding.largest)


# Settings.

S = "secure_aggregation."


@every(
    ("settings", "setting"),
    [
        ({**CLIPPED, "privacy.noise": "distributed"}, f"{S}enabled"),
        ({**CLIPPED, **MASKED, "privacy.hidden_cohort": True}, "privacy.hidden_cohort"),
        ({**DISTRIBUTED, "federation.sampling": "poisson"}, "federation.sampling"),
        ({**HIDDEN, "federation.sampling": "fixed"}, "federation.sampling"),
        ({**DISTRIBUTED, "privacy.clip_quantile": 0.5}, "privacy.clip_quantile"),
        ({**DISTRIBUTED, "privacy.unit": "example"}, "privacy.noise"),
        ({**CLIPPED, **MASKED, f"{S}range": 4.0}, f"{S}range"),
        ({**MASKED, f"{S}most_examples": 10}, f"{S}most_examples"),
        ({**MASKED, f"{S}corrupt": 0.5}, f"{S}corrupt"),
        ({**MASKED, f"{S}dropout": -0.1}, f"{S}dropout"),
        ({**MASKED, f"{S}bits": 48}, f"{S}bits"),
        ({**MASKED, f"{S}range": 0.0}, f"{S}range"),
    ],
)
def test_settings_that_contradict_or_do_nothing(settings: dict[str, Any], setting: str) -> None:
    with refused(ConfigError, setting):
        toys.config(settings)


@every("privacy", ["nothing", "central", "distributed"])
def test_a_sum_over_two_hides_nobody(privacy: str) -> None:
    with refused(ConfigError, "federation.cohort"):
        federation({**MASKED, **PRIVACY[privacy], "federation.cohort": 2})
    with refused(ConfigError, "federation.cohort"):
        federation({**MASKED, **PRIVACY[privacy]}, sizes=(5, 6))


@every("privacy", ["nothing", "hidden"])
@every(
    "settings",
    [
        {f"{S}corrupt": 0.4, f"{S}dropout": 0.45},
        {f"{S}corrupt": 0.3, f"{S}dropout": 0.3, f"{S}active": True},
        {f"{S}neighbours": 3},
        {f"{S}neighbours": 2, f"{S}corrupt": 0.2},
        {f"{S}threshold": 10},
        {f"{S}threshold": 2, f"{S}corrupt": 0.3},
    ],
)
def test_what_no_graph_is_safe_for_is_refused_before_the_first_round(settings: dict[str, Any], privacy: str) -> None:
    with refused(ConfigError, "secure_aggregation.corrupt"):
        federation({**MASKED, **{**PRIVACY[privacy], "federation.cohort": 7}, **settings}, sizes=[3] * 7)


def test_words_too_coarse_for_the_clip_norm_are_refused_before_anything_is_charged(tmp_path: Path) -> None:
    for way in ({}, SKETCH):
        with refused(ConfigError, "secure_aggregation.bits"):
            federation({**MASKED, **CLIENT, **way, "privacy.clip_norm": 1e-9}).run(tmp_path / "run")
        assert not (tmp_path / "run").exists()
    assert federation({**MASKED, **CLIENT, "privacy.clip_norm": 1e-9, f"{S}bits": 64}).assembly.masks


def test_noise_that_no_word_holds_is_refused_before_the_first_round() -> None:
    masks = federation({**DISTRIBUTED, "privacy.noise_multiplier": 1e4}).assembly.masks
    assert masks is not None
    masks.require_precise([1000], 0.1, 1, 4.0)
    with refused(PlanError):
        masks.require_precise([10**12], 0.1, 1, 4.0)


def test_the_smallest_federation_that_there_can_be_works() -> None:
    for active in (False, True):
        seen = one_round(federation({**MASKED, f"{S}active": active}, sizes=(3, 4, 5)))
        assert seen.record["masked"]["survivors"] == 3


@pytest.mark.slow
def test_no_round_fails_for_the_size_of_a_secret_cohort() -> None:
    """For all of the settings that are accepted at the start."""

    class Chosen(Poisson):
        def draw(self, uniform: Any, round_: int = 0) -> list[int]:
            return list(range((0, 2, 9)[round_]))

    accepted = 0
    for settings in (
        {},
        {f"{S}threshold": 3},
        {f"{S}neighbours": 2, f"{S}corrupt": 0.0},
        {f"{S}corrupt": 0.34, f"{S}dropout": 0.34},
        {f"{S}active": True, f"{S}corrupt": 0.2, f"{S}dropout": 0.2},
        {"privacy.clip_norm": 5.5e-6},
        {"privacy.clip_norm": 3.5e-6},
    ):
        try:
            built = federation({**MASKED, **CLIPPED, "federation.cohort": 4, **settings}, sizes=[3] * 9)
        except ConfigError:
            continue
        accepted += 1
        built.assembly = replace(built.assembly, server=replace(built.assembly.server, sampler=Chosen(9, 4 / 9)))
        records = built.run().records
        assert [record["cohort"] for record in records] == [4, 4, 4]
        assert len({(record["bytes_up"], record["bytes_down"]) for record in records}) == 1
    assert accepted >= 2


@pytest.mark.parametrize("privacy", chosen(["nothing", "local", "example"], ["local"]))
def test_cohorts_by_coins_that_are_no_secret_may_have_any_size(privacy: str) -> None:
    settings = {**MASKED, **PRIVACY[privacy], "federation.sampling": "poisson", "federation.cohort": 4}
    result = federation({**settings, "federation.rounds": 4}, sizes=[3] * 9).run()
    assert len({record["cohort"] for record in result.records}) > 1
    assert result.state.tensors.is_finite()
