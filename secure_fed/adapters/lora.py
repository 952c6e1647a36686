"""LoRA (Hu et al., 2021, arXiv 2106.09685) inside any module with linear layers, through PEFT.

An adapted layer computes `W x + s B A x` with W (m, n) frozen, A (r, n), B (m, r) and the scale s = alpha / r,
or alpha / sqrt(r) with rank-stabilised LoRA (arXiv 2312.03732). PEFT puts the layers in; this module refuses what
cannot work before the model is touched, and fills A from a seed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from secure_fed.adapters.targets import find_targets, rank_limit
from secure_fed.config import MethodConfig
from secure_fed.errors import MethodError
from secure_fed.tensors import Tensors

_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


# Makes an A of shape (r, n) from a generator.
Draw = Callable[[tuple[int, int], torch.Generator], Tensor]


def fresh_a(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """(r, n), uniform on [-1/sqrt(n), 1/sqrt(n)]: Kaiming's rule with a = sqrt(5), LoRA's usual start."""
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])


class Pair(NamedTuple):
    """An adapted module and the names of its two factors."""

    module: str
    a: str
    b: str


@dataclass(frozen=True)
class LoraAdapter:
    """How large the adapters are and where they go.

    target_modules: as in PEFT, name endings, or one regular expression for whole names, or "all-linear"; empty means
    PEFT's own choice for the architecture, else the attention's query and value layers.
    """

    rank: int = 8
    alpha: float = 16.0
    rslora: bool = False
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str = ""

    @classmethod
    def of(cls, config: MethodConfig) -> LoraAdapter:
        return cls(config.rank, config.alpha, config.rslora, config.dropout, config.target_modules)

    @property
    def scaling(self) -> float:
        """s in W + s B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def parameter_count(self, shapes: Iterable[tuple[int, int]]) -> int:
        """How many numbers A and B hold together over adapted matrices of these (m, n) shapes: r (m + n) each."""
        return sum(self.rank * (m + n) for m, n in shapes)

    def peft_config(
        self,
        target_modules: str | Sequence[str],
        *,
        modules_to_save: Sequence[str] = (),
        base_model: str | None = None,
    ) -> LoraConfig:
        """The same adapter in PEFT's words."""
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # PEFT divides it; a float is as good
            use_rslora=self.rslora,
            lora_dropout=self.dropout,
            modules_to_save=list(modules_to_save) or None,
            base_model_name_or_path=base_model,
        )
        # After its constructor, which would make a set of it and write that in another order each time.
        config.target_modules = target_modules if isinstance(target_modules, str) else sorted(target_modules)
        return config

    def inject(self, model: nn.Module, head: Sequence[str], seed: int, draw: Draw = fresh_a) -> list[Pair]:
        """Put adapters into `model` in place, all parameters but theirs and the head's frozen, and return their names.

        Every A is drawn on the CPU from `seed` alone, in name order, and every B is zero, so the model computes what it
        did before. The process-wide random state is left as it was, on every device. A layer of the head trains in full
        and gets no adapter.
        """
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise MethodError(f"the {type(model).__name__} already holds PEFT adapters: give a model without any")
        targets = find_targets(model, self.target_modules, head)
        self._check_rank(targets)
        config = self.peft_config("|".join(re.escape(name) for name in targets))
        config.fan_in_fan_out = all(isinstance(layer, Conv1D) for layer in targets.values())
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # whatever the default device is
            inject_adapter_in_model(config, model)
            found = pairs(name for name, _ in model.named_parameters())
            _fill(model, found, draw, torch.Generator().manual_seed(seed))
        _keep_to_modules(model)
        for name in head:
            model.get_parameter(name).requires_grad_(True)
        return found

    def _check_rank(self, targets: Mapping[str, nn.Module]) -> None:
        for name, layer in targets.items():
            limit = rank_limit(layer)
            if self.rank > limit:
                raise MethodError(
                    f"method.rank = {self.rank} is above {limit}, the smaller side of layer {name}: "
                    f"set method.rank to {limit} or less, or leave the layer out of method.target_modules"
                )


def pairs(names: Iterable[str]) -> list[Pair]:
    """The adapted modules among tensor names, in name order."""
    modules = sorted(name.removesuffix(_A) for name in names if name.endswith(_A))
    return [Pair(module, module + _A, module + _B) for module in modules]


def _fill(model: nn.Module, found: Sequence[Pair], draw: Draw, generator: torch.Generator) -> None:
    """New values, in float32 also beside a base model in bfloat16, where PEFT has made bfloat16 ones."""
    for pair in found:
        a, b = model.get_parameter(pair.a), model.get_parameter(pair.b)
        a.data = draw((a.shape[0], a.shape[1]), generator).to(a.device)
        b.data = torch.zeros(b.shape, device=b.device)


def read(model: nn.Module, names: Iterable[str]) -> Tensors:
    """Copies of the named parameters, float32 on the CPU whatever the model computes in."""
    return Tensors((name, model.get_parameter(name).detach().to("cpu", torch.float32, copy=True)) for name in names)


def _keep_to_modules(model: nn.Module) -> None:
    """Make `nn.TransformerEncoderLayer` call its layers when it evaluates too: its fused kernel reads frozen weights only."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
