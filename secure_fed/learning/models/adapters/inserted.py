"""Modules of ours put behind the blocks of a transformer, and left to train beside the head."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from secure_fed.learning.models.adapters.insertion_points import Place, attach, places
from secure_fed.learning.models.adapters.parameters import train_only

# One name for all of them, so that a second adapter at a place is noticed.
CHILD = "adapter"


def insert(model: nn.Module, blocks: Collection[str], make: Callable[[Place], nn.Module]) -> list[str]:
    """Put `make(place)` behind every block of these kinds, in the order of the layers; the names of the parameters.

    Modules are made on the CPU, whatever the default device is, and the process-wide random state is left as it was.
    """
    names = []
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for place in places(model):
            if place.block in blocks:
                adapter = make(place)
                at = attach(model, place.module, CHILD, adapter)
                names += [f"{at}.{name}" for name, _ in adapter.named_parameters()]
    return names


def leave_to_train(model: nn.Module, names: Sequence[str], head: Sequence[str]) -> list[str]:
    """Freeze all but these and the head, and return `names`."""
    train_only(model, [*names, *head])
    return list(names)
