"""The parameters of private local steps: the sampling of units, their clipping, and the noise (`cohort/sums.py`)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from privacy.entropy import Stream
from privacy.mechanisms import Mechanism
from privacy.sampling import Poisson
from secure_fed.config import TrainingConfig
from secure_fed.learning.data.rows import places_of


@dataclass(frozen=True)
class PrivateSteps:
    """The steps of one client's training, each of which is one release.

    count: the number of steps. stream: the source of the client's secret coins and noise; a new one for each training. groups:
    the group of each example. group_examples: the most examples of one group that enter a step, redrawn whenever the group is
    drawn; it bounds the work, while clipping bounds a group's influence. phantoms: examples of a direction
    (`pointing.Pointing`) beside the units, which are nobody's data: each is drawn by a secret coin of the same rate, clipped
    like the units and added to their sum. Neither the rate nor the divisor depends on phantoms, and phantoms depend on no unit.
    """

    mechanism: Mechanism
    clip_norm: float
    count: int
    stream: Stream
    groups: Sequence[Hashable] | None = None
    group_examples: int | None = None
    phantoms: Sequence[Any] = ()


def batch_sampler(units: int, settings: TrainingConfig) -> Poisson:
    """The sampler of a step: each unit is drawn with probability min(1, batch_size / units)."""
    return Poisson(units, min(1.0, settings.batch / max(1, units)))


def members_of(count: int, groups: Sequence[Hashable] | None) -> list[list[int]]:
    """The indices of each unit's examples: a single example, or all of one group, in the order of first examples."""
    if groups is None:
        return [[i] for i in range(count)]
    if len(groups) != count:
        raise ValueError(f"{len(groups)} groups are named for {count} examples; name one for each")
    return list(places_of(groups).values())
