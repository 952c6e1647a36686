"""Membership from losses, from steps explained by gradients, and from single updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from attacks import loss, regression, round_losses, update_score
from attacks.adversary import steps
from attacks.adversary.case import Case, Inapplicable, Seen, Settings, seen
from attacks.adversary.steps import spaced
from attacks.regression import RIDGE, Sketch, needed
from secure_fed.federation import Federation
from secure_fed.runs.recording import Recorded, Update
from secure_fed.tensors.tensors import Tensors
from tests.attacks import canaried, overfitted
from tests.cells import chosen
from tests.golden import refused


@pytest.fixture(scope="module")
def outsider() -> Case:
    """Without a recording, and without references."""
    built, final, _ = overfitted.learned()
    return Case(built.assembly, seen("outsider", final, None), canaried.never)


@pytest.fixture(scope="module")
def fellow() -> Case:
    return overfitted.case(overfitted.learned(), "fellow_client")


def test_a_score_is_the_log_odds_of_the_right_label(outsider: Case) -> None:
    model = outsider.assembly.objective.load(outsider.seen.final).eval()
    found = loss.run(outsider, Settings()).scores
    assert found is not None
    for unit, score in zip(outsider.units, found, strict=True):
        (example,) = unit.examples
        with torch.no_grad():
            p = torch.softmax(model(example["x"][None]).double(), 1)[0, example["labels"]]
        assert score == pytest.approx(float(torch.log(p / (1 - p))), abs=1e-5)


def test_a_trajectory_counts_rounds_by_how_far_above_the_population() -> None:
    phi = np.array([[1.0, 2.0], [10.0, 70.0]])
    population = np.array([[0.0, 2.0], [20.0, 60.0]])  # means 1 and 40, deviations 1 and 20
    assert round_losses.trajectory(phi, population) == pytest.approx([(0 - 1.5) / 2, (1 + 1.5) / 2])
    assert not round_losses.trajectory(phi, np.ones((2, 2))).any()


def test_what_was_learned_by_heart_is_found_and_the_sign_is_right(outsider: Case, fellow: Case) -> None:
    """At chance before training and under shuffled truth."""
    members = outsider.assembly.audit_pool.members
    for attack, case in ((loss, outsider), (round_losses, fellow)):
        found = attack.run(case, Settings()).scores
        assert overfitted.area(found, members) > 0.8
        assert abs(overfitted.area_of_shuffled(found, members) - 0.5) < 0.03
    untrained = outsider.unit_confidences(outsider.assembly.initial.tensors)
    assert abs(overfitted.area(untrained, members) - 0.5) < 0.17  # more than two standard errors of 40 against 40


def test_rounds_are_spaced_evenly_and_refused_where_none_were_seen(outsider: Case, fellow: Case) -> None:
    assert spaced(list(range(10)), None) == list(range(10))
    assert spaced(list(range(10)), 4) == [0, 3, 6, 9]
    assert spaced([4, 5], 4) == [4, 5]
    assert spaced([4, 5, 6], 1) == [4]
    assert round_losses.run(fellow, Settings(max_rounds=3)).measured["rounds"] == 3
    with refused(Inapplicable):
        round_losses.run(outsider, Settings())


# Steps explained by gradients.


Ran = tuple[Federation, Tensors, Recorded]


@pytest.fixture(scope="module")
def ran() -> Ran:
    return overfitted.learned()


def alike(count: int, size: int, shared: int, seed: int) -> Tensor:
    """Gradients that lie mostly in a few common directions."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(shared, size, generator=torch.Generator().manual_seed(0))
    mixture = 0.5 * torch.randn(count, shared, generator=generator)
    return mixture @ common + torch.randn(count, size, generator=generator)


