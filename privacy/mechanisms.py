"""Mechanisms: the bound on a contribution, the noise on a sum, and the privacy cost of both together, in one object.

A mechanism sees norms and named dense tensors, never models. A client calls it for the factor to scale its contribution by; the
server passes it the total before any method sees the total; an accountant reads its event. A "contribution" may be a client's
change of a model or an example's gradient: one object serves both.

`Gaussian` has a fixed clip norm, `AdaptiveGaussian` a clip norm that follows the contributions. Noise that clients add in
shares is in `distributed`, noise that is correlated over rounds in `correlation`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from privacy.entropy import Floats, Stream
from privacy.errors import PlanError

if TYPE_CHECKING:
    from dp_accounting import DpEvent  # the import takes seconds

Named = Mapping[str, Tensor]
Draw = Callable[[Stream, tuple[int, ...]], Floats]
COUNTER = "clip.shorter"  # of `AdaptiveGaussian`

_HAIR = 1 - 1e-6  # contributions are scaled to this share of the clip norm: see `clip_factor`
_LEAST_FACTOR = 2.0**-126
_LEAST_SCALED_TO = 1e-30
_LEAST_STD = 1e-300  # float64 cannot represent the grid of a smaller std
_FARTHEST = 9.0  # standard deviations: see `AdaptiveGaussian.least`


@dataclass(frozen=True)
class Mechanism(ABC):
    """The interface between the federation and differential privacy: docs/adding_a_mechanism.md adds one.

    noise_multiplier: the noise, in units of the clip norm C; calibration chooses it. order: p of the norm that C bounds.
    counters: names of the scalars that a contribution carries beside its tensors.
    """

    noise_multiplier: float
    order: ClassVar[float] = 2.0
    counters: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def event(self) -> DpEvent:
        """One release over everybody: the guarantee of `noised` for two sums at a distance of at most C."""

    @abstractmethod
    def std(self, clip_norm: float) -> float:
        """The standard deviation of the noise on each coordinate of a total."""

    @abstractmethod
    def noised(self, total: Named, clip_norm: float, stream: Stream) -> dict[str, Tensor]:
        """The total with the mechanism's noise, ready for release."""

    def scale(self, norm: Callable[[], float], clip_norm: float) -> float:
        """The factor to multiply a contribution by; mechanisms that need its norm call `norm()`.

        0 means: contribute zeros, since this contribution cannot be bounded.
        """
        return clip_factor(norm(), clip_norm)

    def counted(self, norm: Callable[[], float], clip_norm: float) -> dict[str, Tensor]:
        """The values of a contribution's `counters`."""
        return {}

    def adapted(self, clip_norm: float, counts: Named) -> float:
        """The next round's clip norm, from the released means of the `counters`."""
        return clip_norm


@dataclass(frozen=True)
class NoMechanism(Mechanism):
    """Neither clips nor adds noise, and gives no guarantee."""

    noise_multiplier: float = 0.0

    @property
    def event(self) -> DpEvent:
        from dp_accounting import NonPrivateDpEvent

        return NonPrivateDpEvent()

    def scale(self, norm: Callable[[], float], clip_norm: float) -> float:
        return 1.0

    def std(self, clip_norm: float) -> float:
        return 0.0

    def noised(self, total: Named, clip_norm: float, stream: Stream) -> dict[str, Tensor]:
        return dict(total)


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """Every contribution is scaled to norm at most C, and N(0, (z C)^2) is added to every coordinate of their sum.

    Guarantee: let neighbouring sets differ in one contribution. The sum is then moved by at most C in the L2 norm, taken over
    all coordinates of all tensors together, so that one release is a Gaussian mechanism of sensitivity 1 and standard deviation
    z: `dp_accounting.GaussianDpEvent(z)`. Replacing one contribution moves the sum by up to 2 C.
    """

    @property
    def event(self) -> DpEvent:
        from privacy.accounting import gaussian_event

        return gaussian_event(self.noise_multiplier)

    def std(self, clip_norm: float) -> float:
        return self.noise_multiplier * clip_norm

    def noised(self, total: Named, clip_norm: float, stream: Stream) -> dict[str, Tensor]:
        std = self.std(clip_norm)
        return {name: perturbed(tensor, std, stream) for name, tensor in sorted(total.items())}


@dataclass(frozen=True)
class AdaptiveGaussian(Mechanism):
    """`Gaussian` with a clip norm that follows a quantile of the contributions' norms.

    Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping" (NeurIPS 2021): beside its
    clipped contribution every client sends whether it was no longer than C, and the clip norm C moves geometrically towards
    the quantile g,

        C' = C exp(-eta (b - g)),   b the noised share of contributions no longer than C.

    The count costs privacy. It is sent as +1/2 or -1/2, so its sensitivity is 1/2. With noise of standard deviation s_b on the
    count and z_v C on the vector, both together are one Gaussian mechanism of multiplier z with

        1 / z^2 = 1 / z_v^2 + 1 / (2 s_b)^2.                                                        (their Theorem 1)

    z is the accounted multiplier; the vector gets the somewhat larger z_v.

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


def clip_factor(norm: float, clip_norm: float) -> float:
    """The largest factor up to 1 that brings `norm` to at most `clip_norm`; 0 if there is none.

    One part in a million below C / norm: contributions are kept in float32, and rounding must not make them longer than C.
    There is no factor for a norm that is not finite, nor where float32 loses precision: rounding exceeds that margin for a
    factor below float32's smallest normal number (2^-126), and for the coordinates under a C below 1e-30.
    """
    if not math.isfinite(norm) or norm < 0:
        return 0.0
    if norm <= clip_norm * _HAIR:
        return 1.0
    factor = clip_norm * _HAIR / norm
    return factor if clip_norm >= _LEAST_SCALED_TO and factor >= _LEAST_FACTOR else 0.0


def perturbed(tensor: Tensor, std: float, stream: Stream, draw: Draw | None = None) -> Tensor:
    """The tensor plus std times the drawn numbers, float32, on the tensor's device.

    draw: draws independent numbers of variance 1; standard normal ones if None.

    Sum and noise are float64, and their sum is rounded to multiples of 2^-20 std or finer before it becomes float32: the low
    bits of floating-point noise, which can reveal a sum (Mironov, 2012), are not released. Rounding a larger sum to float32
    after that is post-processing. With a std of 0 the tensor is copied as it is.
    """
    if std == 0:
        return tensor.clone()
    if not _LEAST_STD <= std < math.inf:
        raise PlanError(
            f"noise of standard deviation {std:g} cannot be drawn: noise multiplier times clip norm must be finite and at "
            f"least {_LEAST_STD:g}"
        )
    shape = tuple(tensor.shape)
    noise = torch.from_numpy(stream.normal(shape) if draw is None else draw(stream, shape))
    grid = 2.0 ** (math.floor(math.log2(std)) - 20)
    noised = noise.mul_(std).add_(tensor.detach().to("cpu", torch.float64))
    return noised.div_(grid).round_().mul_(grid).to(tensor.device, torch.float32)
