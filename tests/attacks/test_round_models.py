"""The matched filter over rounds: its gradients and steps against plain autograd, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks import alignment, round_models
from attacks.case import Case, Inapplicable, Settings
from secure_fed.adapters.lora import LoraAdapter, pairs
from secure_fed.federation import Federation
from secure_fed.tensors import Tensors
from tests.attacks import overfitted
from tests.contracts import runs

LEARNS = {"federation.rounds": 15, "method.rank": 8}


@pytest.fixture(scope="module")
def fellow(tmp_path_factory: pytest.TempPathFactory) -> Case:
    ran = overfitted.run(tmp_path_factory.mktemp("rounds") / "run", LEARNS, clients=4, each=20)
    return overfitted.case(ran, "fellow_client")


def naive_cosine(
    federation: Federation, before: Tensors, examples: Sequence[Any], direction: Tensors, names: Sequence[str]
) -> float:
    """By the gradient of the mean loss of all these examples in one batch."""
    leaves = {name: before.tensor(name).clone().requires_grad_() for name in before}
    federation.objective.eval()
    batch = federation.parts.collate(list(examples))
    gradient = torch.autograd.grad(
        federation.objective.losses(leaves, batch).mean(),
        [leaves[name] for name in names],
        materialize_grads=True,
        allow_unused=True,
    )
    g = torch.cat([one.double().reshape(-1) for one in gradient])
    d = torch.cat([direction.tensor(name).double().reshape(-1) for name in names])
    return float(-g @ d / (g.norm() * d.norm()))


@pytest.mark.parametrize("method", ["fedlora", "ffa_lora", "fra_lora"])
def test_a_cosine_is_that_of_the_gradient_of_a_units_mean_loss(method: str) -> None:
    """On a transformer, of units of one, two and five texts of different lengths; batches are cut by units."""
    federation = runs.federation(runs.settings(method))
    before = federation.initial.tensors
    generator = torch.Generator().manual_seed(0)
    before = Tensors(
        (name, before.tensor(name) + 0.05 * torch.randn(before[name].shape, generator=generator)) for name in before
    )
    names = alignment.trained_names(federation, before, 0)
    direction = Tensors((name, torch.randn(before[name].shape, generator=generator)) for name in names)
    examples = [federation.parts.test[i] for i in range(8)]
    owner = np.array([0, 1, 1, 2, 2, 2, 2, 2])
    found = alignment.cosines(federation, before, 0, examples, owner, [direction, direction * -2.0])
    for unit in range(3):
        own = [examples[i] for i in np.flatnonzero(owner == unit)]
        expected = naive_cosine(federation, before, own, direction, names)
        assert found[unit] == pytest.approx([expected, -expected], abs=1e-4)


def test_small_batches_give_the_same(monkeypatch: pytest.MonkeyPatch, fellow: Case) -> None:
    states = fellow.seen.states
    step = alignment.of_states(fellow.federation, states[3], states[4], 3)
    examples, owner = fellow.looked_at
    whole = alignment.cosines(fellow.federation, states[3], 3, examples, owner, [step])
    monkeypatch.setattr(alignment, "_EXAMPLES", 3)
    assert alignment.cosines(fellow.federation, states[3], 3, examples, owner, [step]) == pytest.approx(whole, abs=1e-5)


def test_the_step_of_a_method_that_averages_is_the_change_of_what_trained(fellow: Case) -> None:
    states, federation = fellow.seen.states, fellow.federation
    step = alignment.of_states(federation, states[0], states[1], 0)
    names = federation.method.plan(federation.initial).trainable
    assert list(step) == sorted(names)
    for name in names:
        assert torch.equal(step.tensor(name), states[1].tensor(name) - states[0].tensor(name))


@pytest.mark.parametrize("method", ["fra_lora", "fedsvd"])
def test_a_step_does_not_go_by_how_products_are_split(method: str) -> None:
    """B A = (B R) (R^-1 A): the same models, the same scores; a difference of factors would see a large step in the split."""
    federation = runs.federation(runs.settings(method))
    generator = torch.Generator().manual_seed(0)
    before, after = (
        Tensors((name, torch.randn(tensor.shape, generator=generator)) for name, tensor in start.items())
        for start in (federation.initial.tensors, federation.initial.tensors)
    )
    rank = before[pairs(before)[0].a].shape[0]
    turned = dict(after)
    mixed = torch.randn(rank, rank, generator=generator).double() + 3 * torch.eye(rank).double()
    for pair in pairs(after):
        turned[pair.a] = (torch.linalg.inv(mixed) @ after.tensor(pair.a).double()).float()
        turned[pair.b] = (after.tensor(pair.b).double() @ mixed).float()
    one, other = (alignment.of_states(federation, before, end, 0) for end in (after, Tensors(turned)))
    for name in one:
        torch.testing.assert_close(
            one.tensor(name), other.tensor(name), rtol=1e-3, atol=1e-3 * float(one.tensor(name).abs().max())
        )


def test_a_pulled_back_product_is_its_inner_product_with_any_small_step() -> None:
    """<J v, D> by a difference of two products, against <v, d>."""
    federation = runs.federation(runs.settings("fra_lora"))
    generator = torch.Generator().manual_seed(1)

    def normal(like: Tensors) -> Tensors:
        return Tensors((name, torch.randn(like[name].shape, generator=generator).double()) for name in like)

    before, after, v = (normal(federation.initial.tensors) for _ in range(3))
    step = alignment.of_states(federation, before, after, 0)
    scale = LoraAdapter.of(federation.config.method).scaling
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


def test_what_was_learned_by_heart_is_found_and_the_sign_is_right(fellow: Case) -> None:
    members = fellow.federation.held.members
    for run in (round_models.run, round_models.run_losses):
        found = run(fellow, Settings())
        assert overfitted.area(found.scores, members) > 0.8
        assert abs(overfitted.area_of_shuffled(found.scores, members) - 0.5) < 0.03
        assert found.measured["rounds"] == 15


@pytest.mark.parametrize("method", ["fra_lora", "fedsvd", "fedpower"])
def test_other_ways_of_averaging_are_seen_through(tmp_path: Path, method: str) -> None:
    ran = overfitted.run(
        tmp_path / "run", {**LEARNS, "training.lr": 0.2, "method.name": method, "method.rank": 4}, clients=4, each=20
    )
    case = overfitted.case(ran, "fellow_client")
    assert overfitted.area(round_models.run(case, Settings()).scores, ran[0].held.members) > 0.65


def test_steps_that_have_nothing_to_do_with_the_unit_are_at_chance(fellow: Case) -> None:
    """The same states, their steps replaced by random ones."""
    generator = torch.Generator().manual_seed(0)
    states = fellow.seen.states
    examples, owner = fellow.looked_at
    noise = [
        Tensors((name, torch.randn(states[0][name].shape, generator=generator)) for name in states[0])
        for _ in range(15)
    ]
    found = [
        alignment.cosines(fellow.federation, states[t], t, examples, owner, [one])[:, 0] for t, one in enumerate(noise)
    ]
    area = overfitted.area(round_models.matched(np.stack(found)), fellow.federation.held.members)
    assert abs(area - 0.5) < 0.17  # more than two standard errors of 40 against 40


def test_a_cosine_with_nothing_is_zero(fellow: Case) -> None:
    states = fellow.seen.states
    nothing = alignment.of_states(fellow.federation, states[2], states[2], 2)
    examples, owner = fellow.looked_at
    assert not alignment.cosines(fellow.federation, states[2], 2, examples, owner, [nothing]).any()


def test_a_trajectory_counts_rounds_by_how_far_above_the_population() -> None:
    phi = np.array([[1.0, 2.0], [10.0, 70.0]])
    population = np.array([[0.0, 2.0], [20.0, 60.0]])  # means 1 and 40, deviations 1 and 20
    assert round_models.trajectory(phi, population) == pytest.approx([(0 - 1.5) / 2, (1 + 1.5) / 2])
    assert not round_models.trajectory(phi, np.ones((2, 2))).any()


def test_rounds_are_spaced_evenly(fellow: Case) -> None:
    assert round_models.spaced(list(range(10)), None) == list(range(10))
    assert round_models.spaced(list(range(10)), 4) == [0, 3, 6, 9]
    assert round_models.spaced([4, 5], 4) == [4, 5]
    assert round_models.spaced([4, 5, 6], 1) == [4]
    assert round_models.run(fellow, Settings(max_rounds=3)).measured["rounds"] == 3
    assert round_models.run_losses(fellow, Settings(max_rounds=3)).measured["rounds"] == 3


def test_who_saw_no_rounds_is_told_what_to_set(fellow: Case) -> None:
    outsider = Case(fellow.federation, type(fellow.seen)("outsider", fellow.seen.final), fellow.references)
    for run in (round_models.run, round_models.run_losses):
        with pytest.raises(Inapplicable, match=r"evaluation\.record"):
            run(outsider, Settings())
