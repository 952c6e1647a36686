"""Gradients recovered from one step of torch's AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attacks.texts.factor_changes import factor_of, undone


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
