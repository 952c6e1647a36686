"""Example-level privacy in every task: one pass gives the per-example gradients that a loop over single examples gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from secure_fed import Federation, RunConfig
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.trials import agree
from tests.secure_fed.example_gradients import one_by_one, path_for, together
from tests.secure_fed.tasks.conftest import Write
from tests.secure_fed.tasks.toy_tasks import TOYS


def federation(task: str, model: Path, write: Write) -> Federation:
    toy = TOYS[task]
    data = {"task": task, "train": str(write("train", toy.rows(24))), "test": str(write("test", toy.rows(4)))}
    return Federation(
        RunConfig.from_dict(
            {
                "model": {"name": str(model), "max_length": 20},
                "data": data | toy.settings,
                "federation": {"clients": 2},
                "method": {"name": "fedlora", "rank": 2},
            }
        )
    )


def away(federation: Federation) -> Placed:
    generator = torch.Generator().manual_seed(1)
    plan = federation.assembly.method.plan(federation.assembly.initial)
    placed = Placed.of(federation.assembly.initial.tensors, plan.trainable, federation.assembly.objective.device)
    with torch.no_grad():
        for tensor in placed.moving.values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    return placed


def gradients(path: Any, made: Federation, placed: Placed, items: list[Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = path(made.assembly.objective, made.assembly.problem.collate, placed, items)
    return found


@pytest.mark.parametrize("task", TOYS)
def test_per_example_gradients_are_taken_in_one_pass_and_right(
    task: str, small_model: Path, llama: Path, write: Write
) -> None:
    made = federation(task, llama if TOYS[task].decoder else small_model, write)
    placed, items = away(made), [made.assembly.problem.train[0][index] for index in range(6)]
    chosen = path_for(made.assembly.objective, made.assembly.problem.collate, placed, items)
    assert chosen is together
    made.assembly.objective.eval()
    quick, slow = (gradients(path, made, placed, items) for path in (chosen, one_by_one))
    assert agree(quick, slow, 1e-4)
    assert all(len(gradient) == 6 for gradient in quick.values())
    assert any(float(gradient.abs().max()) > 1e-4 for gradient in quick.values())
