"""Mechanisms: the bound on a contribution, the noise on a sum, and what both together cost, in one object.

A mechanism sees norms and dense tensors by name, never models. A client asks it by what factor to scale its contribution;
the server hands it the total before any method sees it; an accountant reads its event. Nothing here knows whether a
"contribution" is a client's change of a model or an example's gradient: one object serves both.
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
    from dp_accounting import DpEvent  # it takes seconds to import

Named = Mapping[str, Tensor]
Draw = Callable[[Stream, tuple[int, ...]], Floats]


@dataclass(frozen=True)
class Mechanism(ABC):
    """The interface between the federation and differential privacy: docs/adding_a_mechanism.md adds one.

    noise_multiplier: the noise, in units of the clip norm C; calibration looks for it. order: p of the norm that C bounds.
    counters: names of the single numbers that a contribution carries beside its tensors.
    """

    noise_multiplier: float
    order: ClassVar[float] = 2.0
    counters: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def event(self) -> DpEvent:
        """One release over everybody: what `noised` guarantees of two sums that lie no farther apart than C."""

    @abstractmethod
    def std(self, clip_norm: float) -> float:
        """The standard deviation of the noise on each coordinate of a total."""

    @abstractmethod
    def noised(self, total: Named, clip_norm: float, stream: Stream) -> dict[str, Tensor]:
        """The total with the mechanism's noise, ready to be released."""

    def scale(self, norm: Callable[[], float], clip_norm: float) -> float:
        """The factor to multiply a contribution by; `norm()` measures it, for those mechanisms that need to.

        0 means: contribute zeros, since what there is cannot be bounded.
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
    """Neither clips nor adds noise, and guarantees nothing."""

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
    z: what `dp_accounting.GaussianDpEvent(z)` stands for. Whoever replaces one contribution moves the sum by 2 C.
    """

    @property
    def event(self) -> DpEvent:
        from privacy.releases import gaussian

        return gaussian(self.noise_multiplier)

    def std(self, clip_norm: float) -> float:
        return self.noise_multiplier * clip_norm

    def noised(self, total: Named, clip_norm: float, stream: Stream) -> dict[str, Tensor]:
        std = self.std(clip_norm)
        return {name: perturbed(tensor, std, stream) for name, tensor in sorted(total.items())}


def clip_factor(norm: float, clip_norm: float) -> float:
    """The largest factor up to 1 that brings `norm` to at most `clip_norm`; 0 if there is none.

    A hair below C / norm (one part in a million): contributions are kept in float32, and rounding must not make them
    longer than C. There is none for a norm that is no finite number, nor where float32 loses its precision: a factor below
    its smallest normal number (2^-126) is rounded by more than the hair, and so are the coordinates under a C below 1e-30.
    """
    if not math.isfinite(norm) or norm < 0:
        return 0.0
    if norm <= clip_norm * _HAIR:
        return 1.0
    factor = clip_norm * _HAIR / norm
    return factor if clip_norm >= _LEAST_SCALED_TO and factor >= _LEAST_FACTOR else 0.0


def perturbed(tensor: Tensor, std: float, stream: Stream, draw: Draw | None = None) -> Tensor:
    """The tensor plus std times what is drawn, float32, on the tensor's device.

    draw: independent numbers of variance 1; normal ones if None.

    Sum and noise are float64, and their sum is rounded to multiples of 2^-20 std or finer before it becomes float32: the low
    bits of floating-point noise, from which a sum can be told (Mironov, 2012), do not leave. What float32 rounds off
    a larger sum after that is post-processing. With a std of 0 the tensor is copied as it is.
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
_LEAST_STD = 1e-300  # the grid of a smaller one is no float64
