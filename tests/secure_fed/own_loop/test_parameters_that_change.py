"""Parameters that change in a private loop other than by the noised step: each such loop is refused, or stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from secure_fed.errors import ModelError
from secure_fed.private import Private, wrap
from tests.secure_fed.own_loop.loops import (
    BUDGET,
    EXAMPLES,
    REHEARSAL,
    batches,
    data,
    loader,
    mean,
    network,
    train,
    wrapped,
)


class Bag(nn.Module):
    """An EmbeddingBag over ten words, or an Embedding that is averaged, and a head."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words, self.head = words, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.words(x)
        scores: Tensor = self.head(found if found.ndim == 2 else found.mean(1))
        return scores


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("trains", [True, False])
def test_a_largest_norm_of_embeddings_is_refused_before_anything_runs(
    kind: Callable[..., nn.Module], trains: bool
) -> None:
    model = Bag(kind(10, 8, max_norm=0.5).requires_grad_(trains))
    before = model.words.weight.detach().clone()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1)
    texts = DataLoader(TensorDataset(torch.arange(EXAMPLES)[:, None] % 10, torch.arange(EXAMPLES) % 3), 8)
    with pytest.raises(ModelError, match=f"layer words of the model is {kind.__name__} with max_norm = 0.5, .* None"):
        wrap(model, optimizer, texts, BUDGET)
    assert torch.equal(before, model.words.weight)


class Writes(nn.Module):
    """A layer with a frozen and a trained parameter of eight numbers, which it writes to by `write`.

    calls: of forward passes that train, so far.
    """

    def __init__(self, write: Callable[[Writes, Tensor], None]) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.scale = nn.Linear(8, 8)
        self.write, self.calls = write, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            with torch.no_grad():
                self.write(self, x.detach())
        found: Tensor = self.scale(x)
        return found


def keeps_a_mean(layer: Writes, x: Tensor) -> None:
    layer.centre.lerp_(x.mean(0), 0.1)


def keeps_a_mean_as_data(layer: Writes, x: Tensor) -> None:
    layer.centre.data = torch.lerp(layer.centre.data, x.mean(0), 0.1)


def keeps_one_number(layer: Writes, x: Tensor) -> None:
    layer.centre.data[3] = x.max()


def writes_to_what_trains(layer: Writes, x: Tensor) -> None:
    layer.scale.bias.data += x.mean(0)


def writes_in_the_backward_pass(layer: Writes, x: Tensor) -> None:
    def note(own: nn.Module, at: Any, after: Any) -> None:
        layer.centre.data += after[0].mean(0)

    if layer.calls == 1:
        layer.register_full_backward_hook(note)


WRITES = [keeps_a_mean, keeps_a_mean_as_data, keeps_one_number, writes_to_what_trains, writes_in_the_backward_pass]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_layer_that_writes_to_its_parameters_is_refused(write: Callable[[Writes, Tensor], None]) -> None:
    private = wrapped(network(Writes(write)))
    with pytest.raises(
        ModelError, match=r"parameter 2\.(centre|scale\.bias) of the model changes before optimizer.step"
    ):
        train(private)
    assert private.spent().steps == 0


def test_one_that_begins_later_is_stopped_before_the_step_is_paid() -> None:
    def later(layer: Writes, x: Tensor) -> None:
        if layer.calls == REHEARSAL + 2:
            keeps_a_mean_as_data(layer, x)

    private = wrapped(network(Writes(later)))
    with pytest.raises(ModelError, match=r"parameter 2\.centre of the model changes"):
        train(private)
    assert private.spent().steps == 1


def test_parameters_may_be_changed_between_steps_by_what_is_released() -> None:
    """A bound on weights, and a teacher that follows the model, are functions of noised steps."""
    model = network(Writes(lambda layer, x: None))
    private = wrapped(model)
    for x, y in batches(private):
        mean(model, x, y).backward()
        private.optimizer.step()
        with torch.no_grad():
            model[0].weight.clamp_(-0.5, 0.5)  # type: ignore[index]
            model[2].centre.lerp_(model[2].scale.bias, 0.1)  # type: ignore[index]
    assert private.spent().steps == 6


def test_a_frozen_parameter_is_not_stepped_along_its_old_gradient() -> None:
    """A layer is frozen after a look at the gradients of all, which nobody removed."""
    model = network()
    cross_entropy(model(data().tensors[0]), data().tensors[1]).backward()
    model[0].requires_grad_(False)  # type: ignore[index]
    before = [one.detach().clone() for one in model[0].parameters()]  # type: ignore[index]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    private: Private = wrap(model, optimizer, loader(), BUDGET)
    for x, y in batches(private):  # no zero_grad
        mean(model, x, y).backward()
        optimizer.step()
    assert private.spent().steps == 6
    assert all(torch.equal(a, b) for a, b in zip(before, model[0].parameters(), strict=True))  # type: ignore[index]
