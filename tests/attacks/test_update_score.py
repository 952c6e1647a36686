"""FedMIA: its law compared with scipy, uniformity without membership, and leaks in a federation's single updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from attacks import loss, update_score
from attacks.adversary import steps
from attacks.adversary.case import Case, Inapplicable, Settings
from secure_fed.tensors.tensors import Tensors
from tests.attacks import overfitted


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Case:
    ran = overfitted.run(tmp_path_factory.mktemp("updates") / "run")
    return overfitted.case(ran, "server")


def test_one_sided_is_students_law_of_a_further_draw() -> None:
    rng = np.random.default_rng(0)
    own, others = rng.normal(size=20), rng.normal(2, 3, (20, 6))
    found = update_score.one_sided(own, others)
    for unit in range(20):
        mean, spread = others[unit].mean(), np.std(others[unit], ddof=1) * np.sqrt(1 + 1 / 6)
        assert found[unit] == pytest.approx(stats.t.cdf((own[unit] - mean) / spread, 5), abs=1e-12)


@pytest.mark.parametrize("k", [2, 3, 9])
def test_without_membership_it_is_uniform_however_few_others_there_are(k: int) -> None:
    """The published normal law, with an estimated variance, is not: with two others it calls a fifth of units one in twenty."""
    draws = np.random.default_rng(k).normal(size=(20_000, k + 1))
    found = update_score.one_sided(draws[:, 0], draws[:, 1:])
    assert stats.kstest(found, "uniform").pvalue > 0.001
    normal = stats.norm.cdf((draws[:, 0] - draws[:, 1:].mean(1)) / draws[:, 1:].std(1, ddof=1))
    assert stats.kstest(normal, "uniform").pvalue < 0.001


def test_with_many_others_it_is_the_published_law() -> None:
    rng = np.random.default_rng(0)
    own, others = rng.normal(size=5), rng.normal(0.3, 0.7, (5, 20_000))
    expected = stats.norm.cdf(own, others.mean(1), others.std(1, ddof=1))
    assert update_score.one_sided(own, others) == pytest.approx(expected, abs=1e-4)


def test_others_that_do_not_differ_say_nothing() -> None:
    assert update_score.one_sided(np.array([3.0]), np.ones((1, 4))).tolist() == [0.5]


def test_scores_are_means_over_the_rounds_of_the_own_client() -> None:
    rng = np.random.default_rng(0)
    clients = ["a", "b", "a", "never"]
    first, second, pair = rng.normal(size=(4, 3)), rng.normal(size=(4, 4)), rng.normal(size=(4, 2))
    rounds = [(first, ["a", "c", "d"]), (second, ["b", "c", "a", "e"]), (pair, ["a", "b"])]
    found, count = update_score.of_rounds(rounds, clients)
    assert count.tolist() == [2, 1, 2, 0]  # the round of two clients has nothing to compare with

    def naive(row: np.ndarray, own: int) -> float:
        others = [float(value) for place, value in enumerate(row) if place != own]
        spread = np.std(others, ddof=1) * np.sqrt(1 + 1 / len(others))
        return float(stats.t.cdf((row[own] - np.mean(others)) / spread, len(others) - 1))

    assert found[0] == pytest.approx((naive(first[0], 0) + naive(second[0], 2)) / 2)
    assert found[1] == pytest.approx(naive(second[1], 0))
    assert found[2] == pytest.approx((naive(first[2], 0) + naive(second[2], 2)) / 2)
    assert found[3] == 0.5


def test_known_laws_reach_their_area() -> None:
    """Of 200 clients in one round, members' own cosines one standard deviation up: Phi(1 / sqrt 2)."""
    rng = np.random.default_rng(0)
    members, units = rng.random(3000) < 0.5, np.arange(3000)
    cosines = rng.normal(rng.normal(0, 5, (3000, 1)), 1, (3000, 200))
    names = [str(client) for client in range(200)]
    cosines[units, units % 200] += members
    found, _ = update_score.of_rounds([(cosines, names)], [names[unit % 200] for unit in units])
    assert overfitted.area(found, members) == pytest.approx(stats.norm.cdf(np.sqrt(0.5)), abs=0.025)
    assert abs(overfitted.area_of_shuffled(found, members) - 0.5) < 0.02


