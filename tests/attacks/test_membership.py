"""Membership from losses, from steps explained by gradients, and from single updates.

Gradients, steps and their cosines are compared with plain autograd. Under a public order an attack uses a unit's own turns, and
removes correlated noise around them.
"""

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

from attacks import canary_cosine, loss, regression, round_losses, update_score
from attacks.adversary import steps
from attacks.adversary.case import Case, Inapplicable, Settings, seen
from attacks.adversary.null import Floats, refuted
from attacks.adversary.steps import releases, spaced, weights_of
from attacks.evidence import figures
from attacks.regression import RIDGE, Sketch, needed
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.runs.recording import Update
from secure_fed.tensors.tensors import Tensors
from tests.attacks import canaried, overfitted
from tests.cells import chosen
from tests.contracts import runs
from tests.golden import refused
from tests.secure_fed.example_gradients import losses_at


@pytest.fixture(scope="module")
def outsider() -> Case:
    """Without a recording, and without references."""
    built, final, _ = overfitted.learned()
    return Case(built.assembly, seen("outsider", final, None), canaried.never)


@pytest.fixture(scope="module")
def fellow() -> Case:
    return overfitted.case(overfitted.learned(), "fellow_client")


@pytest.fixture(scope="module")
def server() -> Case:
    return overfitted.case(overfitted.learned(), "server")


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
    for attack, case in ((loss, outsider), (round_losses, fellow), (regression, fellow)):
        found = attack.run(case, Settings())
        assert overfitted.area(found.scores, members) > 0.8
        assert abs(overfitted.area_of_shuffled(found.scores, members) - 0.5) < 0.03
    assert found.measured == {"rounds": 10, "units_without": 0}
    untrained = outsider.unit_confidences(outsider.assembly.initial.tensors)
    assert abs(overfitted.area(untrained, members) - 0.5) < 0.17  # more than two standard errors of 40 against 40


def test_rounds_are_spaced_evenly_and_refused_where_none_were_seen(outsider: Case, fellow: Case) -> None:
    assert spaced(list(range(10)), None) == list(range(10))
    assert spaced(list(range(10)), 4) == [0, 3, 6, 9]
    assert spaced([4, 5], 4) == [4, 5]
    assert spaced([4, 5, 6], 1) == [4]
    for attack in (round_losses, regression):
        assert attack.run(fellow, Settings(max_rounds=3)).measured["rounds"] == 3
        with refused(Inapplicable):
            attack.run(outsider, Settings())


# Steps explained by gradients.


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
def test_a_sketch_finds_it_too(server: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "_NUMBERS", 180 * 400)
    found = regression.run(server, Settings()).scores
    assert overfitted.area(found, server.assembly.audit_pool.members) > 0.7


# Single updates (FedMIA).


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


@pytest.mark.parametrize("attack", [regression, update_score])
def test_updates_credited_to_other_clients_tell_nothing(attack: Any, server: Case) -> None:
    """The first round, whose start knows nobody; everybody's updates in the name of the client before it."""
    members, names = server.assembly.audit_pool.members, list(server.assembly.audit_pool.names)
    turned = [replace(one, client=names[names.index(one.client) - 1]) for one in server.seen.updates]
    right, wrong = (attack.run(of, Settings(max_rounds=1)) for of in (server, with_updates(server, turned)))
    assert overfitted.area(right.scores, members) > 0.75
    assert overfitted.area(wrong.scores, members) < 0.67  # 2.6 deviations of 40 against 40


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


# Gradients and steps.


def naive_cosine(
    federation: Federation, before: Tensors, examples: Sequence[Any], direction: Tensors, names: Sequence[str]
) -> float:
    """The cosine from the gradient of the mean loss of all these examples in one batch."""
    leaves = {name: before.tensor(name).clone().requires_grad_() for name in before}
    federation.assembly.objective.eval()
    batch = federation.assembly.problem.collate(list(examples))
    gradient = torch.autograd.grad(
        losses_at(federation.assembly.objective, leaves, batch).mean(),
        [leaves[name] for name in names],
        materialize_grads=True,
        allow_unused=True,
    )
    g = torch.cat([one.double().reshape(-1) for one in gradient])
    d = torch.cat([direction.tensor(name).double().reshape(-1) for name in names])
    return float(-g @ d / (g.norm() * d.norm()))


