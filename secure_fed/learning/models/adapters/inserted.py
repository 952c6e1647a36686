"""Modules behind a transformer's attention and feed-forward blocks: bottlenecks, mixtures, Kronecker products, and scales.

A module changes the output of the last linear layer of such a block, before dropout and the residual connection: y -> y +
adapter(y), or another function of y. It becomes a child of that linear layer, so that the base model keeps the names of its
parameters, and every model its own forward. Tensor trains and hypernetworks stand at the same places.

    Bottlenecks    Houlsby et al., 2019         a down-projection, an activation and an up-projection
    Mixtures       AdaMix                       several down-projections, of which a pass uses one at random
    Compacters     Compacter                    bottlenecks whose matrices are sums of Kronecker products
    Scales         IA3                          a vector that scales keys, values and inner activations

The model's outputs are exactly unchanged at first: the last matrix of an adapter starts at zero, and scales start at one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from peft import utils as peft
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.lora import ends, fresh_a, linear_layers, matrix_shape
from secure_fed.learning.models.adapters.parameters import train_only
from secure_fed.learning.models.adapters.per_example import ExampleWise
from secure_fed.learning.models.architecture import kind_of, name_of
from secure_fed.learning.models.devices import place_of

CHILD = "adapter"  # one name for all modules of `insert`, so that a second adapter at a place is noticed
RULE = "kronecker_rule"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": functional.gelu, "relu": functional.relu}
# Ends of the names of the last linear layers of blocks, behind the layer's number.
_ENDS = {
    "attention": (
        "attention.output.dense",  # BERT, RoBERTa, DeBERTa
        "attention.attn.o",  # MPNet
        "attention.out_lin",  # DistilBERT
        "self_attn.o_proj",  # LLaMA
        "attn.c_proj",  # GPT-2
        "attn.attention.out_proj",  # GPT-Neo
    ),
    "feed_forward": (
        "output.dense",  # BERT, RoBERTa, DeBERTa, MPNet
        "ffn.lin2",  # DistilBERT
        "mlp.down_proj",  # LLaMA
        "mlp.c_proj",  # GPT-2, GPT-Neo
        "mlp.fc2",  # Jina, whose attention is LLaMA's
    ),
}
_BLOCKS = tuple(_ENDS)
_REMEDY = "choose a method on LoRA, which takes method.target_modules"
# PEFT's tables of the layers that IA3 scales, and of those among them that are scaled in front.
_PEFT = (
    peft.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
    peft.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING,
)
# Architectures that PEFT's table lacks: (all scaled layers, the layers among them that are scaled in front).
_MORE = {"distilbert": (("k_lin", "v_lin", "ffn.lin2"), ("ffn.lin2",))}


class Place(NamedTuple):
    """The last linear layer of one block: its name, the number of its layer (from 0), the block, and its output width."""

    module: str
    layer: int
    block: str  # "attention" or "feed_forward"
    width: int


def places(model: nn.Module, blocks: Collection[str] = _BLOCKS) -> list[Place]:
    """Every place behind blocks of these kinds, in the order of the layers, attention first.

    Refuses a model with a layer that has no known block of one of these kinds.
    """
    found, layers = list[Place](), dict[str, set[str]]()  # the kinds of blocks known in a layer, by its name
    for name, module in model.named_modules():
        for block, endings in _ENDS.items():
            match = re.fullmatch(rf"(.*\.(\d+))\.(?:{'|'.join(map(re.escape, endings))})", name)
            if match and isinstance(module, nn.Linear | Conv1D):
                found.append(Place(name, int(match[2]), block, matrix_shape(module)[0]))
                layers.setdefault(match[1], set()).add(block)
    if not found:
        raise MethodError(
            f"no attention and feed-forward blocks are known in {name_of(model)}, behind which an adapter could stand: "
            f"{_REMEDY}"
        )
    _require_all(model, layers, blocks)
    return sorted((place for place in found if place.block in blocks), key=lambda place: (place.layer, place.block))


def _require_all(model: nn.Module, layers: Mapping[str, Collection[str]], blocks: Collection[str]) -> None:
    """Refuse a model with a layer that has no known block of one of these kinds.

    A layer may have further feed-forward blocks in a stack of its own, as in MobileBERT.
    """
    for stack in dict.fromkeys(layer.rpartition(".")[0] for layer in layers):
        if any(stack.startswith(f"{layer}.") for layer in layers):
            continue
        for number, _ in model.get_submodule(stack).named_children():
            layer = f"{stack}.{number}"
            if missing := [block for block in _BLOCKS if block in blocks and block not in layers.get(layer, ())]:
                raise MethodError(
                    f"no {missing[0].replace('_', '-')} block is known in {layer} of {name_of(model)}, behind which an adapter "
                    f"could stand: {_REMEDY}"
                )


def insert(
    model: nn.Module, head: Sequence[str], blocks: Collection[str], make: Callable[[int], nn.Module]
) -> list[str]:
    """Put `make(width)` behind every block of these kinds, in the order of the layers; returns the parameters' names.

    Only they and the head train. Modules are made on the CPU, whatever the default device is, and the process-wide random state
    is not changed.
    """
    names = []
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for place in places(model, blocks):
            adapter = make(place.width)
            at = attach(model, place.module, CHILD, adapter)
            names += [f"{at}.{name}" for name, _ in adapter.named_parameters()]
    train_only(model, [*names, *head])
    return names


def attach(model: nn.Module, place: str, name: str, adapter: nn.Module, *, in_front: bool = False) -> str:
    """Make `adapter` the child `name` of the layer `place`, whose output it replaces; returns its full name.

    The adapter is called with this output alone, or with `in_front` replaces the layer's input, and moves to its device.
    """
    layer = model.get_submodule(place)
    if hasattr(layer, name):
        raise MethodError(f"layer {place} of the model already has an adapter: give a model without any")
    layer.register_module(name, adapter.to(place_of(layer)))
    if in_front:
        layer.register_forward_pre_hook(partial(_fed, name))
    else:
        layer.register_forward_hook(partial(_replaced, name))
    return f"{place}.{name}"


def _replaced(name: str, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """A forward hook that finds its adapter by name, so that a copy of the model calls the copied adapter."""
    changed: Tensor = layer.get_submodule(name)(output)
    return changed


def _fed(name: str, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook that finds its adapter by name, like `_replaced`."""
    return (layer.get_submodule(name)(args[0]), *args[1:])


