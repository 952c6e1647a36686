"""Sums with active = true and contributors drawn by the server's coins: it cannot claim that they drew a single client."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from protocols.errors import Aborted, Tampering
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.rounds.masked import checks as asked
from secure_fed.rounds.transport import ContributorList
from tests.cells import every
from tests.golden import refused
from tests.secure_fed.masked.lying import Heard, request_of, session
from tests.secure_fed.masked.wide_toys import CLIPPED, DISTRIBUTED, MASKED, Tampered, federation, recorder

FEW = {"secure_aggregation.corrupt": 0.05, "secure_aggregation.dropout": 0.05}
COINS = {**MASKED, **CLIPPED, **FEW, "secure_aggregation.active": True, "federation.cohort": 18}
TWENTY, VICTIM = [2] * 20, 2
BESIDE = {**MASKED, **FEW, "secure_aggregation.active": True, "evaluation.dummies": 20, "federation.cohort": 6}
NOTHING = {**BESIDE, "evaluation.audit_unit": "client", "federation.sampling": "fixed"}


def build(**settings: Any) -> Federation:
    return federation({**COINS, **settings}, sizes=TWENTY)


def summed(built: Federation, contributors: tuple[int, ...], asked: set[int], **lies: Any) -> Heard:
    request = request_of(built)
    listed = ContributorList(request.digest, contributors)
    return session(built, request, asked=lambda client: client in asked, contributors=listed, **lies)


@pytest.mark.parametrize("contributors", [(VICTIM,), (VICTIM, 7)])
def test_a_sum_of_fewer_contributors_than_the_least_is_masked_by_nobody(contributors: tuple[int, ...]) -> None:
    found = summed(build(), contributors, set(contributors))
    assert found.refused == dict.fromkeys(range(20), ("mask", Aborted, ""))


def test_who_is_asked_for_something_else_than_the_list_says_refuses() -> None:
    built = build()
    zeros = summed(built, tuple(range(10)), {VICTIM})
    assert {client for client, told in zeros.refused.items() if told[1] is Tampering} == set(range(10)) - {VICTIM}
    assert set(summed(built, tuple(range(3, 10)), set(range(2, 10)), number=1).refused) == {VICTIM}


@pytest.mark.parametrize("told", [None, tuple(range(1, 11))], ids=["none", "another"])
def test_a_list_that_is_not_the_sessions_is_refused(told: tuple[int, ...] | None) -> None:
    """So all clients of a sum receive the same list."""
    built = build(**{"federation.rounds": 1})

    def lied(client: int, stage: Any) -> Any:
        if client != VICTIM or stage.listed is None:
            return stage
        return replace(stage, listed=None if told is None else replace(stage.listed, contributors=told))

    built.assembly = replace(built.assembly, transport=Tampered(built.assembly.transport, lied))
    with refused(Tampering):
        built.run()


def test_a_sum_whose_contributors_are_said_to_have_vanished_is_signed_by_nobody() -> None:
    three = (VICTIM, 7, 8)
    found = summed(build(), three, set(three), lost=7)
    assert found.refused == dict.fromkeys(set(range(20)) - {7}, ("consistency", Aborted, ""))


def test_without_the_least_number_the_sum_would_be_one_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "require_enough", lambda *given: None)
    assert not summed(build(), (VICTIM,), {VICTIM}, upto="mask").refused


@pytest.mark.slow
def test_honest_rounds_are_made_and_the_list_is_counted() -> None:
    built = build(**{"federation.rounds": 2, "federation.vanishing": 0.05})
    recording = recorder(built)
    records = built.run().records
    assert not any("lost" in record for record in records)
    masks = [(ask, reply) for ask, reply in recording.exchanges if ask.name == "mask"]
    shown = {ask.listed.contributors for ask, _ in masks}
    assert shown
    assert all((reply.client in ask.listed.contributors) == (ask.request is not None) for ask, reply in masks)


@every(("cohort", "clients", "allowed"), [(18, 20, True), (15, 20, False), (60, 500, True), (30, 500, False)])
def test_coins_that_may_draw_too_few_are_refused(cohort: int, clients: int, allowed: bool) -> None:
    """Against the exact probability, in rational numbers."""
    terms = replace(build().assembly.masks.sums.terms, invited=cohort)  # type: ignore[union-attr]
    fewest = max(3, -(-cohort // 20) + 2) + cohort // 20
    drawn, others = Fraction(cohort, clients), 1 - Fraction(cohort, clients)
    fewer = sum(math.comb(clients, k) * drawn**k * others ** (clients - k) for k in range(fewest))
    assert bool(fewer <= 2.0**-40) is allowed
    with nullcontext() if allowed else refused(ConfigError, "federation.cohort"):
        terms.require_contributors(clients, cohort / clients)


def test_cohorts_of_thousands_are_judged() -> None:
    """Binomial coefficients of this size are beyond floats."""
    terms = replace(build().assembly.masks.sums.terms, invited=2000)  # type: ignore[union-attr]
    terms.require_contributors(100_000, 0.02)
    with refused(ConfigError, "federation.cohort"):
        terms.require_contributors(100_000, 0.001)


@every(
    ("settings", "setting"),
    [
        ({**COINS, "federation.cohort": 6}, "federation.cohort"),
        ({**NOTHING, "federation.cohort": 1}, "federation.cohort"),
        ({**NOTHING, "federation.cohort": 2}, "federation.cohort"),
    ],
)
def test_too_few_contributors_are_refused_before_the_run(settings: dict[str, Any], setting: str) -> None:
    """Dummies do not count, since they are in no masked sum."""
    with refused(ConfigError, setting):
        federation(settings, sizes=[2] * 12 if "federation.sampling" in settings else TWENTY)


COHORTS: dict[str, dict[str, Any]] = {
    "distributed": {**DISTRIBUTED, **BESIDE},
    "central": {**CLIPPED, **BESIDE, "federation.sampling": "fixed"},
    "nothing": NOTHING,
}


@pytest.mark.parametrize("cohort", COHORTS)
def test_a_sum_with_a_client_that_the_run_does_not_have_is_refused(cohort: str) -> None:
    """Such as a dummy, of which the server knows everything: it would hide nobody, and bring no noise."""
    built = federation({**COHORTS[cohort], "secure_aggregation.active": False}, sizes=[2] * 12)
    request = request_of(built)
    clients = [*range(2, 7), 12]
    found = session(built, request, clients=clients)
    assert found.refused[VICTIM][:2] == ("advertise", Tampering)
    assert not session(built, request, clients=range(2, 8)).refused