@pytest.mark.nightly
@pytest.mark.parametrize("method", chosen(["fedlora", "ffa_lora", "fra_lora"], ["fra_lora"]))
def test_a_cosine_is_that_of_the_gradient_of_a_units_mean_loss(method: str) -> None:
    """On a transformer, for units of one, two and five texts of different lengths; batches contain whole units."""
    federation = runs.federation(runs.settings(method))
    before = federation.assembly.initial.tensors
    generator = torch.Generator().manual_seed(0)
    before = Tensors(
        (name, before.tensor(name) + 0.05 * torch.randn(before[name].shape, generator=generator)) for name in before
    )
    names = steps.trained_names(federation.assembly, before, 0)
    direction = Tensors((name, torch.randn(before[name].shape, generator=generator)) for name in names)
    examples = [federation.assembly.problem.test[i] for i in range(8)]
    owner = np.array([0, 1, 1, 2, 2, 2, 2, 2])
    found = steps.cosines(federation.assembly, before, 0, examples, owner, [direction, direction * -2.0])
    for unit in range(3):
        own = [examples[i] for i in np.flatnonzero(owner == unit)]
        expected = naive_cosine(federation, before, own, direction, names)
        assert found[unit] == pytest.approx([expected, -expected], abs=1e-4)


def test_a_step_is_the_change_of_what_trained(monkeypatch: pytest.MonkeyPatch, fellow: Case) -> None:
    """Small batches give the same cosines with it, and a cosine with nothing is zero."""
    states, federation = fellow.seen.states, fellow.assembly
    step = steps.of_states(federation, states[0], states[1], 0)
    names = federation.method.plan(federation.initial).trainable
    assert list(step) == sorted(names)
    for name in names:
        assert torch.equal(step.tensor(name), states[1].tensor(name) - states[0].tensor(name))
    nothing = steps.of_states(federation, states[0], states[0], 0)
    whole = steps.cosines(federation, states[0], 0, *fellow.looked_at, [step, nothing])
    assert whole[:, 0].all()
    assert not whole[:, 1].any()
    monkeypatch.setattr(steps, "_EXAMPLES", 3)
    parts = steps.cosines(federation, states[0], 0, *fellow.looked_at, [step, nothing])
    assert parts == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("method", ["fra_lora", "fedsvd"])
def test_a_step_does_not_go_by_how_products_are_split(method: str) -> None:
    """B A = (B R) (R^-1 A): the same models, the same scores; a difference of factors would see a large step in the split."""
    federation = runs.federation(runs.settings(method))
    generator = torch.Generator().manual_seed(0)
    start = federation.assembly.initial.tensors
    before, after = (
        Tensors((name, torch.randn(tensor.shape, generator=generator)) for name, tensor in start.items())
        for _ in range(2)
    )
    rank = before[pairs(before)[0].a].shape[0]
    turned = dict(after)
    mixed = torch.randn(rank, rank, generator=generator).double() + 3 * torch.eye(rank).double()
    for pair in pairs(after):
        turned[pair.a] = (torch.linalg.inv(mixed) @ after.tensor(pair.a).double()).float()
        turned[pair.b] = (after.tensor(pair.b).double() @ mixed).float()
    one, other = (steps.of_states(federation.assembly, before, end, 0) for end in (after, Tensors(turned)))
    for name in one:
        torch.testing.assert_close(
            one.tensor(name), other.tensor(name), rtol=1e-3, atol=1e-3 * float(one.tensor(name).abs().max())
        )