def test_coefficients_are_those_of_ridge_regression() -> None:
    """As least squares with RIDGE m added to the data, solved by numpy."""
    rows, steps = alike(7, 12, 3, 1).double(), alike(2, 12, 3, 2).double()
    x = -(rows / rows.norm(dim=1, keepdim=True)).numpy()
    d = (steps / steps.norm(dim=1, keepdim=True)).numpy()
    penalty = np.sqrt(RIDGE * np.mean(np.sum(x * x, axis=1)))
    extended = np.vstack([x.T, penalty * np.eye(7)])
    expected = np.linalg.lstsq(extended, np.vstack([d.T, np.zeros((7, 2))]), rcond=None)[0]
    np.testing.assert_allclose(needed(rows, steps), expected, atol=1e-10)


def test_a_gradient_or_a_step_of_zero_is_no_number_out_of_nothing() -> None:
    rows = alike(5, 9, 2, 1)
    rows[2] = 0.0
    found = needed(rows, torch.stack([alike(1, 9, 2, 3)[0], torch.zeros(9)]))
    assert np.isfinite(found).all()
    assert found[2, 0] == 0
    assert not found[:, 1].any()


def test_a_sketch_keeps_inner_products() -> None:
    vectors = alike(20, 20_000, 5, 1)
    same = Sketch(20_000, 30_000)
    assert torch.equal(same(vectors), vectors)
    sketch = Sketch(20_000, 4_000)
    short = sketch(vectors)
    assert short.shape == (20, 4_000)
    lengths = vectors.norm(dim=1)
    off = ((short @ short.T - vectors @ vectors.T) / (lengths[:, None] * lengths)).abs()
    assert float(off.max()) < 6 / np.sqrt(4_000)  # six standard deviations of one


@pytest.mark.parametrize("vantage", chosen(["fellow_client", "secure_server", "server"], ["fellow_client"]))
def test_steps_give_members_away_and_the_sign_is_right(ran: Ran, vantage: str) -> None:
    members = ran[0].assembly.audit_pool.members
    found = regression.run(overfitted.case(ran, vantage), Settings())
    assert overfitted.area(found.scores, members) > 0.8
    assert abs(overfitted.area_of_shuffled(found.scores, members) - 0.5) < 0.03
    assert found.measured == {"rounds": 10, "units_without": 0}


def test_updates_credited_to_other_clients_tell_nothing(ran: Ran) -> None:
    """The first round, whose start knows nobody; everybody's updates in the name of the client before it."""
    case, members, first = overfitted.case(ran, "server"), ran[0].assembly.audit_pool.members, Settings(max_rounds=1)
    names = list(ran[0].assembly.problem.names)
    turned = [replace(one, client=names[names.index(one.client) - 1]) for one in case.seen.updates]
    wrong = replace(case, seen=replace(case.seen, updates=turned))
    assert overfitted.area(regression.run(case, first).scores, members) > 0.8
    assert overfitted.area(regression.run(wrong, first).scores, members) < 0.67  # 2.6 deviations of 40 against 40


SENT: list[dict[str, Any]] = [
    {"method.name": "fedsvd"},
    {"method.name": "fra_lora", "method.transport_form": "sketch", "method.sketch": 6},
    {"method.name": "fedpower"},
    {"federation.cohort": 3},
]


@pytest.mark.nightly
@pytest.mark.parametrize("settings", SENT)
def test_whatever_clients_send_is_compared_as_what_trains(tmp_path: Path, settings: dict[str, Any]) -> None:
    """By steps explained by gradients, and by single updates."""
    usual = {"federation.rounds": 12, "training.lr": 0.2, "method.rank": 4}
    ran = overfitted.run(tmp_path / "run", usual | settings, each=20)
    members = ran[0].assembly.audit_pool.members
    for vantage in ("fellow_client", "secure_server", "server"):
        assert overfitted.area(regression.run(overfitted.case(ran, vantage), Settings()).scores, members) > 0.65
    assert overfitted.area(update_score.run(overfitted.case(ran, "server"), Settings()).scores, members) > 0.65


