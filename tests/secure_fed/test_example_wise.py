"""Per-example gradients of the project's own layers: one batched backward pass equals plain autograd on every example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.errors import ModelError
from secure_fed.learning.models.adapters.per_example import ExampleWise
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from tests.secure_fed.example_gradients import one_by_one, path_for, together

CPU = torch.device("cpu")


class Cubed(ExampleWise):
    """x -> x + (x W)^3 s, with two parameters that are multiplied with each other."""

    def __init__(self, width: int, shared: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 4)
        self.size = nn.Parameter(torch.randn(width))
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        inner = x - x.mean(0, keepdim=True) if self.shared else x
        return x + (inner @ self.weight) ** 3 * self.size


class Net(nn.Module):
    """A `Cubed` layer, used twice between two linear layers."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.before = nn.Linear(5, 6)
        self.cubed = Cubed(6, shared)
        self.after = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.after(self.cubed(self.cubed(self.before(x).tanh())).mean(1))
        return scores


def setting(shared: bool = False) -> tuple[Objective, Any, Placed, list[Any]]:
    torch.manual_seed(0)
    model = Net(shared).double()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def collate(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])

    items = [(torch.randn(4, 5, dtype=torch.float64), number % 3) for number in range(6)]
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    moving = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    return Objective(model, loss, CPU), collate, Placed(start, moving, {}), items


def test_one_pass_gives_what_autograd_gives_example_by_example() -> None:
    objective, collate, placed, items = setting()
    quick, right = (path(objective, collate, placed, items) for path in (together, one_by_one))
    assert set(quick) == set(right) >= {"cubed.weight", "cubed.size"}
    for name, gradient in right.items():
        assert gradient.norm() > 1e-3
        assert torch.allclose(quick[name], gradient, rtol=1e-9, atol=1e-12), name
    assert path_for(objective, collate, placed, items) is together


def test_the_gradient_is_taken_where_the_tensors_were_in_that_pass() -> None:
    """The model's own parameters have other values; the gradient is taken at the values of the pass."""
    objective, collate, placed, items = setting()
    with torch.no_grad():
        for parameter in objective.model.parameters():
            parameter.mul_(3)
    quick, right = (path(objective, collate, placed, items) for path in (together, one_by_one))
    assert all(torch.allclose(quick[name], right[name], rtol=1e-9, atol=1e-12) for name in right)


def test_a_layer_that_looks_at_the_batch_breaks_the_promise_and_is_found_out() -> None:
    objective, collate, placed, items = setting(shared=True)
    with pytest.raises(ModelError, match="depends on the others in its batch"):
        path_for(objective, collate, placed, items)
