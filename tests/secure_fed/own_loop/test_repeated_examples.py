"""Data sets that have an example several times: one person would count as several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split

from secure_fed.errors import DataError
from secure_fed.own_loop.batches import require_samplable
from secure_fed.private import wrap
from tests.secure_fed.own_loop.loops import BUDGET, data, network

D = data()
RARE = [2, 5]


@pytest.mark.parametrize(
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
    with pytest.raises(DataError, match=r"example \d+ of a data set more than once, .* leave out repeated indices"):
        require_samplable(DataLoader(made, batch_size=4))


@pytest.mark.parametrize(
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


def test_wrap_refuses_it() -> None:
    model = network()
    with pytest.raises(DataError, match="the loader's Subset has example 2 of a data set more than once"):
        wrap(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(Subset(D, [1, 2, 2]), 2), BUDGET)
