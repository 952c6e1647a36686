"""The terms of masked sums: the parameters fixed for a run, and each client's own policy."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest

from protocols.errors import ParameterError
from protocols.parameters import Parameters
from protocols.thresholds import choose, colluding, surviving
from secure_fed.config import SecureAggregationConfig
from secure_fed.errors import ConfigError
from secure_fed.rounds.masked.terms import Registry, Terms
from secure_fed.rounds.protection import Protection
from tests.cells import every
from tests.golden import refused
from tests.secure_fed.masked.wide_toys import DISTRIBUTED, HIDDEN, federation


def terms(invited: int, *, most: int | None = None, registry: Registry | None = None, **settings: Any) -> Terms:
    """Terms for `invited` clients. most: with cohorts drawn by coins, the largest possible cohort."""
    chosen = SecureAggregationConfig(enabled=True, **settings)
    return Terms(chosen, Protection(), invited, most or invited, most is not None, 1.0, registry)


@every("share", ["0", "0.1", "0.29", "0.3", "0.07", "0.49", "0.35"])
@every("clients", [3, 7, 10, 29, 100, 300])
def test_shares_are_taken_as_they_are_written(share: str, clients: int) -> None:
    exact = int(Fraction(share) * clients)
    assert colluding(clients, float(share)) == math.ceil(Fraction(share) * clients)
    assert surviving(clients, float(share)) == clients - exact


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


def test_two_are_too_few_and_what_is_unsafe_is_said_with_its_settings() -> None:
    with refused(ConfigError, "secure_aggregation.corrupt"):
        terms(7, corrupt=0.45, dropout=0.45).choice(7)
    with refused(ConfigError, "secure_aggregation.corrupt"):
        terms(8, threshold=9).require_feasible()


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
