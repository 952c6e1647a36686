"""Bottleneck adapters (Houlsby et al., 2019, arXiv 1902.00751): y -> y + U f(D y + b_D) + b_U.

D is (r, d), U is (d, r), f the activation, d the width of the place and r the bottleneck: 2 r d + r + d numbers a place.
D starts like LoRA's A, uniform on [-1/sqrt(d), 1/sqrt(d)]; U and both biases start at zero, so that the model's outputs are
exactly unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.learning.models.adapters.insertion_points import Place, insert
from secure_fed.learning.models.adapters.lora import fresh_a
from secure_fed.learning.models.adapters.parameters import train_only

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": functional.gelu, "relu": functional.relu}


class Bottleneck(nn.Module):
    """One adapter, computing in float32 whatever the model computes in."""

    def __init__(self, width: int, bottleneck: int, activation: str, generator: torch.Generator) -> None:
        super().__init__()
        self.down = fresh_down(width, bottleneck, generator)
        self.up = zero_up(width, bottleneck)
        self._activation = ACTIVATIONS[activation]

    def forward(self, y: Tensor) -> Tensor:
        changed: Tensor = self.up(self._activation(self.down(y.to(self.up.weight.dtype))))
        return y + changed.to(y.dtype)


@dataclass(frozen=True)
class Bottlenecks:
    """Adapters behind every block of these kinds ("attention", "feed_forward")."""

    bottleneck: int
    blocks: tuple[str, ...]
    activation: str = "gelu"

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        """Every D is drawn on the CPU from `seed` alone, in the order of the layers, attention first."""
        generator = torch.Generator("cpu").manual_seed(seed)

        def make(place: Place) -> nn.Module:
            return Bottleneck(place.width, self.bottleneck, self.activation, generator)

        names = insert(model, self.blocks, make)
        train_only(model, [*names, *head])
        return names


def fresh_down(width: int, bottleneck: int, generator: torch.Generator) -> nn.Linear:
    """The initial D and its bias."""
    down = nn.Linear(width, bottleneck, dtype=torch.float32)
    with torch.no_grad():
        down.weight.copy_(fresh_a((bottleneck, width), generator))
        down.bias.zero_()
    return down


def zero_up(width: int, bottleneck: int) -> nn.Linear:
    """The initial U and its bias."""
    up = nn.Linear(bottleneck, width, dtype=torch.float32)
    with torch.no_grad():
        up.weight.zero_()
        up.bias.zero_()
    return up