@pytest.mark.nightly
def test_a_sketch_finds_it_too(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "_NUMBERS", 180 * 400)
    found = regression.run(overfitted.case(ran, "server"), Settings()).scores
    assert overfitted.area(found, ran[0].assembly.audit_pool.members) > 0.7


def test_rounds_are_spaced_and_refused_where_none_were_kept(ran: Ran) -> None:
    case = overfitted.case(ran, "fellow_client")
    assert regression.run(case, Settings(max_rounds=3)).measured["rounds"] == 3
    outsider = Case(case.assembly, Seen("outsider", case.seen.final), case.references)
    with refused(Inapplicable):
        regression.run(outsider, Settings())


# Single updates (FedMIA).


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Case:
    ran = overfitted.run(tmp_path_factory.mktemp("updates") / "run")
    return overfitted.case(ran, "server")


def with_updates(server: Case, updates: Sequence[Update]) -> Case:
    return replace(server, seen=replace(server.seen, sums=(), updates=updates))


def test_one_sided_is_students_law_of_a_further_draw() -> None:
    """With many others it is the published law, and others that do not differ say nothing."""
    rng = np.random.default_rng(0)
    own, others = rng.normal(size=20), rng.normal(2, 3, (20, 6))
    found = update_score.one_sided(own, others)
    for unit in range(20):
        mean, spread = others[unit].mean(), np.std(others[unit], ddof=1) * np.sqrt(1 + 1 / 6)
        assert found[unit] == pytest.approx(stats.t.cdf((own[unit] - mean) / spread, 5), abs=1e-12)
    many = rng.normal(0.3, 0.7, (20, 20_000))
    expected = stats.norm.cdf(own, many.mean(1), many.std(1, ddof=1))
    assert update_score.one_sided(own, many) == pytest.approx(expected, abs=1e-4)
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


def test_credited_to_the_wrong_clients_it_is_at_chance(server: Case) -> None:
    """Were a unit compared with another client's update, members would be as likely as anybody to stand out."""
    names = list(server.assembly.audit_pool.names)
    turned = [replace(one, client=names[names.index(one.client) - 1]) for one in server.seen.updates]
    right, wrong = (update_score.run(of, Settings()) for of in (server, with_updates(server, turned)))
    assert overfitted.area(right.scores, server.assembly.audit_pool.members) > 0.75
    assert right.measured == {"rounds": 6, "rounds_of_a_unit": 6.0, "units_without": 0}
    assert overfitted.area(wrong.scores, server.assembly.audit_pool.members) < 0.62


def test_a_change_as_it_is_is_its_own_pull_back(server: Case) -> None:
    one = server.seen.updates[0]
    before = server.seen.states[one.round]
    found = steps.of_contribution(server.assembly, before, one.round, one.pass_name, one.contribution, {})
    for name in one.contribution:
        torch.testing.assert_close(found.tensor(name), one.contribution.tensor(name))


def test_a_product_in_factors_or_formed_is_pulled_back_to_the_same(tmp_path: Path) -> None:
    settings = {"method.name": "fra_lora", "federation.rounds": 2}
    built, _, recorded = overfitted.run(tmp_path / "run", settings, clients=3, each=10)
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
    own = {"privacy.unit": "client", "privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3, "federation.rounds": 1}
    ran = overfitted.run(tmp_path / "run", own, clients=6, each=6)
    with refused(Inapplicable):
        update_score.run(overfitted.case(ran, "server"), Settings())
    assert {update.client for update in ran[2].updates} <= set(ran[0].assembly.problem.names)


def test_rounds_are_spaced_and_without_updates_to_compare_it_is_refused(server: Case) -> None:
    """From rounds of two clients, from none, and from updates of no weight."""
    assert update_score.run(server, Settings(max_rounds=4)).measured["rounds"] == 4
    few = [one for one in server.seen.updates if one.client in list(server.assembly.audit_pool.names)[:2]]
    for updates in (few, [], [replace(one, weight=0.0) for one in server.seen.updates]):
        with refused(Inapplicable):
            update_score.run(with_updates(server, updates), Settings())
