"""Per-example gradients of a small model, by the path that `path_for` chooses and by plain autograd on every example."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from secure_fed.learning.data.encode import Collate
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from tests.secure_fed import small_models
from tests.secure_fed.example_gradients import Gradients, Path, one_by_one, path_for

CPU, PAD_0 = torch.device("cpu"), Collate(0)


def items(count: int = 5) -> list[dict[str, Any]]:
    """Texts of unequal lengths, so that a batch is padded."""
    rng = np.random.default_rng(3)
    return [
        {"input_ids": rng.integers(2, small_models.VOCABULARY, 3 + (4 * i) % 9), "labels": i % small_models.LABELS}
        for i in range(count)
    ]


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attention_probs_dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def away(model: nn.Module, names: Iterable[str]) -> Placed:
    """The training tensors, moved away from their initial values."""
    generator = torch.Generator().manual_seed(1)
    first = {name: model.get_parameter(name).detach().clone() for name in names}
    moving = {
        name: (tensor + 0.1 * torch.randn(tensor.shape, generator=generator)).requires_grad_()
        for name, tensor in first.items()
    }
    return Placed(first, moving, {})


def both(model: nn.Module, names: Iterable[str]) -> tuple[Path, Gradients, Gradients]:
    """The chosen path, its per-example gradients, and autograd's, in float64 so that rounding hides no difference."""
    objective = Objective(without_dropout(model.double()), classification.loss, CPU)
    placed = away(model, names)
    path = path_for(objective, PAD_0, placed, items())
    return path, path(objective, PAD_0, placed, items()), one_by_one(objective, PAD_0, placed, items())
