"""The gradient recovered from one step of torch's AdamW, and the factor of a scaled change from float32's grid.

No factor is found without a grid. Scaling by clipping hides nothing: recovery from an update does not depend on its length.
"""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attacks import gradient_inversion
from attacks.adversary.case import Case, Settings
from attacks.texts import factor_changes
from attacks.texts.factor_changes import Sent, factor_of, families, scaled_by, undone
from attacks.texts.recovery import Recovery, prior_knowledge, recover
from attacks.texts.span import Family
from secure_fed.runs.recording import Update
from secure_fed.tensors.tensors import Tensors
from tests.attacks.federations import case
from tests.cells import chosen, every


def stepped(before: Tensor, gradient: Tensor, lr: float, times: int = 1) -> Tensor:
    parameter = torch.nn.Parameter(before.clone())
    optimizer = torch.optim.AdamW([parameter], lr, weight_decay=0.0)
    for _ in range(times):
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach() - before


@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("start", [0.0, 0.02])
@pytest.mark.parametrize("lr", [5e-3, 1e-4])
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_it_is_the_gradient_up_to_the_error_that_is_said(size: float, start: float, lr: float, factor: float) -> None:
    """The error of the recovered gradient has the spread that `undone` returns, where that is small beside the gradient."""
    generator = torch.Generator().manual_seed(0)
    gradient = size * torch.randn(64, 64, generator=generator)
    before = start * torch.randn(64, 64, generator=generator)
    change = factor * stepped(before, gradient, lr)
    large = factor * stepped(torch.zeros(9), torch.ones(9), lr)  # somewhere a gradient is large, as in a head
    of = factor_of([change, large], lr)
    found, error = undone(change, before, lr, factor)
    assert of == pytest.approx(factor, rel=1e-4 if start else 1e-6)
    if error > 0.1 * factor * size:  # half of a gradient's bits are lost in rounding
        assert (start, lr) == (0.02, 1e-4)
        return
    apart = float((found - factor * gradient.double()).square().mean().sqrt())
    assert error / 4 < apart < 2 * error


def test_the_error_says_what_is_lost() -> None:
    """A step of 0.0001 on parameters of size 1 loses a gradient of 0.001 to rounding; on zeros almost all of it remains."""
    gradient = 1e-3 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))

    def lost(start: float) -> float:
        before = torch.full((64, 64), start)
        found, error = undone(stepped(before, gradient, 1e-4), before, 1e-4)
        return error / float(found.square().mean().sqrt())

    assert lost(0.0) < 0.05
    assert lost(1.0) > 0.5


def test_a_second_step_is_another() -> None:
    """A broken variant that treats two steps as one: with another gradient in the second step, nothing fits."""
    generator = torch.Generator().manual_seed(0)
    first, second = (1e-4 * torch.randn(64, 64, generator=generator) for _ in range(2))
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = torch.optim.AdamW([parameter], 5e-3, weight_decay=0.0)
    for gradient in (first, second):
        parameter.grad = gradient
        optimizer.step()
    found, _ = undone(parameter.detach(), torch.zeros(64, 64), 5e-3)
    assert torch.nn.functional.cosine_similarity(found.flatten(), (first + second).double().flatten(), 0) < 0.9


def parameters(seed: int, size: float = 0.1, step: float = 1e-4) -> tuple[Tensor, Tensor]:
    """A change of float32 parameters, as whoever takes the difference has it, and where it began."""
    generator = torch.Generator().manual_seed(seed)
    before = size * torch.randn(40, 50, generator=generator)
    after = before + step * size * torch.randn(40, 50, generator=generator)
    return after - before, before


@every("seed", range(5))
@every("factor", [1e-6, 0.37, 1.0, 7.1, 1e6])
@every("step", [1e-5, 1e-3])
def test_the_factor_is_found(seed: int, factor: float, step: float) -> None:
    change, before = parameters(seed, step=step)
    assert scaled_by([(change * factor, before)]) == pytest.approx(factor, rel=1e-5)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-6, 1e6), st.sampled_from([1e-5, 1e-3, 0.3]))
def test_another_factor_is_never_found(seed: int, factor: float, step: float) -> None:
    """Of changes as large as the parameters the grid may be too fine to be seen; then none is named."""
    change, before = parameters(seed, step=step)
    found = scaled_by([(change * factor, before)])
    assert found is None or found == pytest.approx(factor, rel=1e-5)


