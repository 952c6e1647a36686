"""Gradients, steps and their cosines, compared with plain autograd.

Under a public order an attack uses a unit's own turns, and removes correlated noise around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attacks import canary_cosine
from attacks.adversary import steps
from attacks.adversary.case import Case, Settings
from attacks.adversary.null import Floats, refuted
from attacks.adversary.steps import releases, weights_of
from attacks.evidence import figures
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.tensors.tensors import Tensors
from tests.attacks import canaried, overfitted
from tests.cells import chosen
from tests.contracts import runs
from tests.secure_fed.example_gradients import losses_at


@pytest.fixture(scope="module")
def fellow() -> Case:
    return overfitted.case(overfitted.learned(), "fellow_client")


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