@pytest.mark.parametrize(("method", "scale"), [("fra_lora", 2.0), ("federa", 1.0)])
def test_a_pulled_back_product_is_its_inner_product_with_any_small_step(method: str, scale: float) -> None:
    """<J v, D> by a difference of two products, against <v, d>. FeDeRA's scale does not follow from alpha."""
    rule = {"method.rule": "fra_lora"} if method == "federa" else {}
    federation = runs.federation(runs.settings(method, **rule, **{"method.rank": 8}))
    generator = torch.Generator().manual_seed(1)

    def normal(like: Tensors) -> Tensors:
        return Tensors((name, torch.randn(like[name].shape, generator=generator).double()) for name in like)

    before, after, v = (normal(federation.assembly.initial.tensors) for _ in range(3))
    step = steps.of_states(federation.assembly, before, after, 0)
    expected = sum(float((step.tensor(n) * v.tensor(n)).sum()) for n in before)
    found = 0.0
    adapted = set()
    for pair in pairs(before):
        product = [scale * side.tensor(pair.b) @ side.tensor(pair.a) for side in (before, after, before + v * 1e-6)]
        found += float(((product[1] - product[0]) * (product[2] - product[0])).sum()) / 1e-6
        adapted |= {pair.a, pair.b}
    for name in set(before) - adapted:
        found += float(((after.tensor(name) - before.tensor(name)) * v.tensor(name)).sum())
    assert expected == pytest.approx(found, rel=1e-4)


TURNS: dict[str, Any] = {
    **canaried.CLIENTS,
    "federation.sampling": "schedule",
    "federation.cohort": 20,
    "federation.rounds": 6,
    "privacy.noise": "central",
    "privacy.correlation": "none",
    "privacy.noise_multiplier": 0.6,
}


def case_of(**settings: Any) -> Case:
    return canaried.case({**TURNS, **settings}, canaried.MANY_CLIENTS)[0]


def turns_by_hand(case: Case) -> Floats:
    """(rounds, units) of the members whom the server draws; a client that was held out has one of the turns that are left."""
    server = case.assembly.server
    drawn = [{server.names[i] for i in server.draw(round_)} for round_ in range(6)]
    return np.array([[float(unit.name in names) for unit in case.units] for names in drawn])


def test_a_unit_is_looked_for_in_its_own_turns() -> None:
    case = case_of()
    seen, weights, turns = releases(case, ""), weights_of(case), turns_by_hand(case)
    assert [release.round for release in seen] == list(range(6))
    found = np.array([weights(unit, seen) for unit in case.units])
    members = case.assembly.audit_pool.members
    np.testing.assert_array_equal(found[members], turns.T[members])
    assert not turns.T[~members].any()
    np.testing.assert_array_equal(found.sum(axis=0), np.full(6, 20.0))  # all 120 have their turn, present or not
    np.testing.assert_array_equal(found.sum(axis=1), np.ones(120))


def test_correlated_noise_is_undone_around_a_turn() -> None:
    case = case_of(**{"privacy.correlation": "banded"})
    plan: Any = case.assembly.protection.plan
    assert plan.correlation.band > 1
    seen, turns = releases(case, ""), turns_by_hand(case)
    column = np.pad(plan.correlation.column, (0, 6))[:6]
    c = np.array([[column[i - j] if i >= j else 0.0 for j in range(6)] for i in range(6)])
    lengths = np.array([release.length for release in seen])
    members = [number for number, there in enumerate(case.assembly.audit_pool.members) if there][:10]
    for unit, own in [(case.units[number], turns[:, number]) for number in members]:
        expected = c.T @ c @ own * lengths
        np.testing.assert_allclose(weights_of(case)(unit, seen), expected / np.abs(expected).max())


def test_the_estimate_is_that_of_one_gaussian() -> None:
    """The shift of a score is at most 1 / z: the other clients' part of a release takes some of it."""
    case = case_of()
    found: Any = canary_cosine.run(case, Settings())
    assert not refuted(found.null.tails[~case.assembly.audit_pool.members])
    told = figures.judged(found, case.assembly.audit_pool.members, delta=1e-3, significance=0.05, seed=0, releases=6)
    estimate: Any = {one.name: one for one in told.estimates}["sampled_gaussian"]
    accounted = 5.98  # of a Gaussian with z = 0.6 at delta 1e-3
    assert 0.3 * accounted < estimate.point
    assert estimate.epsilon < accounted


def test_who_never_had_a_turn_is_scored_by_all_rounds() -> None:
    """As is everybody from the final model alone: no round is told from another."""
    case = case_of(**{"federation.rounds": 3})
    seen, weights = releases(case, ""), weights_of(case)
    found = np.array([weights(unit, seen) for unit in case.units])
    assert sorted(found.sum(axis=1)) == [1.0] * 60 + [3.0] * 60
    final = replace(case, seen=replace(case.seen, states={}))
    np.testing.assert_array_equal(weights_of(final)(final.units[0], releases(final, "")), [1.0])