class Bottleneck(nn.Module):
    """y -> y + U f(D y + b_D) + b_U (Houlsby et al., 2019, arXiv 1902.00751), in float32 whatever the model computes in.

    D is (r, d), U is (d, r), f the activation, d the width of the place and r the bottleneck: 2 r d + r + d numbers a place. D
    starts like LoRA's A, uniform on [-1/sqrt(d), 1/sqrt(d)]; U and both biases start at zero.
    """

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
        make = partial(Bottleneck, bottleneck=self.bottleneck, activation=self.activation, generator=generator)
        return insert(model, head, self.blocks, make)


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


class Mixture(nn.Module):
    """One place's experts of AdaMix (Wang et al., 2022, arXiv 2205.12410): a pass uses one of several bottlenecks at random.

    With M experts, lower layers D_1 ... D_M and one upper layer U for all of them:

        training     y -> y + U gelu(D_k y),   k drawn anew for each place in each pass, for the whole batch
        otherwise    y -> y + U gelu(mean_k D_k y)

    k comes from torch's CPU generator, which local training seeds, and never from the input. The second is the bottleneck whose
    lower weights are the mean of the experts' ("merging"), since a linear layer's output is linear in its weights. "Otherwise"
    is in evaluation mode, and where no gradients are computed: there is no learning from a draw there, and two such passes can
    show whether examples are coupled.
    """

    def __init__(self, width: int, bottleneck: int, experts: int, generator: torch.Generator) -> None:
        super().__init__()
        self.downs = nn.ModuleList(fresh_down(width, bottleneck, generator) for _ in range(experts))
        self.up = zero_up(width, bottleneck)

    def forward(self, y: Tensor) -> Tensor:
        wide = y.to(self.up.weight.dtype)
        if routes(self):
            inner = self.downs[int(torch.randint(len(self.downs), (), device="cpu"))](wide)
        else:
            inner = torch.stack([down(wide) for down in self.downs]).mean(0)
        changed: Tensor = self.up(functional.gelu(inner))
        return y + changed.to(y.dtype)


@dataclass(frozen=True)
class Mixtures:
    """Experts behind every feed-forward block."""

    bottleneck: int
    experts: int

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        """Every D is drawn on the CPU from `seed` alone, expert after expert, in the order of the layers; U is zero."""
        generator = torch.Generator("cpu").manual_seed(seed)
        make = partial(Mixture, bottleneck=self.bottleneck, experts=self.experts, generator=generator)
        return insert(model, head, ("feed_forward",), make)


