"""The exact test: row spaces, their members, and reporting when the test does not apply."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attacks.texts import factor_changes
from attacks.texts.factor_changes import Sent, factor_of, families, scaled_by, undone
from attacks.texts.recovery import prior_knowledge
from attacks.texts.span import MEMBER_A, Family, FirstLayer, Found, Rows, SpanTest, rounding, row_space, search
from secure_fed.learning.models.adapters.lora import Pair
from secure_fed.tensors.tensors import LowRank, Tensors
from tests.attacks.federations import case
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


@every("count", [1, 4, RANK - 1])
def test_b_alone_shows_fewer_inputs_than_its_rank(count: int) -> None:
    before = state(b_scale=0.0)
    found = by_name([Sent(steps(before, CANDIDATES[:count]), before)])
    assert not found["A"].missing  # B is zero, so A has not moved
    assert recovered(found["B"]) == set(range(count))


@every("count", [RANK, RANK + 1, 20])
def test_b_says_nothing_of_as_many_inputs_as_its_rank(count: int) -> None:
    """In R^r every candidate would pass; the test reports none of them, whatever is stacked. As little does A of its width."""
    before = state(b_scale=0.0)
    sent = [Sent(steps(before, CANDIDATES[:count], seed=seed), before) for seed in (0, 100)]
    family = by_name(sent)["B"]
    assert family.vacuous
    assert recovered(family) == set()
    assert all(float(test.distances(CANDIDATES).max()) < 1e-6 for test in family.tests)  # they would have passed
    wide = Family("A", (SpanTest(row_space([Rows(normal(WIDTH, WIDTH, seed=3), 1e-9)]), WIDTH, MEMBER_A),))
    assert wide.vacuous
    assert recovered(wide) == set()


def test_rounds_of_the_same_texts_span_more_of_them() -> None:
    """40 rows of which one round has 24: 30 inputs are out of reach of one round and within that of two. Sums of steps and
    clipping leave the span.
    """
    local = steps(state(), CANDIDATES[:6]) + steps(state(), CANDIDATES[4:10], seed=70)
    assert recovered(by_name([Sent(local * 1e-3, state())])["A"]) == set(range(10))
    count = 30
    one = [Sent(steps(state(), CANDIDATES[:count]), state())]
    two = [*one, Sent(steps(state(2.0), CANDIDATES[:count], seed=50), state(2.0))]
    assert not set(range(count)) <= recovered(by_name(one)["A"])
    assert recovered(by_name(two)["A"]) == set(range(count))


def test_adams_steps_and_noise_as_large_as_the_change_leave_no_candidate() -> None:
    change = steps(state(), CANDIDATES[:5])
    signs = Tensors((name, change.tensor(name).sign() * 1e-3) for name in change)
    assert recovered(by_name([Sent(signs, state())])["A"]) == set()
    std = float(change.tensor(PAIRS[0].a).square().mean().sqrt())
    noised = Tensors(
        (n, change.tensor(n) + std * normal(*change.tensor(n).shape, seed=9 + i)) for i, n in enumerate(change)
    )
    assert recovered(by_name([Sent(noised, state(), noise_std=std)])["A"]) == set()


def test_products_are_read_by_their_factors_or_off_the_known_rows() -> None:
    """[s dB, s B] [A + dA ; dA] shows both changes in the clear. Without the factors A's shows off its known rows, and, while B
    is zero, the product alone gives dB.
    """
    before, change = state(), steps(state(), CANDIDATES[:RANK])
    products = Tensors(product(pair, before, change) for pair in PAIRS)
    assert recovered(by_name([Sent(products, before)])["A"]) == set(range(RANK))
    found = by_name([Sent(products.dense(), before)])
    assert list(found) == ["product"]
    assert recovered(found["product"]) == set(range(RANK))
    zero = state(b_scale=0.0)
    change = steps(zero, CANDIDATES[: RANK - 2])
    products = Tensors(product(pair, zero, change) for pair in PAIRS).dense()
    assert recovered(by_name([Sent(products, zero)])["B"]) == set(range(RANK - 2))


def product(pair: Pair, before: Tensors, change: Tensors) -> tuple[str, LowRank]:
    a, b = before.tensor(pair.a), before.tensor(pair.b)
    da, db = change.tensor(pair.a), change.tensor(pair.b)
    return f"{pair.module}.delta", LowRank(SCALE * torch.cat([db, b], 1), torch.cat([a + da, da]))


def test_the_rank_is_what_stands_out_of_the_rounding_of_parameters() -> None:
    """A change of rank 5 added to float32 parameters, and taken off again, has full rank by its numbers. No change has none."""
    before = normal(24, WIDTH, seed=1).float()
    true = (normal(24, 5, seed=2) @ normal(5, WIDTH, seed=3) * 1e-4).float()
    change = (before + true) - before
    assert np.linalg.matrix_rank(change.double().numpy()) == 24
    assert row_space([Rows(change, rounding(change, before))]).shape == (5, WIDTH)
    nothing = torch.zeros(8, WIDTH)
    assert row_space([Rows(nothing, rounding(nothing, torch.ones(8, WIDTH)))], most=8).shape[0] == 0
    assert row_space([Rows(nothing, 0.0)]).shape[0] == 0
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
    """Guesses are the nearest of each position."""
    family = Family("A", (SpanTest(torch.eye(40, dtype=torch.float64)[:3], 40, MEMBER_A),))
    found = Found(family, 10, KEYS[:6], torch.tensor([0.01, 0.001, 0.02, 0.002, 0.003, 0.5]))
    assert found.certain() == {(0, 1), (0, 3), (0, 4)}
    keys = torch.tensor([[0, 5], [0, 6], [1, 7], [0, 8]])
    found = Found(family, 10, keys, torch.tensor([0.2, 0.1, 0.25, 0.05]))
    assert found.nearest(1) == {(0, 8), (1, 7)}
    assert found.nearest(2) == {(0, 8), (0, 6), (1, 7)}


# The gradient of one step of torch's AdamW, and the factor of a scaled change from float32's grid. Clipping hides nothing.


def stepped(before: Tensor, lr: float, *gradients: Tensor) -> Tensor:
    parameter = torch.nn.Parameter(before.clone())
    optimizer = torch.optim.AdamW([parameter], lr, weight_decay=0.0)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach() - before


@every("size", [1e-5, 1e-4, 1e-3])
@every("start", [0.0, 0.02])
@every("lr", [5e-3, 1e-4])
@every("factor", [1.0, 0.37])
def test_it_is_the_gradient_up_to_the_error_that_is_said(size: float, start: float, lr: float, factor: float) -> None:
    """The error of the recovered gradient has the spread that `undone` returns, where that is small beside the gradient."""
    generator = torch.Generator().manual_seed(0)
    gradient = size * torch.randn(64, 64, generator=generator)
    before = start * torch.randn(64, 64, generator=generator)
    change = factor * stepped(before, lr, gradient)
    large = factor * stepped(torch.zeros(9), lr, torch.ones(9))  # somewhere a gradient is large, as in a head
    of = factor_of([change, large], lr)
    found, error = undone(change, before, lr, factor)
    assert of == pytest.approx(factor, rel=1e-4 if start else 1e-6)
    if error > 0.1 * factor * size:  # half of a gradient's bits are lost in rounding
        assert (start, lr) == (0.02, 1e-4)
        return
    apart = float((found - factor * gradient.double()).square().mean().sqrt())
    assert error / 4 < apart < 2 * error


def parameters(seed: int, size: float = 0.1, step: float = 1e-4) -> tuple[Tensor, Tensor]:
    """A change of float32 parameters, as whoever takes the difference has it, and where it began."""
    generator = torch.Generator().manual_seed(seed)
    before = size * torch.randn(40, 50, generator=generator)
    after = before + step * size * torch.randn(40, 50, generator=generator)
    return after - before, before


@every("seed", range(3))
@every("factor", [1e-6, 0.37, 1.0, 7.1, 1e6])
@every("step", [1e-5, 1e-3])
def test_the_factor_is_found(seed: int, factor: float, step: float) -> None:
    """Tensors of all sizes share it."""
    change, before = parameters(seed, step=step)
    assert scaled_by([(change * factor, before)]) == pytest.approx(factor, rel=1e-5)
    parts = [parameters(seed + at, size, step) for at, size in enumerate((1e-3, 0.1, 20.0))]
    assert scaled_by([(change * factor, before) for change, before in parts]) == pytest.approx(factor, rel=1e-5)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.floats(1e-6, 1e6), st.sampled_from([1e-5, 1e-3, 0.3]))
def test_another_factor_is_never_found(seed: int, factor: float, step: float) -> None:
    """Of changes as large as the parameters the grid may be too fine to be seen; then none is named."""
    change, before = parameters(seed, step=step)
    found = scaled_by([(change * factor, before)])
    assert found is None or found == pytest.approx(factor, rel=1e-5)


@every("seed", range(2))
def test_numbers_on_no_grid_have_no_factor(seed: int) -> None:
    """Nor have changes that are none. Noise is known by its size, and hides the factor."""
    change, before = parameters(seed)
    noise = torch.randn(40, 50, generator=torch.Generator().manual_seed(seed + 1))
    for changes in (
        [],
        [(change, torch.zeros_like(before))],
        [(torch.zeros_like(change), before)],
        [(1e-4 * noise, before)],
        [(change.double() + 1e-7 * noise, before)],
    ):
        assert scaled_by(changes) is None
    assert Sent(Tensors({"a": noise}), Tensors({"a": before}), noise_std=1.0).factor == 1.0


FACTORS = (1e-3, 0.3, 1e3)


def test_the_factor_matters() -> None:
    """A has more rows than the space is wide; if rounding is taken for less than it is, every candidate would pass."""
    of = case(clients=1, each=3, method__rank=64)
    at, one = prior_knowledge(of), of.seen.updates[-1]

    def of_a(factor: float) -> Family:
        sent = Sent(one.contribution * factor, at.before(one.round))
        return families([sent], at.first, at.scale)[0]

    assert of_a(1.0).rank == of_a(1e3).rank < 128
    with patch.object(factor_changes, "scaled_by", lambda changes: None):
        assert not of_a(1.0).vacuous
        assert of_a(1e3).vacuous


def test_products_whose_factors_do_not_show_are_read_at_any_scale() -> None:
    of = case(clients=1, method__name="fra_lora", method__rank=4)
    at, one = prior_knowledge(of), of.seen.updates[-1]
    dense, inputs = one.contribution.dense(), next(at.first.blocks())[1][:500]
    plain, *others = (families([Sent(dense * f, at.before(one.round))], at.first, at.scale) for f in (1.0, *FACTORS))
    for scaled in others:
        assert [(family.name, family.rank) for family in scaled] == [(family.name, family.rank) for family in plain]
        assert torch.allclose(scaled[0].distances(inputs), plain[0].distances(inputs), atol=1e-3)
