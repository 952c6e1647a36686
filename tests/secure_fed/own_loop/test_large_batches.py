"""Losses and layers that couple examples in large batches alone: the rehearsal has a batch as large as a step's may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from secure_fed.errors import ModelError, OwnLoopError
from secure_fed.own_loop.rehearsal import Part, Parts
from secure_fed.private import Private, wrap
from tests.secure_fed.own_loop.loops import BUDGET, Loss, data, mean, network, summed, train, wrapped


def parts(examples: Any, expected: float, epoch: int = 0) -> list[Part]:
    return Parts(examples, expected).of_epoch(epoch)


class Standardised(nn.Module):
    """A layer that standardises by the batch from 16 examples on."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) / 2 if len(x) >= 16 else x


class Capacity(nn.Module):
    """A layer that processes the last sixteen examples of a batch alone, and passes on the others as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return torch.cat([x[:-16], found[-16:]])


def hardest(reduce: Callable[[Tensor], Tensor]) -> Loss:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        each = cross_entropy(model(x), y, reduction="none")
        return reduce(each.topk(min(16, len(each))).values)

    return loss


CASES: list[tuple[list[nn.Module], Loss]] = [
    ([], hardest(torch.mean)),
    ([], hardest(torch.sum)),
    ([Standardised()], mean),
    ([Capacity()], mean),
]


@pytest.mark.parametrize(("layers", "loss"), CASES, ids=["hardest, mean", "hardest, sum", "standardised", "capacity"])
def test_what_couples_examples_of_large_batches_alone_is_refused(layers: list[nn.Module], loss: Loss) -> None:
    private = wrapped(network(*layers))  # 8 of 24 examples are expected in a batch, and more than 16 are possible
    before = [one.detach().clone() for one in private.model.parameters()]
    with pytest.raises(ModelError, match=r"the others in a batch of 24 examples"):
        train(private, loss)
    assert all(torch.equal(a, b) for a, b in zip(before, private.model.parameters(), strict=True))
    assert private.spent().steps == 0


@pytest.mark.parametrize("loss", [mean, summed])
def test_each_examples_own_loss_passes(loss: Loss) -> None:
    private = wrapped(network(), batch_size=20)
    train(private, loss)
    assert private.spent().steps == 6


def test_the_large_batch_has_the_tried_examples_in_all_its_parts() -> None:
    found = parts(data(1000), 100.0)
    many, tried = found[-1].indices, found[8].indices
    assert [part.kind for part in found] == [*["alone"] * 8, "together", *["many"] * 3]
    assert [part.number for part in found if not part.last] == list(range(11))
    assert [part.indices[0] for part in found[:8]] == tried
    assert len(many) == len(set(many)) == 100 + 6 * 10
    assert [many.index(index) for index in tried] == [row * 159 // 7 for row in range(8)]
    assert max(many) > 900
    halves = [part.indices for part in found[9:11]]
    assert [len(half) for half in halves] == [80, 80]
    assert {*halves[0], *halves[1]} == {*many}


def test_each_epoch_tries_other_examples() -> None:
    """Within five epochs all classes are tried, and most rows are in a large batch."""
    rows = [{"x": index, "label": index % 20} for index in range(1000)]
    epochs = [parts(rows, 100.0, epoch) for epoch in range(5)]
    tried = [found[8].indices for found in epochs]
    assert len({index for some in tried for index in some}) > 30
    assert {index % 20 for some in tried for index in some} == set(range(20))
    assert len({index for found in epochs for index in found[-1].indices}) > 500
    assert {len(found) for found in epochs} == {len(Parts(rows, 100.0))}  # schedules count them


@pytest.mark.parametrize(("examples", "expected", "size"), [(1000, 4.0, 16), (12, 12.0, 12), (24, 1.0, 0), (8, 8.0, 0)])
def test_it_is_as_large_as_the_largest_likely_draw(examples: int, expected: float, size: int) -> None:
    found = parts(data(examples), expected)
    assert len(found) == len(Parts(data(examples), expected))  # type: ignore[arg-type]
    assert size in (0, min(examples, math.ceil(expected + 6 * math.sqrt(expected))))
    assert [len(part.indices) for part in found if part.kind == "many"] == (
        [size // 2, -(-size // 2), size] if size else []
    )
    assert found[-1].last
    assert sum(part.last for part in found) == 1


def test_a_draw_beyond_it_is_unlikely() -> None:
    """Of 10,000 draws of 100 out of 1000 none is larger."""
    generator = torch.Generator().manual_seed(0)
    sizes = (torch.rand(10_000, 1000, generator=generator) < 0.1).sum(1)
    assert int(sizes.max()) <= len(parts(data(1000), 100.0)[-1].indices)


def leaves_out(size: int) -> Callable[[Private], None]:
    def loop(private: Private) -> None:
        for x, y in private.loader:
            if len(y) != size:
                mean(private.model, x, y).backward()
                private.optimizer.step()

    return loop


@pytest.mark.parametrize("size", [24, 8, 1])
def test_no_batch_of_the_rehearsal_may_be_left_out(size: int) -> None:
    with pytest.raises(OwnLoopError, match="left out batches of the rehearsal"):
        leaves_out(size)(wrapped(network(), batch_size=20))


def test_an_example_without_a_finite_gradient_among_many_is_no_reason_to_refuse() -> None:
    broken = data()
    broken.tensors[0][22] = float("nan")
    model = network()
    private = wrap(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(broken, 20), BUDGET)
    assert 22 not in parts(broken, 20.0)[8].indices
    assert 22 in parts(broken, 20.0)[-1].indices
    train(private)
    assert private.spent().steps == 6