def test_tensors_of_all_sizes_share_one_factor() -> None:
    parts = [parameters(seed, size) for seed, size in enumerate((1e-3, 0.1, 20.0))]
    assert scaled_by([(change * 0.37, before) for change, before in parts]) == pytest.approx(0.37, rel=1e-5)


def test_sums_of_updates_are_on_the_grid_of_one() -> None:
    (one, before), generator = parameters(0), torch.Generator().manual_seed(9)
    other = (before + 1e-5 * torch.randn(40, 50, generator=generator)) - before
    assert scaled_by([(one + other, before)]) == pytest.approx(1, rel=1e-5)
    assert scaled_by([(one / math.pi + other / math.e, before)]) is None


@every("seed", range(4))
def test_numbers_on_no_grid_have_no_factor(seed: int) -> None:
    change, before = parameters(seed)
    noise = torch.randn(40, 50, generator=torch.Generator().manual_seed(seed + 1))
    assert scaled_by([(1e-4 * noise, before)]) is None
    assert scaled_by([(change.double() + 1e-7 * noise, before)]) is None


def test_where_there_is_nothing_to_see() -> None:
    change, before = parameters(0)
    assert scaled_by([]) is None
    assert scaled_by([(change, torch.zeros_like(before))]) is None
    assert scaled_by([(torch.zeros_like(change), before)]) is None


FACTORS = (1e-3, 0.3, 1e3)
METHODS = ("fedlora", "ffa_lora", "fra_lora")


@pytest.fixture(scope="module", params=METHODS)
def several(request: pytest.FixtureRequest) -> Case:
    """Two clients of three texts, so that the rank is not large enough to be careless."""
    return case(clients=2, each=3, method__name=request.param, method__rank=40)


def read(of: Case, factor: float) -> tuple[Recovery, Recovery]:
    """One client's second update, and one in which B moves alone."""
    at = prior_knowledge(of)
    found = [one for one in of.seen.updates if one.client == of.seen.updates[0].client]
    sent = [Sent(one.contribution * factor, at.before(one.round)) for one in found]
    first, second = recover([[one] for one in sent], at.first, at.scale, at.known, 3)
    return first, second


@pytest.mark.nightly
@pytest.mark.parametrize("factor", chosen(FACTORS, [1e-3, 1e3]))
def test_scaling_changes_nothing(several: Case, factor: float) -> None:
    for one, scaled in zip(read(several, 1.0), read(several, factor), strict=True):
        assert one.applies
        assert len(one.certain) > 20
        assert (scaled.certain, scaled.why, scaled.rank) == (one.certain, one.why, one.rank)


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


@pytest.mark.parametrize("factor", FACTORS)
def test_products_whose_factors_do_not_show_are_read_at_any_scale(factor: float) -> None:
    of = case(clients=1, method__name="fra_lora", method__rank=4)
    at, one = prior_knowledge(of), of.seen.updates[-1]
    dense = one.contribution.dense()
    plain, scaled = (families([Sent(dense * f, at.before(one.round))], at.first, at.scale) for f in (1.0, factor))
    assert [(family.name, family.rank) for family in scaled] == [(family.name, family.rank) for family in plain]
    inputs = next(at.first.blocks())[1][:500]
    assert torch.allclose(scaled[0].distances(inputs), plain[0].distances(inputs), atol=1e-3)


def clipped(update: Update, factor: float) -> Update:
    return Update(update.round, update.client, update.pass_name, update.contribution * factor, update.weight)


@pytest.mark.nightly
def test_the_whole_attack_finds_the_same_in_clipped_updates() -> None:
    """Every client is clipped by a different factor."""
    of = case(clients=3, each=4, method__rank=32)
    short = [clipped(one, 0.5 / (2 + index)) for index, one in enumerate(of.seen.updates)]
    names = ("recall", "precision", "bag_recall", "bag_precision")
    plain = gradient_inversion.run(of, Settings()).measured
    found = gradient_inversion.run(replace(of, seen=replace(of.seen, updates=short)), Settings()).measured
    assert plain["exact_applicable"] == 3  # in the second round
    assert plain["bag_recall"] > 0.3
    assert {name: found[name] for name in names} == pytest.approx({name: plain[name] for name in names}, abs=0.01)
    assert found["all_rounds"]["bag_recall"] == pytest.approx(plain["all_rounds"]["bag_recall"], abs=0.01)


def test_noise_is_known_by_its_size_and_hides_the_factor() -> None:
    change = Tensors({"a": torch.randn(4, 8)})
    assert Sent(change, Tensors({"a": torch.randn(4, 8)}), noise_std=1.0).factor == 1.0
