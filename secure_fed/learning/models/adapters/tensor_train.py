"""Linear layers whose matrix is a tensor train, and bottleneck adapters made of two of them.

An m x n matrix, its sides factored by `factorisation(m, n)`, is a tensor of sides k_1 .. k_J, the first p of which make m:

    W[i_1 .. i_p, i_(p+1) .. i_J] = G_1[:, i_1, :] G_2[:, i_2, :] ... G_J[:, i_J, :]        G_j: (r_(j-1), k_j, r_j)

with r_0 = r_J = 1 and r_j = r between. W itself is never formed: cut between its row and its column cores the train is W = L R
with L (m, r) and R (r, n), so x W = (x L) R. Nothing on the way is larger than r m, r n, or r numbers and the output a token.

Cores start orthonormal: the unfolding (r_(j-1) k_j, r_j) of a row core has orthonormal columns, and the unfolding
(r_(j-1), k_j r_j) of a column core orthonormal rows. Then L has orthonormal columns and R orthonormal rows, up to one common
factor, and all r singular values of W are equal, unless a side is shorter than the ranks beside it. Gaussian cores of one
standard deviation learn less in as many steps (docs/learning_rates.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.inserted import attach, places
from secure_fed.learning.models.adapters.lora import added
from secure_fed.learning.models.adapters.parameters import train_only
from secure_fed.learning.models.adapters.per_example import ExampleWise
from secure_fed.learning.models.devices import place_of

NAME = "tensor_train"
CORE = ".core_"
_FIRST = f".{NAME}{CORE}0"  # of a train on a layer of the head; those of an adapter are its `down` and `up`
# What the square layer of a classification head is called: RoBERTa's, DistilBERT's, and the pooler of BERT and DeBERTa.
_DENSE = ("classifier.dense", "pre_classifier", "pooler.dense")


class TensorTrainLinear(ExampleWise):
    """(..., m) -> (..., n), x W + b with W a tensor train of rank `rank`, in the type of the cores.

    The cores are drawn orthonormal and scaled alike, so that the squares of W's entries are 1 / m on average. With `zero` the
    last core is zero afterwards, and so is W.
    """

    def __init__(
        self, m: int, n: int, rank: int, *, bias: bool, generator: torch.Generator, zero: bool = False
    ) -> None:
        super().__init__()
        if rank > (limit := math.isqrt(m * n)):
            raise MethodError(
                f"method.rank = {rank} is above {limit}, the largest rank that a tensor train of a {m} x {n} matrix can need: "
                f"set method.rank to {limit} or less"
            )
        shape = factorisation(m, n)
        self.split, self.order = len(shape.rows), len(shape.shape)
        for j, core in enumerate(_drawn(shape.shape, self.split, rank, n, generator)):
            self.register_parameter(f"core_{j}", nn.Parameter(core))
        if zero:
            self.get_parameter(f"core_{self.order - 1}").data.zero_()
        self.bias = nn.Parameter(torch.zeros(n, device="cpu")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        cores = [getattr(self, f"core_{j}") for j in range(self.order)]
        y: Tensor = (x.to(cores[0].dtype) @ _rows(cores[: self.split])) @ _columns(cores[self.split :])
        return y if self.bias is None else y + self.bias


def core_shapes(shape: Sequence[int], rank: int) -> list[tuple[int, int, int]]:
    """(r_(j-1), k_j, r_j) of each core."""
    ranks = [1, *[rank] * (len(shape) - 1), 1]
    return list(zip(ranks, shape, ranks[1:], strict=False))


def _drawn(sides: Sequence[int], split: int, rank: int, n: int, generator: torch.Generator) -> list[Tensor]:
    """Orthonormal cores times one factor: the sum of the squares of W's entries is n, the number of its columns."""
    cores = []
    for j, (before, side, after) in enumerate(core_shapes(sides, rank)):
        unfolded = (before * side, after) if j < split else (before, side * after)
        core = nn.init.orthogonal_(torch.empty(unfolded, device="cpu"), generator=generator)
        cores.append(core.reshape(before, side, after))
    left, right = _rows(cores[:split]), _columns(cores[split:])
    squares = float(((left.T @ left) * (right @ right.T)).sum())  # of W = L R, which is not formed
    return [core * (n / squares) ** (0.5 / len(cores)) for core in cores]


def _rows(cores: Sequence[Tensor]) -> Tensor:
    """L: (m, r)."""
    product = cores[0]  # (1, k_1 .. k_j, r)
    for core in cores[1:]:
        product = torch.tensordot(product, core, dims=1).flatten(1, 2)
    return product.squeeze(0)


def _columns(cores: Sequence[Tensor]) -> Tensor:
    """R: (r, n)."""
    product = cores[-1]  # (r, k_j .. k_J, 1)
    for core in reversed(cores[:-1]):
        product = torch.tensordot(core, product, dims=1).flatten(1, 2)
    return product.squeeze(2)


