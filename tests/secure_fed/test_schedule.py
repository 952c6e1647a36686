"""Clients in turn by a public order: cohorts, refusals by clients, charges, and how far one client moves a sum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import get_epsilon_gaussian
from hypothesis import given
from hypothesis import strategies as st

from privacy.correlation import square_root
from privacy.errors import BudgetExhausted, TurnPassed
from privacy.ledger import Account, Ledger
from privacy.mechanisms import Gaussian
from privacy.participation import NotYourTurn, PublicOrder
from protocols.errors import Tampering
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.methods.method import State
from secure_fed.report.result import Result
from secure_fed.rounds.client import Client
from secure_fed.rounds.cohort import cohort_sampler, dummy_sampler
from secure_fed.rounds.transport import Request
from secure_fed.runs.budget import RunBudget
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.in_turn import BANDED, CLIP, IN_TURN, SIZES, Killed, Zeros, federation, of_zeros
from tests.secure_fed.masked import lying

MASKED: dict[str, Any] = {"secure_aggregation.enabled": True, "federation.cohort": 3}
SHARES: dict[str, Any] = {**MASKED, "privacy.noise": "distributed"}
TWELVE = [5] * 12
RUN = r"run-\w+"  # its name in a ledger


def order_of(built: Federation) -> PublicOrder:
    assert isinstance(built.assembly.sampler, PublicOrder)
    return built.assembly.sampler


# Cohorts.


def test_cohorts_are_turns_and_records_may_tell_their_sizes() -> None:
    built = federation(IN_TURN)
    zeros, _ = of_zeros(built)
    result = built.run()
    assert zeros.asked == [(round_, order_of(built).of_round(round_)) for round_ in range(6)]
    assert [record["cohort"] for record in result.records] == [2] * 6
    assert sorted(client for _, cohort in zeros.asked for client in cohort) == sorted([*range(6)] * 2)


def test_held_out_clients_leave_their_places_empty_and_everybody_else_s_turn_alone() -> None:
    whole, held = (
        federation({**IN_TURN, "evaluation.audit_fraction": fraction}, sizes=[2] * 24) for fraction in (0.0, 0.5)
    )
    names = {turn: [whole.assembly.problem.names[c] for c in order_of(whole).of_round(turn)] for turn in range(12)}
    there = held.assembly.problem.names
    assert 0 < len(there) < 24
    for turn in names:
        assert [there[c] for c in order_of(held).of_round(turn)] == [name for name in names[turn] if name in there]
    assert order_of(held).expected == order_of(whole).expected == 2.0
    plans = [built.assembly.protection.plan for built in (whole, held)]
    assert plans[0] == plans[1]


@given(st.integers(3, 60), st.integers(1, 60), st.integers(1, 40), st.integers(1, 60))
def test_dummies_come_no_oftener_and_no_closer_than_clients(clients: int, size: int, dummies: int, rounds: int) -> None:
    order = PublicOrder(clients, min(size, clients))
    beside = dummy_sampler(order, dummies)
    assert isinstance(beside, PublicOrder)
    assert beside.population == dummies
    assert beside.gap >= order.gap
    assert beside.turns(rounds) <= order.turns(rounds)


def test_dummies_are_in_the_sums_in_turn() -> None:
    built = federation({**IN_TURN, "federation.cohort": 3, "evaluation.dummies": 4}, sizes=TWELVE)
    beside = [[one for one in built.assembly.server.draw(round_) if one >= 12] for round_ in range(6)]
    assert [len(own) for own in beside] == [1] * 6
    assert sorted(own[0] for own in beside[:4]) == [12, 13, 14, 15]


@every(
    "settings, cap",
    [
        ({"privacy.unit": "client", "privacy.noise": "local"}, 2),
        ({"privacy.unit": "example"}, 2),
        ({"privacy.unit": "client", "privacy.noise": "local", "privacy.participations": 1}, 1),
        ({"privacy.unit": "client", "privacy.noise": "local", "federation.rounds": 7}, 3),
    ],
)
def test_clients_that_account_for_themselves_have_as_many_turns_as_the_order_gives(
    settings: dict[str, Any], cap: int
) -> None:
    plan = federation({**IN_TURN, **settings}).assembly.protection.plan
    assert plan is not None
    assert plan.participations == cap


# Refusals by clients.


def request(built: Federation, round_: int) -> Request:
    return lying.request_of(built, round_)


def test_a_client_answers_in_its_turn_and_once(tmp_path: Path) -> None:
    built, again = federation(IN_TURN), federation(IN_TURN)
    order, client = order_of(built), built.assembly.clients[4]
    own = [turn for turn in range(6) if order.has_turn(4, turn)]
    built.assembly.attendance.begin(tmp_path / "turns")  # type: ignore[union-attr]
    for turn in range(6):
        if turn not in own:
            assert client.job(request(built, turn)) is None, "nor is it trained for another's turn"
            with pytest.raises(NotYourTurn):
                client.handle(request(built, turn))
    client.handle(request(built, own[0]))
    with pytest.raises(NotYourTurn):
        client.handle(request(built, own[0]))
    again.assembly.attendance.begin(tmp_path / "turns")  # type: ignore[union-attr]
    restarted = again.assembly.clients[4]
    with pytest.raises(NotYourTurn):
        restarted.handle(request(again, own[0]))
    restarted.handle(request(again, own[1]))
    with pytest.raises(NotYourTurn):
        restarted.handle(request(again, own[1] + order.gap))  # after the last round


@pytest.mark.parametrize("settings", [MASKED, SHARES], ids=["central", "shares"])
def test_a_masked_session_out_of_turn_is_refused_before_anything_is_sent(settings: dict[str, Any]) -> None:
    built = federation({**IN_TURN, **settings}, sizes=TWELVE)
    order, seen = order_of(built), lying.watch(built)
    first, second = order.of_round(0), order.of_round(1)
    for invited in (second, [*first[:2], second[0]]):
        heard = lying.session(built, request(built, 0), clients=sorted(invited))
        assert heard.alike
        assert {(stage, error) for stage, error, _ in heard.refused.values()} == {("advertise", Tampering)}
        assert "whose turn it is not" in heard.refused[invited[0]][2]
    assert seen.trained == []
    assert not lying.session(built, request(built, 0), clients=first).refused


def test_a_request_of_another_round_than_its_session_s_is_refused() -> None:
    built = federation({**IN_TURN, **MASKED}, sizes=TWELVE)
    seen, invited = lying.watch(built), order_of(built).of_round(0)
    asked = request(built, 4)  # the turn of the same clients again
    assert order_of(built).of_round(4) == invited
    members = built.assembly.masks.clients  # type: ignore[union-attr]
    handles = {client: members[client].handle for client in invited}
    for client in invited:
        members[client].handle = lambda stage, client=client: handles[client](  # type: ignore[method-assign,misc]
            replace(stage, round=0)
        )
    heard = lying.session(built, asked, clients=invited)
    assert {(stage, error) for stage, error, _ in heard.refused.values()} == {("mask", Tampering)}
    assert seen.trained == []


# Charges.


def killed(settings: Mapping[str, Any], path: Path, dies_in: int) -> Federation:
    """A run that is killed in this round, whose clients send zeros."""
    built = federation(settings)
    of_zeros(built, dies_in)
    with pytest.raises(Killed):
        built.run(path)
    return built


def resumed(settings: Mapping[str, Any], path: Path) -> tuple[Zeros, Federation, Result]:
    again = federation(settings)
    zeros, _ = of_zeros(again)
    return zeros, again, again.run(path, resume=True)


@pytest.mark.parametrize(("method", "passes"), [("fedlora", 1), ("fedask", 2)])
def test_a_round_is_charged_whole_and_an_interrupted_one_is_not_repeated(
    tmp_path: Path, method: str, passes: int
) -> None:
    asked_for = {**IN_TURN, "method.name": method, **({"method.oversampling": 1} if passes == 2 else {})}
    killed(asked_for, tmp_path / "run", 2)
    assert private_toys.charged(tmp_path / "run") == 3 * passes
    zeros, again, result = resumed(asked_for, tmp_path / "run")
    assert [turn for turn, _ in zeros.asked] == [turn for turn in (3, 4, 5) for _ in range(passes)]
    assert private_toys.charged(tmp_path / "run") == result.summary["releases"] == 6 * passes
    assert [record.get("lost", "") for record in result.records][2].startswith("round 3 was interrupted")
    assert again.assembly.protection.plan is not None
    assert result.summary["epsilon"] == again.assembly.protection.plan.epsilon()


def test_all_passes_of_all_turns_are_one_release() -> None:
    """Two turns of two passes are four releases, which compose to one Gaussian of noise multiplier z / 2."""
    asked_for = {**IN_TURN, "method.name": "fedask", "method.oversampling": 1}
    plan = federation({**asked_for, "privacy.noise_multiplier": None, "privacy.epsilon": 3.0}).assembly.protection.plan
    assert plan is not None
    assert plan.epsilon() == plan.epsilon_participants() <= 3.0
    assert plan.epsilon() == pytest.approx(get_epsilon_gaussian(plan.noise_multiplier / 2, 1e-3))
    orders = (2.0, 8.0, 64.0)
    cost = plan.cost(orders=orders)
    assert cost.rdp == pytest.approx([order * 4 / (2 * plan.noise_multiplier**2) for order in orders])


def test_a_plan_that_was_cut_is_not_gone_beyond_where_a_round_was_lost(tmp_path: Path) -> None:
    """The passes that a lost round did not make leave no room for another round."""
    asked_for = {
        **{**IN_TURN, "method.name": "fedask", "method.oversampling": 1},
        **{"privacy.epsilon": 5.5, "privacy.on_exhausted": "stop"},
    }
    built = killed(asked_for, tmp_path / "run", 1)
    assert built.assembly.protection.plan is not None
    assert built.assembly.protection.plan.releases == 6
    zeros, _, result = resumed(asked_for, tmp_path / "run")
    assert [turn for turn, _ in zeros.asked] == [2, 2]
    assert result.summary["rounds"] == 3
    assert "after 3 of 6 rounds" in result.summary["ended_early"]


def two_processes(path: Path) -> tuple[RunBudget, RunBudget]:
    """The budgets of two processes that take themselves for one run of six rounds, of which two are charged."""
    plan = killed(IN_TURN, path, 1).assembly.protection.plan
    assert plan is not None
    ledgers = [private_toys.own_ledger(path) for _ in range(2)]
    (run,) = {row.run for row in ledgers[0].rows() if row.kind == "reserve"}
    one, two = (
        RunBudget(run, ledger, Account(ledger, run, plan.limit, None, lambda head: None), plan) for ledger in ledgers
    )
    return one, two


def test_two_processes_that_take_themselves_for_one_run_do_not_both_make_a_round(tmp_path: Path) -> None:
    one, two = two_processes(tmp_path / "run")
    assert one.begun == two.begun == 2
    one.charge(2, "change")
    with refused(TurnPassed):
        two.charge(2, "change")
    with refused(TurnPassed):
        one.charge(2, "change")
    two.account.next_round = lambda: 2  # type: ignore[method-assign] # before one.charge, as if both processes had read it then
    with refused(BudgetExhausted, hide=RUN):
        two.charge(2, "change")


def test_rounds_lost_before_their_charge_leave_no_room_to_make_a_round_twice_or_too_many(tmp_path: Path) -> None:
    """Rounds 3 and 4 are lost before their charge, so that fewer rounds are charged than have passed."""
    one, two = two_processes(tmp_path / "run")
    one.charge(4, "change")
    assert two.begun == 5
    for round_ in (4, 3):
        with refused(TurnPassed):
            two.charge(round_, "change")
    with refused(BudgetExhausted):
        two.charge(6, "change")
    two.account.next_round = lambda: 2  # type: ignore[method-assign] # before one.charge
    for round_ in (4, 3):
        with refused(BudgetExhausted, hide=RUN):
            two.charge(round_, "change")
    assert two.charged == {"": 3}


ALONE: list[dict[str, Any]] = [
    {"privacy.unit": "none"},
    {"privacy.unit": "client", "privacy.noise": "local"},
    {"privacy.unit": "example"},
]


@pytest.mark.parametrize("settings", chosen(ALONE, ALONE[1:2]), ids=lambda settings: "-".join(settings.values()))
def test_where_no_guarantee_counts_on_turns_an_interrupted_round_is_made_again(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    public = {name: value for name, value in IN_TURN.items() if not name.startswith("privacy.")}
    noise = {"privacy.noise_multiplier": 1.0, "privacy.clip_norm": CLIP, "privacy.delta": 1e-3}
    asked_for = {**public, **(noise if settings["privacy.unit"] != "none" else {}), **settings, "federation.rounds": 3}
    killed(asked_for, tmp_path / "run", 1)
    zeros, _, _ = resumed(asked_for, tmp_path / "run")
    assert [turn for turn, _ in zeros.asked] == [1, 2]


# How far one client moves a sum.


def totals(built: Federation, state: State, absent: int | None) -> dict[str, torch.Tensor]:
    """The sum of a round before noise; client `absent` contributes zeros."""
    server = built.assembly.server
    if built.assembly.attendance is not None:
        built.assembly.attendance.begin(None)
    plan = server.plan(state)
    asked = server.request(state, plan, "change", private_toys.LR, {})
    if absent is not None:
        client = built.assembly.clients[absent]
        client._clipped = lambda contribution, clip_norm: Client._clipped(  # type: ignore[method-assign]
            client, contribution * 0.0, clip_norm
        )
    cohort = server.draw(state.round)
    intake = server.gather(cohort, asked, server.layout(state, "change"), built.assembly.transport)
    return dict(intake.total.total().dense().parts())


@pytest.mark.parametrize("how", chosen([{}, MASKED, SHARES], [{}, SHARES]), ids=["open", "masked", "shares"])
def test_without_its_data_a_client_moves_its_own_rounds_by_the_clip_norm_and_no_other(how: Mapping[str, Any]) -> None:
    """The sums go through training, clipping, codec, packing and masks, from equal states. Shares of noise are seeded."""
    asked_for = {**IN_TURN, **how}
    whole, less = federation(asked_for, 3, sizes=TWELVE), federation(asked_for, 3, sizes=TWELVE)
    if whole.assembly.masks is not None:
        for built in (whole, less):
            built.assembly.masks.begin(None)  # type: ignore[union-attr]
            for member in built.assembly.masks.clients:  # type: ignore[union-attr]
                member._entropy = built.assembly.protection.entropy
    state, moved = whole.assembly.initial, []
    for turn in range(6):
        with_it, without = totals(whole, state, None), totals(less, state, 4)
        moved.append(math.sqrt(sum(float((with_it[name] - without[name]).square().sum()) for name in with_it)))
        state = replace(state, round=turn + 1)
    own = [order_of(whole).has_turn(4, turn) for turn in range(6)]
    bound, shares = CLIP, whole.assembly.protection.shares
    if shares is not None:  # contributions are rounded to a grid; the noise is for their longer norm
        grid = shares.grid(sum(part.numel() for part in with_it.values()))
        bound *= grid.bound / grid.unit
    assert [0 < far <= bound for far in moved] == own
    assert all(far == 0.0 for far, mine in zip(moved, own, strict=True) if not mine)


def test_what_a_round_sends_tells_nothing_of_what_clients_trained() -> None:
    """A client whose training diverged sends zeros, which have the same size in the record as any other factors."""
    asked_for = {**IN_TURN, "method.name": "fra_lora", "federation.rounds": 2}
    train = [toys.examples(client + 1, size) for client, size in enumerate(SIZES)]
    bad = [
        [{**one, "x": one["x"] * math.nan} for one in own] if client == 4 else own for client, own in enumerate(train)
    ]
    records = [toys.without_time(toys.federation(asked_for, train=given_).run().records) for given_ in (train, bad)]
    public = ("cohort", "bytes_up", "bytes_down", "rejected")
    assert [[record[name] for name in public] for record in records[0]] == [
        [record[name] for name in public] for record in records[1]
    ]


# Refusals and plans.


@pytest.mark.parametrize(
    ("settings", "about"),
    [
        ({"federation.sampling": "poisson"}, "federation.sampling"),
        ({"privacy.noise": "distributed", **MASKED}, "privacy.noise"),
        ({"privacy.noise": "local"}, "privacy.noise"),
        ({**SHARES, "privacy.hidden_cohort": True}, "federation.sampling"),
        ({"privacy.clip_quantile": 0.5}, "privacy.clip_quantile"),
        ({"method.name": "fra_lora", "method.transport_form": "sketch", "method.sketch": 1}, "method.transport_form"),
    ],
)
def test_correlated_noise_is_refused_where_it_cannot_be_taken_back(settings: dict[str, Any], about: str) -> None:
    with refused(ConfigError, about):
        federation({**BANDED, **settings})


def test_a_mechanism_of_ones_own_is_refused() -> None:
    with refused(ConfigError):
        federation(IN_TURN, mechanism=Gaussian)


@pytest.mark.parametrize(
    "settings",
    [
        {"evaluation.audit_fraction": 0.5},
        {  # in this order some round has two clients, who survive often enough, and no client joins a sum of two
            **{"evaluation.audit_fraction": 0.6, "federation.cohort": 3, "federation.seed": 2},
            "secure_aggregation.dropout": 0.4,
        },
    ],
    ids=["held out", "two left"],
)
def test_an_order_with_rounds_too_empty_for_masks_is_refused_at_the_start(settings: dict[str, Any]) -> None:
    with refused(ConfigError):
        federation({**IN_TURN, **MASKED, **settings}, sizes=[2] * 24)


@pytest.mark.parametrize(("rounds", "fits"), [(6, 3), (3, 3)])
def test_a_cut_plan_costs_what_its_rounds_expose(rounds: int, fits: int) -> None:
    """A client has two turns in six rounds, and one in the first three. An exposure of one costs epsilon 3.1."""
    asked_for = {**BANDED, "privacy.epsilon": 3.2, "privacy.on_exhausted": "stop", "federation.rounds": rounds}
    plan = federation(asked_for).assembly.protection.plan
    assert plan is not None
    assert plan.releases == fits
    assert plan.epsilon() <= 3.2
    if rounds > fits:
        with refused(BudgetExhausted):
            federation({**asked_for, "privacy.on_exhausted": "refuse"})


@pytest.mark.parametrize(("composition", "fits"), chosen([("basic", 4), ("rdp", 3)], [("rdp", 3)]))
def test_a_shared_ledger_with_room_for_fewer_rounds_shortens_a_correlated_run(
    tmp_path: Path, composition: Any, fits: int
) -> None:
    """The fourth round begins the second turns: it exposes the first number of a second column."""
    Ledger.create(tmp_path / "l.sqlite", data_set="d", epsilon=4.5, delta=1e-3, composition=composition)
    asked_for = {**BANDED, "privacy.ledger": str(tmp_path / "l.sqlite"), "privacy.on_exhausted": "stop"}
    said = federation(asked_for).run(tmp_path / "run").summary
    assert said["rounds"] == said["releases"] == fits
    exposure = square_root(3).exposures(6, 3, 2)[fits]
    assert exposure == pytest.approx(1 + square_root(3).column[0] ** 2 * (fits == 4))
    assert said["epsilon"] == pytest.approx(get_epsilon_gaussian(1 / math.sqrt(exposure), 1e-3))
    assert said["epsilon"] <= said["epsilon_cumulative"] <= 4.5
    with refused(BudgetExhausted):
        federation(asked_for).run(tmp_path / "another")


def test_a_setting_makes_the_order() -> None:
    sampler = cohort_sampler(toys.config({"federation.sampling": "schedule", "federation.cohort": 3}), 9, [2, 4])
    assert sampler == PublicOrder(9, 3, (2, 4), 0)
