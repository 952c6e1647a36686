"""LoRA (Hu et al., 2021, arXiv 2106.09685) in the linear layers of any module, through PEFT; and which layers get an adapter.

An adapted layer computes `W x + s B A x` with W (m, n) frozen, A (r, n), B (m, r) and the scale s = alpha / r, or alpha /
sqrt(r) with rank-stabilised LoRA (arXiv 2312.03732). PEFT adds the layers; this module chooses them (`find_targets`), refuses
invalid settings before the model is changed, and initialises A and B: from a seed, or from W.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_DEFAULTS
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from secure_fed.config import MethodConfig
from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning.models.adapters.parameters import read
from secure_fed.learning.models.architecture import kind_of, name_of
from secure_fed.learning.models.devices import place_of, value_of
from secure_fed.learning.models.matrix_products import hasten_thin
from secure_fed.learning.models.quantised import is_quantised, matrix_of
from secure_fed.tensors.low_rank import balanced, truncated
from secure_fed.tensors.tensors import Tensors

# The settings of [method] that every method on LoRA reads.
LORA_OPTIONS = ("rank", "alpha", "rslora", "dropout", "target_modules")
_LESS = "less"  # the start that a quantised or offloaded layer subtracts
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"
Draw = Callable[[tuple[int, int], torch.Generator], Tensor]  # makes an A of shape (r, n)


def fresh_a(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """(r, n), uniform on [-1/sqrt(n), 1/sqrt(n)]: Kaiming's rule with a = sqrt(5), LoRA's usual start."""
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])


class Pair(NamedTuple):
    """An adapted module and the names of its two factors."""

    module: str
    a: str
    b: str


def pairs(names: Iterable[str]) -> list[Pair]:
    """The adapted modules among tensor names, in name order."""
    modules = sorted(name.removesuffix(_A) for name in names if name.endswith(_A))
    return [Pair(module, module + _A, module + _B) for module in modules]


@dataclass(frozen=True)
class LoraAdapter:
    """The size of the adapters, and the layers that get one.

    target_modules: as in PEFT, name endings, or one regular expression for whole names, or "all-linear"; empty means
    PEFT's own choice for the architecture, else the attention's query and value layers.
    start: "zero", with B = 0 and A drawn; or "singular", with A and B from the largest singular values of W (`inject`).
    """

    rank: int = 8
    alpha: float = 16.0
    rslora: bool = False
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str = ""
    start: str = "zero"

    @classmethod
    def of(cls, config: MethodConfig) -> LoraAdapter:
        return cls(config.rank, config.alpha, config.rslora, config.dropout, config.target_modules)

    @property
    def scaling(self) -> float:
        """s in W + s B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def peft_config(
        self, target_modules: str | Sequence[str], *, modules_to_save: Sequence[str] = (), base_model: str | None = None
    ) -> LoraConfig:
        """The same adapter as a configuration of PEFT."""
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # PEFT divides it; a float is as good
            use_rslora=self.rslora,
            lora_dropout=self.dropout,
            modules_to_save=list(modules_to_save) or None,
            base_model_name_or_path=base_model,
        )
        # After the constructor, which would turn it into a set, and so write it in another order each time.
        config.target_modules = target_modules if isinstance(target_modules, str) else sorted(target_modules)
        return config

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int, draw: Draw = fresh_a) -> Tensors:
        """`inject`, and every A and B with the head: the initial state of a method on LoRA."""
        return read(model, [*self.inject(model, head, seed, draw), *head])

    def inject(self, model: nn.Module, head: Sequence[str], seed: int, draw: Draw = fresh_a) -> list[str]:
        """Put adapters into `model` in place, freeze all parameters but theirs and the head's, and return their names.

        With start "zero" every A is drawn on the CPU from `seed` alone, in name order, and every B is zero, so the model's
        outputs are unchanged. With "singular" s B A is the best approximation of W of the adapter's rank, split evenly between
        B and A, and **the base layer's weight is overwritten with the rest**, W - s B A, so that the model's outputs are
        unchanged up to rounding; `form` refers to the original W. On the meta device, where W has no values, the start is
        "zero". A quantised or offloaded layer keeps its weight, and subtracts s B A in a product of its own. The process-wide
        random state is not changed, on any device. A layer of the head trains in full and gets no adapter.
        """
        targets = self.targets(model, head)
        config = self.peft_config("|".join(re.escape(name) for name in targets))
        config.fan_in_fan_out = all(isinstance(layer, Conv1D) for layer in targets.values())
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # whatever the default device is
            inject_adapter_in_model(config, model)
            found = pairs(name for name, _ in model.named_parameters())
            generator = torch.Generator().manual_seed(seed)
            for pair in found:  # in float32 also beside a base model in bfloat16, where PEFT has made bfloat16 ones
                a, b = model.get_parameter(pair.a), model.get_parameter(pair.b)
                drawn = draw((a.shape[0], a.shape[1]), generator), torch.zeros(b.shape)
                place = place_of(cast(LoraLayer, model.get_submodule(pair.module)).get_base_layer())
                for name, one in zip((pair.a, pair.b), drawn, strict=True):
                    factor = cast(nn.Linear, model.get_submodule(name.removesuffix(".weight")))
                    factor.weight = nn.Parameter(one.to(place))
                    hasten_thin(factor)
        if self.start == "singular":
            for pair in found:
                _split(model, pair, self.scaling)
        keep_to_modules(model)
        for name in head:
            model.get_parameter(name).requires_grad_(True)
        return [name for pair in found for name in (pair.a, pair.b)]

    def form(self, initial: Tensors, tensors: Tensors) -> LoraForm:
        """`tensors`, of a run that began with `initial`, as factors of a change of the base model's original weights W.

        With start "singular" the change is s (B A - B0 A0): factors [B, -B0] and [A ; A0] of twice the rank, or B - B0 and A
        where A is still A0. They are added to W; in the adapted model, whose weights are W - s B0 A0, s B A has to be merged.
        """
        return LoraForm(
            replace(self, start="zero"), {pair.module: self._factors(initial, tensors, pair) for pair in pairs(tensors)}
        )

    def _factors(self, initial: Tensors, tensors: Tensors, pair: Pair) -> tuple[Tensor, Tensor]:
        """(A, B) of the change of W."""
        a, b = tensors.tensor(pair.a), tensors.tensor(pair.b)
        if self.start == "zero":
            return a, b
        first_a, first_b = initial.tensor(pair.a), initial.tensor(pair.b)
        if torch.equal(a, first_a):
            return a, b - first_b
        return torch.cat([a, first_a]), torch.cat([b, -first_b], 1)

    def targets(self, model: nn.Module, head: Sequence[str]) -> dict[str, nn.Module]:
        """The layers to adapt by full name, in name order.

        Refuses a model that holds PEFT adapters already, and a rank that one of the layers cannot have.
        """
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise MethodError(f"the {type(model).__name__} already holds PEFT adapters: give a model without any")
        targets = find_targets(model, self.target_modules, head)
        for name, layer in targets.items():
            limit = min(matrix_shape(layer))
            if self.rank > limit:
                raise MethodError(
                    f"method.rank = {self.rank} is above {limit}, the smaller side of layer {name}: "
                    f"set method.rank to {limit} or less, or leave the layer out of method.target_modules"
                )
        return targets