def routes(module: nn.Module) -> bool:
    """Whether a pass through the module in its present mode uses one expert at random."""
    return module.training and torch.is_grad_enabled()


class Compacter(nn.Module):
    """Compacter's bottleneck (Mahabadi et al., 2021, arXiv 2106.04647), whose matrices are sums of Kronecker products.

    y -> y + PHM_up(gelu(PHM_down(y))), in float32 whatever the model computes in. A layer of parameterised hypercomplex
    multiplication (PHM) computes y = W x + b with

        W = sum_{i=1..n} A_i (x) B_i,   B_i = s_i t_i^T,   A_i (n, n),  s_i (k/n),  t_i (d/n),

    for W of shape (k, d). Both layers of all adapters share one set of A_i, the rule; each layer has its own s, t and b. With r
    for the bottleneck and d for the width, an adapter has 3 (r + d) numbers, and all share n^3.

    W is never formed. With x cut into n pieces x_b and y into n pieces y_a, three linear layers after one another give it
    (`Right`, `Rule`, `Left`):

        z_bi = <t_i, x_b>,    w_ai = sum_b (A_i)_ab z_bi,    y_a = sum_i w_ai s_i.

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
    """Adapters behind every block. n: the number of Kronecker products; it divides bottleneck and widths."""

    bottleneck: int
    n: int

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
        make = partial(Compacter, bottleneck=self.bottleneck, rule=rule, generator=generator)
        names = insert(model, head, _BLOCKS, make)
        model.register_module(RULE, rule.to(model.get_parameter(names[0]).device))
        return [f"{RULE}.weight", *names]

    def _require_divisible(self, model: nn.Module) -> None:
        named = [("method.bottleneck", self.bottleneck)]
        named += [(f"the width of {place.module}", place.width) for place in places(model)]
        for what, number in named:
            if number % self.n:
                raise MethodError(
                    f"method.kronecker = {self.n} does not divide {what}, which is {number}: "
                    "set method.kronecker to a divisor of the bottleneck and of the model's width"
                )


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


def _fresh(shape: tuple[int, ...], addends: int, generator: torch.Generator) -> Tensor:
    drawn: Tensor = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    return drawn / math.sqrt(addends)


class Scale(ExampleWise):
    """x -> weight * x, computing in float32 whatever the model computes in, from a weight of ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) * self.weight).to(x.dtype)


@dataclass(frozen=True)
class Scales:
    """IA3 (Liu et al., 2022, arXiv 2205.05638): a vector for every layer that PEFT's table names for the architecture.

        keys and values       y -> l * y       behind the linear layer that computes them, l as wide as its output
        feed-forward          W x -> W (l * x) in front of its last linear layer, l as wide as its input

    The model's outputs are the same as with PEFT's layers. The modules are ours because PEFT's modules scale inside the forward
    of a layer with other tensors, where an example's gradient would need a pass of its own. PEFT's table matches the ends of
    names: "output.dense" in BERT is also the attention's last layer, which the paper does not scale. Fused layers (GPT-2's
    c_attn) are scaled whole, including queries.
    """

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> list[str]:
        """Every vector starts at one, without random draws. A layer of the head trains in full and gets no vector."""
        names = []
        for name, (in_front, width) in scaled_layers(model, head).items():
            names.append(f"{attach(model, name, CHILD, Scale(width), in_front=in_front)}.weight")
        train_only(model, [*names, *head])
        return names


def scaled_layers(model: nn.Module, head: Collection[str]) -> dict[str, tuple[bool, int]]:
    """By name, in the model's order: whether a layer is scaled in front, and the width of the scaling vector."""
    kind = kind_of(model)
    targets, feed_forward = _MORE.get(kind, tuple(table.get(kind, ()) for table in _PEFT))
    found = {}
    for name, layer in linear_layers(model).items():
        if f"{name}.weight" not in head and _ends(name, targets):
            in_front = _ends(name, feed_forward)
            found[name] = (in_front, matrix_shape(layer)[1 if in_front else 0])
    if not found:
        raise MethodError(
            f"no keys, values and feed-forward are known in {type(model).__name__}, which could be scaled: "
            "choose a method on LoRA, which takes method.target_modules"
        )
    return found


def _ends(name: str, endings: Iterable[str]) -> bool:
    return any(ends(name, ending) for ending in endings)
