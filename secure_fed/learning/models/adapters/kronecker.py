"""Compacter's adapters (Mahabadi et al., 2021, arXiv 2106.04647): bottlenecks whose matrices are sums of Kronecker products.

A layer of parameterised hypercomplex multiplication computes y = W x + b with

    W = sum_{i=1..n} A_i (x) B_i,   B_i = s_i t_i^T,   A_i (n, n),  s_i (k/n),  t_i (d/n),

for W of shape (k, d). Both layers of all adapters share one set of A_i; each layer has its own s, t and b. With r for the
bottleneck and d for the width, an adapter has 3 (r + d) numbers, and all share n^3.

W is never formed. With x cut into n pieces x_b and y into n pieces y_a, three linear layers after one another give it:

    z_bi = <t_i, x_b>,    w_ai = sum_b (A_i)_ab z_bi,    y_a = sum_i w_ai s_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.insertion_points import Place, insert, places
from secure_fed.learning.models.adapters.own_tensors import ExampleWise
from secure_fed.learning.models.adapters.parameters import train_only

RULE = "kronecker_rule"


class _Layer(ExampleWise):
    """A layer of one tensor, `weight`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class Right(_Layer):
    """The n vectors t_i (n, d/n): (..., d) -> (..., n, n), which is z."""

    def forward(self, x: Tensor) -> Tensor:
        pieces: Tensor = x.unflatten(-1, (self.weight.shape[0], self.weight.shape[1]))
        z: Tensor = pieces @ self.weight.T
        return z


class Rule(_Layer):
    """The n matrices A_i (n, n, n): z -> w, both (..., n, n)."""

    def forward(self, z: Tensor) -> Tensor:
        w: Tensor = torch.einsum("...bi,iab->...ai", z, self.weight)
        return w


class Left(_Layer):
    """The n vectors s_i (n, k/n) and the bias (k,): (..., n, n), which is w, -> (..., k)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.bias = nn.Parameter(torch.zeros(weight.numel()))

    def forward(self, w: Tensor) -> Tensor:
        return (w @ self.weight).flatten(-2) + self.bias


class Compacter(nn.Module):
    """y -> y + PHM_up(gelu(PHM_down(y))), computing in float32 whatever the model computes in.

    The rule is a child of the whole model and not of an adapter, so that it occurs once among the model's parameters; a copy of
    the model has a copy of it, which all of its adapters use.
    """

    def __init__(self, width: int, bottleneck: int, rule: Rule, generator: torch.Generator) -> None:
        super().__init__()
        n = rule.weight.shape[0]
        self.down_right = Right(_fresh((n, width // n), width // n, generator))
        self.down_left = Left(_fresh((n, bottleneck // n), n, generator))
        self.up_right = Right(_fresh((n, bottleneck // n), bottleneck // n, generator))
        self.up_left = Left(torch.zeros(n, width // n))
        self._rule = (rule,)

    def forward(self, y: Tensor) -> Tensor:
        rule = self._rule[0]
        inner = self.down_left(rule(self.down_right(y.to(self.up_left.weight.dtype))))
        changed: Tensor = self.up_left(rule(self.up_right(functional.gelu(inner))))
        return y + changed.to(y.dtype)


@dataclass(frozen=True)
class Compacters:
    """Adapters behind every block of these kinds. n: the number of Kronecker products; it divides bottleneck and widths."""

    bottleneck: int
    n: int
    blocks: tuple[str, ...] = ("attention", "feed_forward")

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        """All tensors are drawn on the CPU from `seed` alone: the A_i, then adapter after adapter in the order of the layers.

        Each number is normal with variance one over the number of terms in its sum; the s_i of the upper layers are zero, so
        that the model's outputs are exactly unchanged.
        """
        self._require_divisible(model)
        if hasattr(model, RULE):
            raise MethodError(f"the {type(model).__name__} already holds such adapters: give a model without any")
        generator = torch.Generator("cpu").manual_seed(seed)
        rule = Rule(_fresh((self.n, self.n, self.n), self.n, generator))

        def make(place: Place) -> nn.Module:
            return Compacter(place.width, self.bottleneck, rule, generator)

        names = insert(model, self.blocks, make)
        model.register_module(RULE, rule.to(model.get_parameter(names[0]).device))
        train_only(model, [f"{RULE}.weight", *names, *head])
        return [f"{RULE}.weight", *names]

    def _require_divisible(self, model: nn.Module) -> None:
        named = [("method.bottleneck", self.bottleneck)]
        named += [(f"the width of {place.module}", place.width) for place in places(model, self.blocks)]
        for what, number in named:
            if number % self.n:
                raise MethodError(
                    f"method.kronecker = {self.n} does not divide {what}, which is {number}: "
                    "set method.kronecker to a divisor of the bottleneck and of the model's width"
                )


def _fresh(shape: tuple[int, ...], addends: int, generator: torch.Generator) -> Tensor:
    drawn: Tensor = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    return drawn / math.sqrt(addends)
