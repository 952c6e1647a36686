"""Sums with active = true and contributors drawn by the server's coins: it cannot claim that they drew a single client."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from protocols.errors import Aborted, Tampering
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.rounds.masked import checks as asked
from secure_fed.rounds.masked.terms import Terms
from secure_fed.rounds.transport import ContributorList, Recording
from tests.secure_fed.masked.lying import Heard, request_of, session
from tests.secure_fed.masked.wide_toys import CLIPPED, DISTRIBUTED, MASKED, Tampered, federation

FEW = {"secure_aggregation.corrupt": 0.05, "secure_aggregation.dropout": 0.05}
COINS = {**MASKED, **CLIPPED, **FEW, "secure_aggregation.active": True, "federation.cohort": 18}
TWENTY, VICTIM = [2] * 20, 2


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


def test_who_is_on_the_list_and_asked_for_zeros_refuses() -> None:
    found = summed(build(), tuple(range(10)), {VICTIM})
    assert {client for client, told in found.refused.items() if told[1] is Tampering} == set(range(10)) - {VICTIM}


def test_who_is_not_on_the_list_and_asked_to_contribute_refuses() -> None:
    found = summed(build(), tuple(range(3, 10)), set(range(2, 10)))
    assert set(found.refused) == {VICTIM}


@pytest.mark.parametrize("told", [None, tuple(range(1, 11))], ids=["none", "another"])
def test_a_list_that_is_not_the_sessions_is_refused(told: tuple[int, ...] | None) -> None:
    """So all clients of a sum receive the same list."""
    built = build(**{"federation.rounds": 1})

    def lied(client: int, stage: Any) -> Any:
        if client != VICTIM or stage.listed is None:
            return stage
        return replace(stage, listed=None if told is None else replace(stage.listed, contributors=told))

    built.assembly = replace(built.assembly, transport=Tampered(built.assembly.transport, lied))
    with pytest.raises(Tampering, match="differs from the list at the session's start"):
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
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    records = built.run().records
    assert not any("lost" in record for record in records)
    masks = [(ask, reply) for ask, reply in recording.exchanges if ask.name == "mask"]
    shown = {ask.listed.contributors for ask, _ in masks}
    assert shown
    assert all((reply.client in ask.listed.contributors) == (ask.request is not None) for ask, reply in masks)


@pytest.mark.parametrize(
    ("cohort", "clients", "allowed"), [(18, 20, True), (15, 20, False), (60, 500, True), (30, 500, False)]
)
def test_coins_that_may_draw_too_few_are_refused(cohort: int, clients: int, allowed: bool) -> None:
    """Against the exact probability, in rational numbers."""
    built = build()
    terms = replace(built.assembly.masks.sums.terms, invited=cohort)  # type: ignore[union-attr]
    fewest = max(3, -(-cohort // 20) + 2) + cohort // 20
    drawn, others = Fraction(cohort, clients), 1 - Fraction(cohort, clients)
    fewer = sum(math.comb(clients, k) * drawn**k * others ** (clients - k) for k in range(fewest))
    assert bool(fewer <= 2.0**-40) is allowed
    if allowed:
        return terms.require_contributors(clients, cohort / clients)
    with pytest.raises(ConfigError, match=rf"needs {fewest} contributors .*federation\.sampling = 'fixed'"):
        terms.require_contributors(clients, cohort / clients)


def test_cohorts_of_thousands_are_judged() -> None:
    """Binomial coefficients of this size are beyond floats."""
    terms = replace(build().assembly.masks.sums.terms, invited=2000)  # type: ignore[union-attr]
    terms.require_contributors(100_000, 0.02)
    with pytest.raises(ConfigError, match="draw fewer with a chance of"):
        terms.require_contributors(100_000, 0.001)


def test_a_federation_of_a_small_secret_cohort_is_refused() -> None:
    with pytest.raises(ConfigError, match="draw fewer with a chance of 2\\^-"):
        build(**{"federation.cohort": 6})
    assert isinstance(
        build(**{"federation.cohort": 6, "secure_aggregation.active": False}).assembly.masks.sums.terms, Terms
    )  # type: ignore[union-attr]


# Phantoms, whose contributions are not secret. They have the last client numbers.

BESIDE = {**MASKED, **FEW, "secure_aggregation.active": True, "evaluation.phantoms": 20, "federation.cohort": 6}
NOTHING = {**BESIDE, "evaluation.audit_unit": "client", "federation.sampling": "fixed"}
COHORTS: dict[str, dict[str, Any]] = {
    "distributed": {**DISTRIBUTED, **BESIDE},
    "central": {**CLIPPED, **BESIDE, "federation.sampling": "fixed"},
    "nothing": NOTHING,
}


@pytest.mark.parametrize("cohort", COHORTS)
def test_no_cohort_of_fixed_size_has_more_phantoms_than_the_plan(cohort: str) -> None:
    """Ten of sixteen invited clients are phantoms. With more, the guarantee would count on real clients that are missing."""
    built = federation(COHORTS[cohort], sizes=[2] * 12)
    request = request_of(built)
    assert (built.assembly.masks.invited, built.assembly.protection.beside) == (16, 10)  # type: ignore[union-attr]
    for real in (1, 5):
        clients = [*range(2, 2 + real), *range(12, 28 - real)]
        found = session(built, request, clients=clients)
        assert set(found.refused) == set(clients)
        assert found.alike
        assert found.refused[VICTIM][:2] == ("advertise", Tampering)
    assert not session(built, request, clients=[*range(2, 8), *range(12, 22)]).refused


DECLARED = {"evaluation.phantoms": 20, "secure_aggregation.corrupt": 0.0}


def test_phantoms_do_not_count_among_contributors() -> None:
    """The federation also starts only because phantoms are left out of the check of cohort sizes."""
    built, phantoms = build(**DECLARED), tuple(range(20, 40))
    few, three = (VICTIM, 7), (VICTIM, 7, 8)

    def told(real: tuple[int, ...], **lies: Any) -> Heard:
        return summed(built, real + phantoms, {*real, *phantoms}, clients=range(40), **lies)

    assert told(few).refused == dict.fromkeys(range(40), ("mask", Aborted, ""))
    assert told(three, number=1, lost=7).refused == dict.fromkeys(set(range(40)) - {7}, ("consistency", Aborted, ""))


def test_coins_of_phantoms_do_not_make_a_cohort_large_enough() -> None:
    with pytest.raises(ConfigError, match=r"needs 5 contributors .* draw 15 of 20 clients on average"):
        build(**DECLARED, **{"federation.cohort": 15})


def test_a_sum_over_one_client_and_phantoms_is_refused() -> None:
    for cohort in (1, 2):
        with pytest.raises(ConfigError, match=f"needs 3 clients at least in a round, and there are {cohort}"):
            federation({**NOTHING, "federation.cohort": cohort}, sizes=[2] * 12)


def test_as_many_may_not_vanish_as_leave_phantoms_alone() -> None:
    with pytest.raises(ConfigError, match=r"10 are phantoms; if the allowed share drops out, 2 others may remain"):
        federation({**NOTHING, "secure_aggregation.dropout": 0.25, "secure_aggregation.corrupt": 0.1}, sizes=[2] * 12)