@dataclass(frozen=True)
class LoraForm:
    """A state in the form of PEFT's LoRA: `W + s B A` for every adapted matrix W of the original model.

    adapter: rank, alpha and PEFT's other settings, s being its `scaling`. factors: A (k, n) and B (m, k) by module; where k is
    not the adapter's rank, s is the same.
    """

    adapter: LoraAdapter
    factors: Mapping[str, tuple[Tensor, Tensor]]


def scaling_of(method: object) -> float:
    """s in the W + s B A of a method's adapter; 1 without such factors. FeDeRA's is 1 whatever the configuration's alpha is."""
    adapter = getattr(method, "adapter", None)
    return adapter.scaling if isinstance(adapter, LoraAdapter) else 1.0


def _split(model: nn.Module, pair: Pair, scale: float) -> None:
    """Move the best approximation of the layer's matrix, of A's rank, into s B A; the rounding error stays in the layer."""
    layer = cast(LoraLayer, model.get_submodule(pair.module)).get_base_layer()
    a, b, weight = model.get_parameter(pair.a), model.get_parameter(pair.b), layer.get_parameter("weight")
    if (place := place_of(layer)).type == "meta":
        return
    whole = not is_quantised(layer)
    matrix = (value_of(layer).detach() if whole else matrix_of(layer)).to("cpu", torch.float64)
    matrix = matrix.T if isinstance(layer, Conv1D) else matrix
    left, right = ((factor / math.sqrt(scale)).float() for factor in balanced(truncated(matrix, a.shape[0])))
    with torch.no_grad():
        a.copy_(right)
        b.copy_(left)
        if whole and not weight.is_meta:
            rest = matrix - scale * left.double() @ right.double()
            weight.copy_(rest.T if isinstance(layer, Conv1D) else rest)
        else:  # W - s B0 A0 has no form of so few bits, or no place; so the layer computes s B0 A0 x beside W x
            layer.register_module(_LESS, _Less(left * scale, right, place))
            layer.register_forward_hook(partial(added, _LESS))


