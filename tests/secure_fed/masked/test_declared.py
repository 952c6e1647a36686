"""Sums with active = true whose contributors the server's coins draw: it cannot say that they drew one client alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protocols.errors import Aborted, Tampering
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.masked import asked
from secure_fed.masked.terms import Terms
from secure_fed.transport import Asked, Recording
from tests.secure_fed.masked.lying import Heard, request_of, session
from tests.secure_fed.masked.wide_toys import CLIPPED, MASKED, Tampered, federation

FEW = {"secure_aggregation.corrupt": 0.05, "secure_aggregation.dropout": 0.05}
COINS = {**MASKED, **CLIPPED, **FEW, "secure_aggregation.active": True, "federation.cohort": 18}
TWENTY, VICTIM = [2] * 20, 2


def build(**settings: Any) -> Federation:
    return federation({**COINS, **settings}, sizes=TWENTY)


def summed(built: Federation, contributors: tuple[int, ...], asked: set[int], **lies: Any) -> Heard:
    request = request_of(built)
    listed = Asked(request.digest, contributors)
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
    """So all clients of a sum are shown one list."""
    built = build(**{"federation.rounds": 1})

    def lied(client: int, stage: Any) -> Any:
        if client != VICTIM or stage.asked is None:
            return stage
        return replace(stage, asked=None if told is None else replace(stage.asked, contributors=told))

    built.transport = Tampered(built.transport, lied)
    with pytest.raises(Tampering, match="not the one that the session was begun with"):
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
    recording = built.transport = Recording(built.transport)
    records = built.run().records
    assert not any("lost" in record for record in records)
    masks = [(ask, reply) for ask, reply in recording.exchanges if ask.name == "mask"]
    shown = {ask.asked.contributors for ask, _ in masks}
    assert shown
    assert all((reply.client in ask.asked.contributors) == (ask.request is not None) for ask, reply in masks)


@pytest.mark.parametrize(
    ("cohort", "clients", "allowed"), [(18, 20, True), (15, 20, False), (60, 500, True), (30, 500, False)]
)
def test_coins_that_may_draw_too_few_are_refused(cohort: int, clients: int, allowed: bool) -> None:
    """By scipy's binomial law, of which this is not made."""
    from scipy.stats import binom

    built = build()
    terms = replace(built.masks.sums.terms, invited=cohort)  # type: ignore[union-attr]
    fewest = max(3, cohort // 20 + 2) + cohort // 20
    assert bool(binom.cdf(fewest - 1, clients, cohort / clients) <= 2.0**-40) is allowed
    if allowed:
        return terms.require_contributors(clients, cohort / clients)
    with pytest.raises(ConfigError, match=rf"needs {fewest} contributors .*federation\.sampling = 'fixed'"):
        terms.require_contributors(clients, cohort / clients)


def test_a_federation_of_a_small_secret_cohort_is_refused() -> None:
    with pytest.raises(ConfigError, match="draw fewer with a chance of 2\\^-"):
        build(**{"federation.cohort": 6})
    assert isinstance(build(**{"federation.cohort": 6, "secure_aggregation.active": False}).masks.sums.terms, Terms)  # type: ignore[union-attr]
