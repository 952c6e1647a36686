"""Private local training of one client, with a mechanism that tests can inspect and coins that they can set."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privacy.entropy import Stream
from privacy.mechanisms import Gaussian, Mechanism
from secure_fed.learning.training.common_passes.trainings import Ways, train_together
from secure_fed.learning.training.local import Job, PrivateSteps, Trained
from secure_fed.learning.training.objective import Objective


def train_privately(
    objective: Objective,
    job: Job,
    *,
    mechanism: Mechanism,
    clip_norm: float,
    steps: int,
    stream: Stream,
    groups: Sequence[Hashable] | None = None,
    person_examples: int | None = None,
    dummies: Sequence[Any] = (),
    ways: Ways | None = None,
) -> Trained:
    """Trains one job by itself, with private steps."""
    private = PrivateSteps(mechanism, clip_norm, steps, stream, groups, person_examples, dummies)
    return train_together(objective, [replace(job, private=private)], ways)[0]


@dataclass(frozen=True)
class Noted(Gaussian):
    """A mechanism that adds no noise and records the sums to which it would be added."""

    sums: list[dict[str, Tensor]] = field(default_factory=list)

    def noised(self, total: Mapping[str, Tensor], clip_norm: float, stream: Stream) -> dict[str, Tensor]:
        self.sums.append({name: part.clone() for name, part in total.items()})
        return {name: tensor.float() for name, tensor in total.items()}


class Landing(Stream):
    """A stream whose coins draw the units numbered in `present`, for mechanisms that draw no noise."""

    def __init__(self, present: Sequence[int] = ()) -> None:
        super().__init__(bytes(32))
        self.present = list(present)

    def uniform(self, count: int) -> Any:
        coins = np.full(count, 1 - 2.0**-53)
        coins[self.present if count else []] = 0
        return coins


def norm(tensors: Mapping[str, Tensor]) -> float:
    """The L2 norm of all tensors together."""
    return float(torch.cat([tensor.double().flatten() for tensor in tensors.values()]).norm())


def less(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: left[name] - right[name] for name in left}
