"""The steps of one local training: their learning rate, their optimiser and their mini-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fed.config import TrainingConfig
from secure_fed.learning.data.encode import Batch, batches
from secure_fed.learning.tasks.task import Collate


def scheduled_lr(settings: TrainingConfig, round_: float, rounds: int) -> float:
    """The local learning rate of round `round_` (from 0) of `rounds`; a fraction is a point within a round."""
    if round_ < settings.lr_warmup:
        return settings.rate * (round_ + 1) / (settings.lr_warmup + 1)
    share = (round_ - settings.lr_warmup) / (rounds - settings.lr_warmup)
    if settings.lr_schedule == "linear":
        return settings.rate * (1 - share)
    if settings.lr_schedule == "stable_decay":
        return settings.rate * min(1.0, (1 - share) / _DECAY)
    if settings.lr_schedule == "cosine":
        return settings.rate * (1 + math.cos(math.pi * share)) / 2
    return settings.rate


@dataclass(frozen=True)
class Falling:
    """The decay of the learning rate within a round.

    A run may have few rounds of many steps. If the rate stayed constant until the last step, single batches would move the
    result. Within a round the rate never rises.
    """

    settings: TrainingConfig
    round: int
    rounds: int

    def left(self, made: float) -> float:
        """The fraction of the round's learning rate after the share `made` of its steps."""
        if self.round < self.settings.lr_warmup:
            return 1.0
        first, now = (scheduled_lr(self.settings, self.round + share, self.rounds) for share in (0, made))
        return min(1.0, now / first)

    def as_long(self, steps: int) -> float:
        """The number of steps at the round's full rate that are as long as all of its steps together."""
        return math.fsum(self.left(step / steps) for step in range(steps))


def optimizer_of(parameters: Iterable[Tensor], settings: TrainingConfig, lr: float) -> torch.optim.Optimizer:
    """A new local optimiser, as named in the settings, with empty state."""
    if settings.optimizer == "sgd":
        return torch.optim.SGD(list(parameters), lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(list(parameters), lr, weight_decay=settings.weight_decay)


def stepped(optimizer: torch.optim.Optimizer, parts: Sequence[Tensor], times: float) -> None:
    """Make one optimiser step in place, `times` as long for `parts` of its parameters: as with `times` the learning rate.

    Steps of SGD and AdamW, including weight decay, are proportional to the rate.
    """
    before = [] if times == 1 else [part.detach().clone() for part in parts]
    optimizer.step()
    with torch.no_grad():
        for part, start in zip(parts, before, strict=False):
            part.copy_(start + times * (part - start))


_DECAY = 1 / 5  # of the run


def planned_steps(units: int, settings: TrainingConfig) -> int:
    """The number of a client's steps in one round, if it has `units` examples, or units of them; 0 without any."""
    if not units:
        return 0
    return settings.steps if settings.steps is not None else settings.epochs * math.ceil(units / settings.batch)


def local_batches(
    examples: Sequence[Any], collate: Collate, settings: TrainingConfig, rng: np.random.Generator
) -> Iterator[Batch]:
    """`epochs` passes over the examples, or exactly `steps` batches from as many passes as needed."""
    if not len(examples):
        return iter(())
    epochs = itertools.count() if settings.steps is not None else range(settings.epochs)
    passes = (batches(examples, settings.batch, collate, rng) for _ in epochs)
    return itertools.islice(itertools.chain.from_iterable(passes), settings.steps)
