"""A loop's data: which loaders may be wrapped, and which examples a rehearsal tries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

from secure_fed.errors import DataError, ModelError
from secure_fed.own_loop.batches import require_samplable
from secure_fed.own_loop.rehearsal import Part, Parts
from secure_fed.private import wrap
from tests.cells import every
from tests.golden import refused
from tests.secure_fed.own_loop.loops import BUDGET, EXAMPLES, data, network, train


def parts(examples: Any, expected: float, epoch: int = 0) -> list[Part]:
    return Parts(examples, expected).of_epoch(epoch)


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


@every(("examples", "expected", "size"), [(1000, 4.0, 16), (12, 12.0, 12), (24, 1.0, 0), (8, 8.0, 0)])
def test_it_is_as_large_as_the_largest_likely_draw(examples: int, expected: float, size: int) -> None:
    found = parts(data(examples), expected)
    assert len(found) == len(Parts(data(examples), expected))  # type: ignore[arg-type]
    assert size in (0, min(examples, math.ceil(expected + 6 * math.sqrt(expected))))
    assert [len(part.indices) for part in found if part.kind == "many"] == (
        [size // 2, -(-size // 2), size] if size else []
    )
    assert found[-1].last
    assert sum(part.last for part in found) == 1


def chosen(examples: Any) -> list[int]:
    return Parts(examples, 1.0).tried()


def test_a_rehearsal_has_the_rarest_class_and_different_lengths() -> None:
    labels = torch.zeros(500, dtype=torch.long)
    labels[375] = 1  # the only one of its class
    assert {0, 375} < set(chosen(TensorDataset(torch.ones(500, 5), labels)))  # type: ignore[arg-type]
    classes = [{"x": 0, "label": i // 100} for i in range(2000)]
    assert len(chosen(classes)) == 8
    words = torch.full((100, 4), -100)
    words[:, 0], words[57], words[23, 0] = 1, 1, -100
    assert chosen([(0, [{"box": 1}] * n) for n in range(4)]) == [0, 1, 2, 3]  # labels that are not numbers
    found = chosen(TensorDataset(torch.ones(100, 4), words))  # type: ignore[arg-type]
    assert {23, 50, 57} < set(found)
    assert {5, 70} < set(chosen([{"input_ids": [1] * (2 - (n == 5) + (n == 70))} for n in range(100)]))


@every(
    "made",
    [
        lambda x, y: {"x": x, "target": y},
        lambda x, y: (y, x),
        lambda x, y: (x, float(y)),
        lambda x, y: (x, torch.tensor([y])),
        lambda x, y: (x, torch.eye(2)[y]),
        lambda x, y: (x, "yes" if y else "no"),
        lambda x, y: (x, bool(y), 7),
        lambda x, y: (x, [y]),
    ],
)
def test_a_rehearsal_has_the_rarest_class_wherever_it_stands(made: Callable[[Tensor, int], Any]) -> None:
    rows = [made(torch.ones(5), int(index == 431)) for index in range(500)]
    assert 431 in chosen(rows)


def test_the_classes_of_labels_come_before_those_of_other_columns() -> None:
    others = [{f"site {n}": (index + n) % 2 for n in range(10)} | {"labels": int(index == 431)} for index in range(500)]
    assert 431 in chosen(others)


def test_weights_of_classes_are_found_by_a_single_example_of_a_rare_class() -> None:
    """One example of that class in a batch would divide the gradients of all other examples by about its weight."""
    labels = torch.zeros(100, dtype=torch.long)
    labels[57] = 1
    rows = DataLoader(TensorDataset(torch.randn(100, 5, generator=torch.Generator().manual_seed(0)), labels), 10)
    model = network()
    private = wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), rows, replace(BUDGET, delta=1e-3))
    with refused(ModelError):
        train(private, lambda model, x, y: cross_entropy(model(x), y, weight=torch.tensor([1.0, 99.0, 1.0])))
    assert private.spent().steps == 0


def test_batches_may_be_fetched_by_workers() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    private = wrap(model, optimizer, DataLoader(data(), batch_size=8, num_workers=1), BUDGET)
    train(private)
    assert private.spent().steps == 6


D = data()


RARE = [2, 5]


@every(
    "made",
    [
        Subset(D, [*range(24), *RARE * 8]),
        Subset(D, torch.tensor([0, 1, 1])),  # type: ignore[arg-type]
        Subset(D, list(torch.tensor([0, 1, 1]))),  # type: ignore[arg-type]
        Subset(D, [23, -1]),
        ConcatDataset([D] + [Subset(D, RARE)] * 8),
        ConcatDataset([D, D]),
        ConcatDataset([Subset(D, [0, 1]), Subset(D, [1])]),
        ConcatDataset([data(3), ConcatDataset([D, data(3), Subset(Subset(D, [4, 5]), [1])])]),
        Subset(ConcatDataset([data(3), D]), [3, 4, -24]),
        Subset(Subset(D, [7, 7]), [0, 1]),
    ],
)
def test_an_example_that_is_there_twice_is_refused(made: Any) -> None:
    model = network()
    with refused(DataError):
        wrap(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(made, batch_size=4), BUDGET)


@every(
    "made",
    [
        D,
        Subset(D, [3, 1, -1]),
        Subset(Subset(D, [7, 7, 8]), [0, 2]),  # the repeated one is left out
        ConcatDataset([D, data()]),
        ConcatDataset([Subset(D, [0, 1]), Subset(D, [2]), data(3)]),
        ConcatDataset(random_split(D, [0.5, 0.5])),
        Subset([{"x": 0}] * 5, [0, 1]),  # type: ignore[arg-type]
    ],
)
def test_a_part_of_a_data_set_or_several_are_not(made: Any) -> None:
    require_samplable(DataLoader(made, batch_size=4))


@pytest.mark.parametrize(
    "sampler",
    [
        torch.utils.data.SequentialSampler(range(5)),
        torch.utils.data.RandomSampler(range(5)),
        torch.utils.data.RandomSampler(range(EXAMPLES), num_samples=5),
        torch.utils.data.RandomSampler(range(EXAMPLES), replacement=True),
        torch.utils.data.WeightedRandomSampler([1.0] * EXAMPLES, 5),
    ],
    ids=["sequential", "random", "fewer", "with replacement", "weighted"],
)
def test_a_sampler_of_some_examples_is_refused_since_the_loop_would_read_all(sampler: Any) -> None:
    model, some = network(), DataLoader(data(), batch_size=4, sampler=sampler)
    with refused(DataError):
        wrap(model, torch.optim.SGD(model.parameters(), 0.1), some, BUDGET)
