"""The layers of a model that get an adapter."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_DEFAULTS
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning.models.architecture import kind_of, name_of

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
        except re.error as error:
            raise ConfigError(f"method.target_modules = {pattern!r} is not a regular expression: {error}") from error
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


def ends(name: str, ending: str) -> bool:
    """Whether a full name ends in these components."""
    return name == ending or name.endswith(f".{ending}")


def _examples(layers: Mapping[str, nn.Module]) -> str:
    """Up to eight endings that name linear layers: the last component, or the whole name where that is a number."""
    endings = dict.fromkeys(name if name.rpartition(".")[2].isdigit() else name.rpartition(".")[2] for name in layers)
    shown: Sequence[str] = list(endings)[:8]
    return (", ".join(map(repr, shown)) or "none") + (", ..." if len(endings) > len(shown) else "")


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