class _Less(nn.Module):
    """x -> -s B0 A0 x, frozen."""

    def __init__(self, b: Tensor, a: Tensor, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("B", b.to(device), persistent=False)
        self.register_buffer("A", a.to(device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, a = self.get_buffer("B"), self.get_buffer("A")
        return -functional.linear(functional.linear(x.to(a.dtype), a), b)


def added(child: str, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """A forward hook of a layer: its output with that of a child for the same input added.

    It finds the child by name, so that a copy of the model calls the copied child.
    """
    both: Tensor = output + layer.get_submodule(child)(args[0]).to(output.dtype)
    return both


def keep_to_modules(model: nn.Module) -> None:
    """Make `nn.TransformerEncoderLayer` call its layers in evaluation too: its fused kernel reads only frozen weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0


ALL_LINEAR = "all-linear"
# Names of attention's query and value layers where PEFT has no default (DistilBERT, a user's module).
_QUERY_VALUE = (
    ("query", "value"),
    ("q_proj", "v_proj"),
    ("q_lin", "v_lin"),
    ("query_proj", "value_proj"),
    ("q", "v"),
    ("query_key_value",),
    ("qkv_proj",),
    ("Wqkv",),
    ("c_attn",),
)
# Layers that have no adapter because they train in full, if method.target_modules is set, and if it is not.
_REFUSAL = "method.target_modules names {!r}, which is in the head and trains in full: leave it out"
_REFUSAL_OF_DEFAULT = (
    "method.modules_to_save trains every layer {!r} in full, where the adapters would be: leave them out, or name other "
    "layers in method.target_modules"
)


def find_targets(
    model: nn.Module, target_modules: tuple[str, ...] | str, head: Collection[str]
) -> dict[str, nn.Module]:
    """The layers to adapt by full name, in name order; never empty.

    Raises MethodError if a wanted module is absent, is no linear layer or belongs to the head, or if a second layer uses the
    weight of one of the layers (the adapter would change only one of them).
    """
    linear = linear_layers(model)
    free = {name: layer for name, layer in linear.items() if f"{name}.weight" not in head}
    wanted = target_modules or _default(model, free)
    refusal = _REFUSAL if target_modules else _REFUSAL_OF_DEFAULT
    if isinstance(wanted, str):
        chosen = _by_pattern(model, wanted, free)
    else:
        chosen = {name for ending in wanted for name in _by_ending(model, ending, linear, free, refusal)}
    targets = {name: free[name] for name in sorted(chosen)}
    _refuse_shared(model, targets)
    return targets


def _default(model: nn.Module, free: Mapping[str, nn.Module]) -> tuple[str, ...] | str:
    known = PEFT_DEFAULTS.get(kind_of(model))
    if known is not None:
        return known if isinstance(known, str) else tuple(known)
    for endings in _QUERY_VALUE:
        if all(any(ends(name, ending) for name in free) for ending in endings):
            return endings
    raise MethodError(
        f"no query and value layers are known for {name_of(model)}: "
        f"set method.target_modules, for example to {_examples(free)}"
    )


def _by_pattern(model: nn.Module, pattern: str, free: Mapping[str, nn.Module]) -> set[str]:
    if pattern.lower() == ALL_LINEAR:
        output = getattr(model, "get_output_embeddings", lambda: None)()
        chosen = {name for name, layer in free.items() if layer is not output}
    else:
        try:
            chosen = {name for name in free if re.fullmatch(pattern, name)}
        except (re.error, OverflowError, RecursionError) as error:
            wrong = ConfigError(f"method.target_modules = {pattern!r} is not a regular expression: {error}")
            raise wrong.about("method.target_modules", pattern, "a regular expression") from error
    if not chosen:
        raise MethodError(
            f"method.target_modules = {pattern!r} matches no linear layer of {type(model).__name__}, "
            f"whose names end in {_examples(free)} (a single string is a pattern for whole names, a list gives endings)"
        )
    return chosen


def _by_ending(
    model: nn.Module, ending: str, linear: Mapping[str, nn.Module], free: Mapping[str, nn.Module], refusal: str
) -> set[str]:
    """The layers outside the head with this ending. refusal: of an ending of which all layers are in the head."""
    chosen = {name for name in free if ends(name, ending)}
    if chosen:
        return chosen
    if any(ends(name, ending) for name in linear):
        raise MethodError(refusal.format(ending))
    other = next((type(module).__name__ for name, module in model.named_modules() if ends(name, ending)), None)
    fault = f"a {other}, not a linear layer, in" if other else "absent from"
    raise MethodError(
        f"method.target_modules names {ending!r}, which is {fault} {type(model).__name__}; "
        f"its linear layers are {_examples(free)}"
    )


def _refuse_shared(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    places: dict[int, list[str]] = {}
    for name, parent in model.named_modules():
        for attribute, child in parent._modules.items():
            if isinstance(child, nn.Linear | Conv1D):
                places.setdefault(id(child.weight), []).append(f"{name}.{attribute}".removeprefix("."))
    for layer in chosen.values():
        names = places[id(layer.get_parameter("weight"))]
        if len(names) > 1:
            raise MethodError(
                f"{' and '.join(names[:2])} share one weight, which would be adapted twice or in part: "
                "leave them out of method.target_modules"
            )


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer that can have an adapter; not the `out_proj` of `nn.MultiheadAttention`, which is never called."""
    return {
        name: module
        for name, module in model.named_modules()
        if name and isinstance(module, nn.Linear | Conv1D) and not isinstance(module, NonDynamicallyQuantizableLinear)
    }


def matrix_shape(layer: nn.Module) -> tuple[int, int]:
    """(m, n) of the matrix of a linear layer from n numbers to m; GPT-2's layers store its transpose."""
    if isinstance(layer, nn.Linear):  # whose weight may be stored in another shape
        return layer.out_features, layer.in_features
    columns, rows = layer.get_parameter("weight").shape
    return rows, columns


def ends(name: str, ending: str) -> bool:
    """Whether a full name ends in these components."""
    return name == ending or name.endswith(f".{ending}")


def _examples(layers: Mapping[str, nn.Module]) -> str:
    """Up to eight endings that name linear layers: the last component, or the whole name where that is a number."""
    endings = dict.fromkeys(name if name.rpartition(".")[2].isdigit() else name.rpartition(".")[2] for name in layers)
    shown: Sequence[str] = list(endings)[:8]
    return (", ".join(map(repr, shown)) or "none") + (", ..." if len(endings) > len(shown) else "")
