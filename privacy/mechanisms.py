"""Mechanisms: the bound on a contribution, the noise on a sum, and the privacy cost of both together, in one object.

A mechanism sees norms and named dense tensors, never models. A client calls it for the factor to scale its contribution by; the
server passes it the total before any method sees the total; an accountant reads its event. A "contribution" may be a client's
change of a model or an example's gradient: one object serves both.
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
        from privacy.releases import gaussian_event

        return gaussian_event(self.noise_multiplier)

    def std(self, clip_norm: float) -> float:
        return self.noise_multiplier * clip_norm

    def noised(self, total: Named, clip_norm: float, stream: Stream) -> dict[str, Tensor]:
        std = self.std(clip_norm)
        return {name: perturbed(tensor, std, stream) for name, tensor in sorted(total.items())}


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


_HAIR = 1 - 1e-6
_LEAST_FACTOR = 2.0**-126
_LEAST_SCALED_TO = 1e-30
_LEAST_STD = 1e-300  # float64 cannot represent the grid of a smaller std
