"""Adaptive clipping: the clip norm follows a quantile of the contributions' norms.

Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping" (NeurIPS 2021): beside its
clipped contribution every client sends whether it was no longer than C, and the clip norm C moves geometrically towards the
quantile g,

    C' = C exp(-eta (b - g)),   b the noised share of contributions no longer than C.

The count costs privacy. It is sent as +1/2 or -1/2, so its sensitivity is 1/2. With noise of standard deviation s_b on the
count and z_v C on the vector, both together are one Gaussian mechanism of multiplier z with

    1 / z^2 = 1 / z_v^2 + 1 / (2 s_b)^2.                                                         (their Theorem 1)

z is the accounted multiplier; the vector gets the somewhat larger z_v.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from privacy.entropy import Stream
from privacy.errors import PlanError
from privacy.mechanisms import Gaussian, Mechanism, Named, perturbed

if TYPE_CHECKING:
    from dp_accounting import DpEvent

COUNTER = "clip.shorter"


@dataclass(frozen=True)
class AdaptiveGaussian(Mechanism):
    """`Gaussian` with a clip norm that follows a quantile.

    Guarantee: at whatever clip norm, the released sum and count together are a Gaussian mechanism of sensitivity 1 and standard
    deviation `noise_multiplier`. The clip norm of a round is computed from the releases of earlier rounds.
    """

    quantile: float
    count_std: float
    rate: float = 0.2
    counters: ClassVar[tuple[str, ...]] = (COUNTER,)

    def __post_init__(self) -> None:
        if not self.noise_multiplier > 0:
            raise PlanError(f"the noise multiplier is {self.noise_multiplier:g}; it must be above 0")
        if not 2 * self.count_std > self.noise_multiplier:
            raise PlanError(
                f"the noise on the clip count has standard deviation {self.count_std:.3g}; it must be above half of the noise "
                f"multiplier {self.noise_multiplier:.3g}"
            )

    @classmethod
    def of(cls, noise_multiplier: float, quantile: float, expected: float) -> AdaptiveGaussian:
        """With noise on the count of a twentieth of the cohort, as in the paper, or more, so that z_v is within 7 % of z."""
        return cls(noise_multiplier, quantile, max(expected / 20, 1.5 * noise_multiplier))

    @property
    def vector(self) -> Gaussian:
        """The mechanism of the tensors, of multiplier z_v."""
        share = self.noise_multiplier / (2 * self.count_std)
        return Gaussian(self.noise_multiplier / math.sqrt(1 - share**2))

    @property
    def event(self) -> DpEvent:
        return Gaussian(self.noise_multiplier).event

    def counted(self, norm: Callable[[], float], clip_norm: float) -> dict[str, Tensor]:
        return {COUNTER: torch.tensor(0.5 if norm() <= clip_norm else -0.5)}  # for NaN, -1/2

    def adapted(self, clip_norm: float, counts: Named) -> float:
        share = float(counts[COUNTER]) + 0.5
        return clip_norm * math.exp(-self.rate * (share - self.quantile))

    def least(self, clip_norm: float, rounds: int, expected: float) -> float:
        """A clip norm below which `rounds` rounds almost never get, with cohorts of expected size `expected`.

        The share b is at most one, apart from the noise on the count and, where coins draw the cohort, its deviation from the
        expected size: nine standard deviations of both together over all rounds are allowed for.
        """
        spread = _FARTHEST * math.sqrt(rounds * (self.count_std**2 + expected / 4)) / expected
        return clip_norm * math.exp(-self.rate * (rounds * (1 - self.quantile) + spread))

    def std(self, clip_norm: float) -> float:
        return self.vector.std(clip_norm)

    def noised(self, total: Named, clip_norm: float, stream: Stream) -> dict[str, Tensor]:
        tensors = {name: tensor for name, tensor in total.items() if name != COUNTER}
        count = perturbed(total[COUNTER], self.count_std, stream)
        return self.vector.noised(tensors, clip_norm, stream) | {COUNTER: count}


_FARTHEST = 9.0