@pytest.mark.nightly
def test_members_of_a_federation_are_found_better_than_by_the_loss(server: Case) -> None:
    members = server.assembly.audit_pool.members
    found = update_score.run(server, Settings())
    area = overfitted.area(found.scores, members)
    assert area > 0.75
    assert overfitted.area(-np.asarray(found.scores), members) < 0.25
    assert area > overfitted.area(loss.run(server, Settings()).scores, members) + 0.08
    assert abs(overfitted.area_of_shuffled(found.scores, members) - 0.5) < 0.03
    assert found.measured == {"rounds": 6, "rounds_of_a_unit": 6.0, "units_without": 0}


def test_credited_to_the_wrong_clients_it_is_at_chance(server: Case) -> None:
    """Were a unit compared with another client's update, members would be as likely as anybody to stand out."""
    turned = [
        type(update)(update.round, _next(update.client, server), update.pass_name, update.contribution, update.weight)
        for update in server.seen.updates
    ]
    seen = type(server.seen)("server", server.seen.final, server.seen.states, (), turned)
    found = update_score.run(Case(server.assembly, seen, server.references), Settings())
    assert overfitted.area(found.scores, server.assembly.audit_pool.members) < 0.62


def _next(client: str, case: Case) -> str:
    names = list(case.assembly.audit_pool.names)
    return names[(names.index(client) + 1) % len(names)]


SENT: list[dict[str, Any]] = [
    {"method.name": "ffa_lora"},
    {"method.name": "fra_lora"},
    {"method.name": "fra_lora", "method.transport_form": "sketch", "method.sketch": 6},
    {"method.name": "fedpower"},
    {"federation.cohort": 3},
]


@pytest.mark.nightly
@pytest.mark.parametrize("settings", SENT)
def test_whatever_clients_send_is_compared_in_the_coordinates_that_train(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    ran = overfitted.run(tmp_path / "run", settings)
    found = update_score.run(overfitted.case(ran, "server"), Settings())
    assert overfitted.area(found.scores, ran[0].assembly.audit_pool.members) > 0.65


def test_a_change_as_it_is_is_its_own_pull_back(server: Case) -> None:
    update = server.seen.updates[0]
    before = server.seen.states[update.round]
    found = steps.of_contribution(server.assembly, before, update.round, update.pass_name, update.contribution, {})
    for name in update.contribution:
        torch.testing.assert_close(found.tensor(name), update.contribution.tensor(name))


def test_a_product_in_factors_or_formed_is_pulled_back_to_the_same(tmp_path: Path) -> None:
    built, _, recorded = overfitted.run(tmp_path / "run", {"method.name": "fra_lora"}, clients=3, each=10)
    update = recorded.updates[-1]
    before = recorded.states[update.round]
    one, other = (
        steps.of_contribution(built.assembly, before, update.round, update.pass_name, sent, {})
        for sent in (update.contribution, update.contribution.dense())
    )
    state = steps.of_states(built.assembly, before, before, update.round)
    assert list(one) == list(other) == list(state)
    for name in one:
        torch.testing.assert_close(one.tensor(name), other.tensor(name), rtol=1e-4, atol=1e-6)


def test_whole_clients_are_known_by_their_updates(tmp_path: Path) -> None:
    ran = overfitted.run(
        tmp_path / "run",
        {"privacy.unit": "client", "privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3, "federation.rounds": 2},
        clients=16,
        each=6,
    )
    case = overfitted.case(ran, "server")
    with pytest.raises(Inapplicable, match="needs no attack"):
        update_score.run(case, Settings())
    assert {update.client for update in ran[2].updates} <= set(ran[0].assembly.problem.names)


def test_rounds_of_two_clients_and_no_updates_are_refused(server: Case) -> None:
    few = [update for update in server.seen.updates if update.client in list(server.assembly.audit_pool.names)[:2]]
    for updates, said in ((few, "updates of 3 clients"), ([], r"evaluation\.record to 'updates'")):
        seen = type(server.seen)("server", server.seen.final, server.seen.states, (), updates)
        with pytest.raises(Inapplicable, match=said):
            update_score.run(Case(server.assembly, seen, server.references), Settings())


def test_rounds_are_spaced_and_updates_of_no_weight_left_out(server: Case) -> None:
    assert update_score.run(server, Settings(max_rounds=4)).measured["rounds"] == 4
    zero = [
        type(one)(one.round, one.client, one.pass_name, Tensors(one.contribution), 0.0) for one in server.seen.updates
    ]
    seen = type(server.seen)("server", server.seen.final, server.seen.states, (), zero)
    with pytest.raises(Inapplicable):
        update_score.run(Case(server.assembly, seen, server.references), Settings())