class TensorTrainAdapter(nn.Module):
    """y -> y + up(GELU(down(y))), down (d, bottleneck) and up (bottleneck, d); up starts at zero, so y -> y."""

    def __init__(self, width: int, bottleneck: int, rank: int, *, bias: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.down = TensorTrainLinear(width, bottleneck, rank, bias=bias, generator=generator)
        self.up = TensorTrainLinear(bottleneck, width, rank, bias=bias, generator=generator, zero=True)

    def forward(self, y: Tensor) -> Tensor:
        change: Tensor = self.up(functional.gelu(self.down(y)))
        return y + change.to(y.dtype)


@dataclass(frozen=True)
class TensorTrains:
    """An adapter after every attention and feed-forward block, and a tensor train on the square layer of the head.

    That layer's weight stays frozen as it was, new or trained before, and a train that starts at zero is added to it.
    biases: whether the adapters' layers have one each.
    """

    rank: int = 8
    bottleneck: int = 64
    biases: bool = True

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        """Put adapters into `model` in place and return the names of their parameters; these and the head are left to train,
        but for the weights in `frozen` of them.

        The model computes what it did before. Cores are drawn on the CPU from `seed` alone, in the order of the layers.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        trains = []
        for place in places(model):
            adapter = TensorTrainAdapter(place.width, self.bottleneck, self.rank, bias=self.biases, generator=generator)
            trains.append(attach(model, place.module, NAME, adapter))
        for name, layer in dense_layers(model, head).items():
            m, n = layer.in_features, layer.out_features
            train = TensorTrainLinear(m, n, self.rank, bias=False, generator=generator, zero=True)
            layer.register_module(NAME, train.to(place_of(layer)))
            layer.register_forward_hook(partial(added, NAME))
            trains.append(f"{name}.{NAME}")
        own = [f"{module}.{name}" for module in trains for name, _ in model.get_submodule(module).named_parameters()]
        train_only(model, dict.fromkeys([*own, *head]))
        for name in frozen(own):
            model.get_parameter(name).requires_grad_(False)
        return own


def dense_layers(model: nn.Module, head: Collection[str]) -> dict[str, nn.Linear]:
    """The layers of the head that get a tensor train, by name: those with a known name whose weight would train."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and f"{name}.weight" in head
        and any(f".{name}".endswith(f".{ending}") for ending in _DENSE)
    }


def frozen(names: Iterable[str]) -> tuple[str, ...]:
    """The weights that do not train because a train among these names is added to them."""
    return tuple(f"{name.removesuffix(_FIRST)}.weight" for name in names if name.endswith(_FIRST))


class Factorisation(NamedTuple):
    """The factors of both sides of a matrix: their products are m and n."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sides of the tensor, one for each core of the train."""
        return self.rows + self.columns


# Ghiasvand et al. (2024), Table 6, and the example in section 4.1.
PRINTED = {
    (768, 64): Factorisation((8, 8, 12), (8, 8)),
    (64, 768): Factorisation((8, 8), (12, 8, 8)),
    (4096, 64): Factorisation((16, 16, 16), (4, 4, 4)),
    (64, 4096): Factorisation((4, 4, 4), (16, 16, 16)),
    (768, 768): Factorisation((12, 8, 8), (8, 8, 12)),
    (16, 768): Factorisation((4, 4), (8, 8, 12)),
}


def factorisation(m: int, n: int) -> Factorisation:
    """The shape of the train for an m x n matrix: the printed one if there is one, otherwise by the rule."""
    return PRINTED.get((m, n)) or by_rule(m, n)


def by_rule(m: int, n: int) -> Factorisation:
    """The shape that the rule gives, printed or not; it gives most of the printed shapes.

    Each side is a product of a few whole numbers:

        a side has three factors, or two where it is at most 64 (three there too, beside a side of 4096 or more);
        they are as equal as can be: of smallest sum, then of smallest spread; factors of 1 are left out;
        the largest stand in the middle of the train, but in a square matrix at its two ends.

    A side with few divisors has fewer and more unequal factors: a prime is a single factor. This is correct, but less compact.
    """
    rows, columns = (_factors(one, 3 if one > 64 or other >= 4096 else 2) for one, other in ((m, n), (n, m)))
    return Factorisation(rows[::-1], columns) if m == n else Factorisation(rows, columns[::-1])


@cache
def _factors(side: int, parts: int) -> tuple[int, ...]:
    """The factors of a side, ascending, without ones; (1,) for 1."""
    divisors = [d for d in range(1, math.isqrt(side) + 1) if side % d == 0]
    divisors += [side // d for d in reversed(divisors) if d * d != side]
    products = (
        (*some, side // math.prod(some))
        for some in itertools.combinations_with_replacement(divisors, parts - 1)
        if side % math.prod(some) == 0
    )
    best = min(map(sorted, products), key=lambda factors: (sum(factors), factors[-1] - factors[0]))
    return tuple(factor for factor in best if factor > 1) or (1,)
