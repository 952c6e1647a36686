"""A lying server that chooses who is in a sum, so that the sum is one client's.

With active = true and contributors drawn by its coins, it cannot claim that they drew a single client. Nor can it combine
clients with different first passes in a later pass.
"""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from protocols.errors import Aborted, Tampering
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.rounds.masked import checks as asked
from secure_fed.rounds.masked.checks import Passes
from secure_fed.rounds.request_checks import Acceptable
from secure_fed.rounds.transport import ContributorList
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed.masked.lying import Heard, request_of, session
from tests.secure_fed.masked.wide_toys import (
    CLIPPED,
    DISTRIBUTED,
    LR,
    MASKED,
    SKETCH,
    Losing,
    Tampered,
    federation,
    flat,
    listen,
    one_round,
    recorder,
)

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
    built = build(**{"federation.rounds": 1, "federation.vanishing": 0.05})
    recording = recorder(built)
    records = built.run().records
    assert not any("lost" in record for record in records)
    masks = [(ask, reply) for ask, reply in recording.exchanges if ask.name == "mask"]
    shown = {ask.listed.contributors for ask, _ in masks}
    assert shown
    assert all((reply.client in ask.listed.contributors) == (ask.request is not None) for ask, reply in masks)


@every(("cohort", "clients", "allowed"), [(18, 20, True), (15, 20, False), (60, 500, True), (30, 500, False)])
def test_coins_that_may_draw_too_few_are_refused(cohort: int, clients: int, allowed: bool) -> None:
    """Against the exact probability, in rational numbers. Binomial coefficients of cohorts of thousands are beyond floats."""
    terms = replace(build().assembly.masks.sums.terms, invited=cohort)  # type: ignore[union-attr]
    fewest = max(3, -(-cohort // 20) + 2) + cohort // 20
    drawn, others = Fraction(cohort, clients), 1 - Fraction(cohort, clients)
    fewer = sum(math.comb(clients, k) * drawn**k * others ** (clients - k) for k in range(fewest))
    assert bool(fewer <= 2.0**-40) is allowed
    with nullcontext() if allowed else refused(ConfigError, "federation.cohort"):
        terms.require_contributors(clients, cohort / clients)
    thousands = replace(terms, invited=2000)
    thousands.require_contributors(100_000, 0.02)
    with pytest.raises(ConfigError):
        thousands.require_contributors(100_000, 0.001)


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


# Clients with different first passes in one later pass, whose sum is then one client's message.

EIGHT = [3] * 8
ACTIVE = {**MASKED, "secure_aggregation.active": True, "secure_aggregation.dropout": 0.0, "federation.cohort": 4}
ONE_MAY_VANISH = {
    "secure_aggregation.dropout": 0.25,
    "secure_aggregation.corrupt": 0.0,
}  # of four, none may collude then
LONE, OTHERS, STILL = 3, (0, 1, 2), (4, 5, 6, 7)
METHODS: dict[str, dict[str, Any]] = {
    "fra_lora": SKETCH,
    "fra_then_ffa": {**SKETCH, "method.name": "fra_then_ffa", "method.switch_round": 2},
    "fedask": {"method.name": "fedask", "method.rank": 2, "method.oversampling": 2},
    "fedpower": {"method.name": "fedpower", "method.rank": 2, "method.oversampling": 2},
}


@pytest.fixture
def any_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients accept any request's values: the binding of passes must hold without these bounds."""
    monkeypatch.setattr(Acceptable, "fault", lambda *given: "")


def mixed(built: Federation, lr: float) -> tuple[list[Heard], dict[int, np.ndarray]]:
    """Later passes over the trained victim and clients trained with learning rate `lr`, and each client's second message."""
    trained, still = request_of(built), request_of(built, lr=lr)
    heard = listen(built)
    sums = [session(built, trained, clients=(*OTHERS, LONE)), session(built, still, number=1, clients=STILL)]
    assert not sums[0].refused
    assert not sums[1].refused
    plan = built.assembly.server.plan(built.assembly.initial)
    means: dict[str, Tensors] = {}
    for number, name in enumerate(plan.passes[1:]):
        before = plan.passes[number]
        means[before] = _mean(built, before, sums[-1 if number else 0])
        request = built.assembly.server.request(built.assembly.initial, plan, name, LR, means, trained.digest)
        sums.append(session(built, request, number=2 + number, clients=(LONE, *STILL[:3])))
        if sums[-1].refused:
            break
    return sums[2:], heard.values(0, plan.passes[1]) if (0, plan.passes[1]) in heard.replies else {}


def _mean(built: Federation, name: str, found: Heard) -> Tensors:
    layout = built.assembly.server.layout(built.assembly.initial, name)
    encoding = built.assembly.masks.sums.terms.encoding(layout.size, built.assembly.initial.clip_norm)  # type: ignore[union-attr]
    return layout.unflatten(torch.from_numpy(encoding.decode(found.machine.total()).values).float() / 4)


@pytest.mark.usefixtures("any_rate")
@pytest.mark.parametrize(
    ("way", "privacy"),
    chosen(itertools.product(METHODS, ("masks", "central")), [("fra_lora", "central")]),
)
def test_clients_with_another_first_pass_refuse_the_second(way: str, privacy: str) -> None:
    central = {**CLIPPED, "federation.sampling": "fixed"} if privacy == "central" else {}
    built = federation({**ACTIVE, **METHODS[way], **central}, sizes=EIGHT)
    (second,), _ = mixed(built, 0.0)
    assert {place for place, _, _ in second.refused.values()} == {"mask"}
    assert set(second.refused) >= set(STILL[:3])
    told = [second.refused[client] for client in STILL[:3]]
    assert all(error is Tampering and "another first request" in what for _, error, what in told)


@pytest.mark.usefixtures("any_rate")
@pytest.mark.parametrize("way", chosen(METHODS, ["fedpower"]))
def test_without_the_comparison_the_sum_is_the_victims_message(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for the comparison: the other clients trained with learning rate 0 and send zeros."""
    monkeypatch.setattr(Passes, "_require_bound", lambda *given: None)
    built = federation({**ACTIVE, **METHODS[way]}, sizes=EIGHT)
    monkeypatch.setattr(Passes, "check", lambda *given: None)
    later, sent = mixed(built, 0.0)
    assert not any(found.refused for found in later)
    assert [client for client, values in sent.items() if np.abs(values).max() > 1e-6] == [LONE]
    name = built.assembly.server.plan(built.assembly.initial).passes[1]
    np.testing.assert_allclose(4 * flat(_mean(built, name, later[0])), sent[LONE], atol=1e-6)


@pytest.mark.parametrize("second", [(LONE, *STILL[:3]), (*OTHERS,)], ids=["mixed", "one less"])
def test_clients_of_another_first_sum_refuse_the_second_though_it_was_asked_alike(second: tuple[int, ...]) -> None:
    """If a later sum mixes two first sums, or leaves out a client of the first, the difference of sums reveals one client."""
    built = federation({**ACTIVE, **SKETCH, **ONE_MAY_VANISH}, sizes=EIGHT)
    first = request_of(built)
    for number, clients in enumerate([(*OTHERS, LONE), STILL]):
        assert not session(built, first, number=number, clients=clients).refused
    found = session(built, request_of(built, 0, 1, first), number=2, clients=second)
    assert set(found.refused) == set(second)
    assert all(error is Tampering and "are not the 4 of the" in what for _, error, what in found.refused.values())


@pytest.mark.parametrize("active", [True, False])
def test_a_second_sum_that_loses_a_client_is_opened_by_nobody(active: bool) -> None:
    built = federation({**ACTIVE, **SKETCH, **ONE_MAY_VANISH, "secure_aggregation.active": active}, sizes=EIGHT)
    four = (*OTHERS, LONE)
    first = request_of(built)
    assert not session(built, first, clients=four).refused
    found = session(built, request_of(built, 0, 1, first), number=1, clients=four, lost=LONE)
    assert found.refused == dict.fromkeys(OTHERS, ("consistency" if active else "unmask", Aborted, ""))


@pytest.mark.parametrize("kind", chosen([MASKED, ACTIVE], [ACTIVE]), ids=["passive", "active"])
def test_a_round_that_loses_a_client_between_passes_is_lost_and_the_run_goes_on(kind: dict[str, Any]) -> None:
    eight = {"secure_aggregation.dropout": 0.25, "federation.cohort": 8}
    built = federation({**kind, **SKETCH, **eight}, sizes=EIGHT)
    seen = one_round(built, transport=Losing(built.assembly.transport, {2: "unmask"}))
    assert "1 of 8 clients vanished between two passes" in seen.record["lost"]
    assert seen.after.round == 1
    assert seen.means["change"].any() == False  # noqa: E712 - of a numpy array
    assert seen.record["masked"]["survivors"] == 8
    again = one_round(built, round_=1)
    assert "lost" not in again.record


def test_sums_with_noise_of_their_own_may_lose_clients_between_passes() -> None:
    """Each noised sum is charged as a release, so the guarantee covers the difference of two sums."""
    built = federation({**DISTRIBUTED, **SKETCH, "secure_aggregation.dropout": 0.25}, sizes=EIGHT)
    seen = one_round(built, transport=Losing(built.assembly.transport, {2: "unmask"}))
    assert "lost" not in seen.record
    assert seen.record["masked"]["survivors"] == 7


@pytest.mark.parametrize("lie", ["first", "later", "means", "no means"])
def test_a_request_that_does_not_fit_its_place_in_the_round_is_refused(lie: str) -> None:
    built = federation({**ACTIVE, **SKETCH}, sizes=EIGHT)
    four, first = (*OTHERS, LONE), request_of(built)
    if lie == "first":
        found = session(built, replace(first, first="00" * 32), clients=four)
    else:
        assert not session(built, first, clients=four).refused
        second = request_of(built, 0, 1, first)
        wrong = {name: mean.without(list(mean)[:1]) for name, mean in second.means.items()}
        lied = {"later": {"first": ""}, "means": {"means": wrong}, "no means": {"means": {}}}[lie]
        found = session(built, replace(second, **lied), number=1, clients=four)
    assert {(place, error) for place, error, _ in found.refused.values()} == {("mask", Tampering)}
    assert len(found.refused) == 4
