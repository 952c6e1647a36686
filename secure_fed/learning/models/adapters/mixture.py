"""AdaMix's adapters (Wang et al., 2022, arXiv 2205.12410): several bottlenecks at a place; a pass uses one at random.

With M experts, lower layers D_1 ... D_M and one upper layer U for all of them:

    training     y -> y + U gelu(D_k y),   k drawn anew for each place in each pass, for the whole batch
    otherwise    y -> y + U gelu(mean_k D_k y)

The second is the bottleneck whose lower weights are the mean of the experts' ("merging"), since a linear layer's output is
linear in its weights. "Otherwise" is in evaluation mode, and where no gradients are computed: there is no learning from a draw
there, and two such passes can show whether examples are coupled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.learning.models.adapters.bottleneck import fresh_down, zero_up
from secure_fed.learning.models.adapters.insertion_points import Place, insert
from secure_fed.learning.models.adapters.parameters import train_only


class Mixture(nn.Module):
    """One place's experts. k comes from torch's CPU generator, which local training seeds, and never from the input."""

    def __init__(self, width: int, bottleneck: int, experts: int, generator: torch.Generator) -> None:
        super().__init__()
        self.downs = nn.ModuleList(fresh_down(width, bottleneck, generator) for _ in range(experts))
        self.up = zero_up(width, bottleneck)

    def forward(self, y: Tensor) -> Tensor:
        changed: Tensor = self.up(functional.gelu(self._down(y.to(self.up.weight.dtype))))
        return y + changed.to(y.dtype)

    def _down(self, y: Tensor) -> Tensor:
        if routes(self):
            chosen: Tensor = self.downs[int(torch.randint(len(self.downs), (), device="cpu"))](y)
            return chosen
        return torch.stack([down(y) for down in self.downs]).mean(0)


@dataclass(frozen=True)
class Mixtures:
    """Experts behind every block of these kinds."""

    bottleneck: int
    experts: int
    blocks: tuple[str, ...] = ("feed_forward",)

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        """Every D is drawn on the CPU from `seed` alone, expert after expert, in the order of the layers; U is zero."""
        generator = torch.Generator("cpu").manual_seed(seed)

        def make(place: Place) -> nn.Module:
            return Mixture(place.width, self.bottleneck, self.experts, generator)

        names = insert(model, self.blocks, make)
        train_only(model, [*names, *head])
        return names


def routes(module: nn.Module) -> bool:
    """Whether a pass through the module in its present mode uses one expert at random."""
    return module.training and torch.is_grad_enabled()
