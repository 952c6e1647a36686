"""IA3 (Liu et al., 2022, arXiv 2205.05638): vectors that scale keys, values and the inner activations of the feed-forward.

    keys and values       y -> l * y       behind the linear layer that computes them, l as wide as its output
    feed-forward          W x -> W (l * x) in front of its last linear layer, l as wide as its input

with l starting at one. PEFT's table chooses the layers, and the model's outputs are the same as with PEFT's layers. The modules
are ours because PEFT's modules scale inside the forward of a layer with other tensors, where an example's gradient would need a
pass of its own. PEFT's table matches the ends of names: "output.dense" in BERT is also the attention's last layer, which the
paper does not scale. Fused layers (GPT-2's c_attn) are scaled whole, including queries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from peft import utils as peft
from torch import Tensor, nn

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.insertion_points import CHILD, attach
from secure_fed.learning.models.adapters.own_tensors import ExampleWise
from secure_fed.learning.models.adapters.parameters import train_only
from secure_fed.learning.models.adapters.targets import ends, linear_layers, matrix_shape
from secure_fed.learning.models.architecture import kind_of

_PEFT = (
    peft.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
    peft.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING,
)
# Architectures that PEFT's table lacks: (all scaled layers, the layers among them that are scaled in front).
_MORE = {"distilbert": (("k_lin", "v_lin", "ffn.lin2"), ("ffn.lin2",))}


class Scale(ExampleWise):
    """x -> weight * x, computing in float32 whatever the model computes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) * self.weight).to(x.dtype)


@dataclass(frozen=True)
class Scales:
    """A vector for every layer that PEFT's table names for the architecture."""

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
