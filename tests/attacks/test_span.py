"""The exact test: row spaces, their members, and reporting when the test does not apply."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks.texts.factor_changes import Sent, families
from attacks.texts.span import MEMBER_A, Family, FirstLayer, Found, Rows, SpanTest, rounding, row_space, search
from secure_fed.learning.models.adapters.lora import Pair
from secure_fed.tensors.tensors import LowRank, Tensors
from tests.cells import every

WIDTH, OUT, RANK, SCALE, VOCABULARY = 40, 30, 8, 2.0, 300
PAIRS = tuple(Pair(name, f"{name}.lora_A.default.weight", f"{name}.lora_B.default.weight") for name in ("q", "k", "v"))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


CANDIDATES = normal(VOCABULARY, WIDTH, seed=1)
KEYS = torch.stack([torch.zeros(VOCABULARY, dtype=torch.long), torch.arange(VOCABULARY)], 1)


def first() -> FirstLayer:
    return FirstLayer(torch.nn.Identity(), PAIRS, VOCABULARY, 1, True, ())


def state(b_scale: float = 1.0) -> Tensors:
    return Tensors(
        {
            **{pair.a: normal(RANK, WIDTH, seed=10 + n) / math.sqrt(WIDTH) for n, pair in enumerate(PAIRS)},
            **{pair.b: b_scale * normal(OUT, RANK, seed=20 + n) / 10 for n, pair in enumerate(PAIRS)},
        }
    )


def steps(before: Tensors, inputs: Tensor, lr: float = 0.1, seed: int = 0) -> Tensors:
    """One step of SGD on a made-up loss with gradients D at the outputs, by autograd and not by the formulas."""
    changes = {}
    for number, pair in enumerate(PAIRS):
        a = before.tensor(pair.a).clone().requires_grad_()
        b = before.tensor(pair.b).clone().requires_grad_()
        (SCALE * inputs @ a.T @ b.T * normal(len(inputs), OUT, seed=30 + number + seed)).sum().backward()
        changes |= {pair.a: -lr * a.grad, pair.b: -lr * b.grad}  # type: ignore[operator]
    return Tensors(changes)


def recovered(family: Family) -> set[int]:
    return {token for _, token in search([(KEYS, CANDIDATES)], [family])[0].certain()}


def by_name(sent: list[Sent]) -> dict[str, Family]:
    return {family.name: family for family in families(sent, first(), SCALE)}


@every("count", [1, 5, RANK, 3 * RANK - 1])
def test_every_input_and_no_other_is_in_the_rows_of_a(count: int) -> None:
    """Up to r inputs from one layer, and up to about 3 r from three that read the same."""
    found = by_name([Sent(steps(state(), CANDIDATES[:count]), state())])
    assert recovered(found["A"]) == set(range(count))


@pytest.mark.parametrize("count", [1, 4, RANK - 1])
def test_b_alone_shows_fewer_inputs_than_its_rank(count: int) -> None:
    before = state(b_scale=0.0)
    found = by_name([Sent(steps(before, CANDIDATES[:count]), before)])
    assert not found["A"].missing  # B is zero, so A has not moved
    assert recovered(found["B"]) == set(range(count))


@pytest.mark.parametrize("count", [RANK, RANK + 1, 20])
def test_b_says_nothing_of_as_many_inputs_as_its_rank(count: int) -> None:
    """In R^r every candidate would pass; the test reports none of them, whatever is stacked."""
    before = state(b_scale=0.0)
    sent = [Sent(steps(before, CANDIDATES[:count], seed=seed), before) for seed in (0, 100)]
    family = by_name(sent)["B"]
    assert family.vacuous
    assert recovered(family) == set()
    assert all(float(test.distances(CANDIDATES).max()) < 1e-6 for test in family.tests)  # they would have passed


def test_a_says_nothing_of_as_many_inputs_as_it_is_wide() -> None:
    rows = Rows(normal(WIDTH, WIDTH, seed=3), 1e-9)
    family = Family("A", (SpanTest(row_space([rows]), WIDTH, MEMBER_A),))
    assert family.vacuous
    assert recovered(family) == set()


def test_rounds_of_the_same_texts_span_more_of_them() -> None:
    """40 rows of which one round has 24: 30 inputs are out of reach of one round and within that of two."""
    count = 30
    one = [Sent(steps(state(), CANDIDATES[:count]), state())]
    two = [*one, Sent(steps(state(2.0), CANDIDATES[:count], seed=50), state(2.0))]
    assert not set(range(count)) <= recovered(by_name(one)["A"])
    assert recovered(by_name(two)["A"]) == set(range(count))


def test_sums_of_steps_and_clipping_leave_the_span() -> None:
    local = steps(state(), CANDIDATES[:6]) + steps(state(), CANDIDATES[4:10], seed=70)
    for sent in (local, local * 1e-3):
        assert recovered(by_name([Sent(sent, state())])["A"]) == set(range(10))


def test_adams_steps_leave_no_candidate() -> None:
    change = steps(state(), CANDIDATES[:5])
    signs = Tensors((name, change.tensor(name).sign() * 1e-3) for name in change)
    assert recovered(by_name([Sent(signs, state())])["A"]) == set()


def test_noise_as_large_as_the_change_leaves_nothing() -> None:
    change = steps(state(), CANDIDATES[:5])
    std = float(change.tensor(PAIRS[0].a).square().mean().sqrt())
    noised = Tensors(
        (n, change.tensor(n) + std * normal(*change.tensor(n).shape, seed=9 + i)) for i, n in enumerate(change)
    )
    found = by_name([Sent(noised, state(), noise_std=std)])["A"]
    assert recovered(found) == set()


def test_factors_of_products_show_both_changes_in_the_clear() -> None:
    """[s dB, s B] [A + dA ; dA], and while B is zero the product alone gives dB."""
    before, change = state(), steps(state(), CANDIDATES[:RANK])
    products = Tensors(product(pair, before, change) for pair in PAIRS)
    assert recovered(by_name([Sent(products, before)])["A"]) == set(range(RANK))


def test_products_whose_factors_do_not_show_are_looked_at_off_the_known_rows() -> None:
    before, change = state(), steps(state(), CANDIDATES[:RANK])
    products = Tensors(product(pair, before, change) for pair in PAIRS).dense()
    found = by_name([Sent(products, before)])
    assert list(found) == ["product"]
    assert recovered(found["product"]) == set(range(RANK))


def test_a_product_over_zero_b_gives_the_change_of_b() -> None:
    before = state(b_scale=0.0)
    change = steps(before, CANDIDATES[: RANK - 2])
    products = Tensors(product(pair, before, change) for pair in PAIRS).dense()
    assert recovered(by_name([Sent(products, before)])["B"]) == set(range(RANK - 2))


def product(pair: Pair, before: Tensors, change: Tensors) -> tuple[str, LowRank]:
    a, b = before.tensor(pair.a), before.tensor(pair.b)
    da, db = change.tensor(pair.a), change.tensor(pair.b)
    return f"{pair.module}.delta", LowRank(SCALE * torch.cat([db, b], 1), torch.cat([a + da, da]))


def test_the_rank_is_what_stands_out_of_the_rounding_of_parameters() -> None:
    """A change of rank 5 added to float32 parameters, and taken off again, has full rank by its numbers."""
    before = normal(24, WIDTH, seed=1).float()
    true = (normal(24, 5, seed=2) @ normal(5, WIDTH, seed=3) * 1e-4).float()
    change = (before + true) - before
    assert np.linalg.matrix_rank(change.double().numpy()) == 24
    assert row_space([Rows(change, rounding(change, before))]).shape == (5, WIDTH)


def test_no_change_has_no_rows() -> None:
    nothing = torch.zeros(8, WIDTH)
    assert row_space([Rows(nothing, rounding(nothing, torch.ones(8, WIDTH)))], most=8).shape[0] == 0
    assert row_space([Rows(torch.zeros(8, WIDTH), 0.0)]).shape[0] == 0
    assert Family("A", (SpanTest(torch.zeros(0, WIDTH), WIDTH, MEMBER_A),)).vacuous


def test_distances_are_sines_of_angles() -> None:
    test = SpanTest(torch.eye(3, dtype=torch.float64)[:1], 3, MEMBER_A)
    angle = math.radians(30)
    inputs = torch.tensor([[1.0, 0, 0], [0, 2, 0], [3 * math.cos(angle), 0, 3 * math.sin(angle)]])
    assert test.distances(inputs.double()).tolist() == pytest.approx([0, 1, 0.5])
    assert test.distances(inputs.float()).tolist() == pytest.approx([0, 1, 0.5], abs=1e-6)


def test_the_tolerance_is_what_chance_does_not_reach() -> None:
    """With one dimension missing of many candidates some come near: of 10,000 uniform ones, few are closer than 1e-4."""
    family = Family("A", (SpanTest(torch.eye(2, dtype=torch.float64)[:1], 2, MEMBER_A),))
    assert family.tolerance(10_000) == pytest.approx(1e-4)
    wide = Family("A", (SpanTest(torch.eye(40, dtype=torch.float64)[:1], 40, MEMBER_A),))
    assert wide.tolerance(10_000) == MEMBER_A


def test_no_more_tokens_are_certain_than_a_row_space_has_dimensions() -> None:
    family = Family("A", (SpanTest(torch.eye(40, dtype=torch.float64)[:3], 40, MEMBER_A),))
    found = Found(family, 10, KEYS[:6], torch.tensor([0.01, 0.001, 0.02, 0.002, 0.003, 0.5]))
    assert found.certain() == {(0, 1), (0, 3), (0, 4)}


def test_guesses_are_the_nearest_of_each_position() -> None:
    family = Family("A", (SpanTest(torch.eye(40, dtype=torch.float64)[:3], 40, MEMBER_A),))
    keys = torch.tensor([[0, 5], [0, 6], [1, 7], [0, 8]])
    found = Found(family, 10, keys, torch.tensor([0.2, 0.1, 0.25, 0.05]))
    assert found.nearest(1) == {(0, 8), (1, 7)}
    assert found.nearest(2) == {(0, 8), (0, 6), (1, 7)}
