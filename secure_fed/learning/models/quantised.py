"""Base models whose linear layers are stored in 4 or 8 bits, by bitsandbytes.

A layer stores W (m, n) in another shape and type, with scales beside it, and computes with the dequantised W, which never
trains. 4 bits are the normal floats of QLoRA (Dettmers et al. 2023, arXiv 2305.14314), with quantised scales; 8 bits are
LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339), whose columns of outliers depend on all rows of a batch (`couples_rows`).
Head, embeddings and output layer are not quantised.

bitsandbytes is looked at only where it is imported already: a model without quantised layers needs none.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn

from secure_fed.config import ModelConfig


def settings(config: ModelConfig, device: torch.device, whole: list[str]) -> dict[str, Any]:
    """The arguments of `from_pretrained` for `model.quantization`. whole: modules that are not quantised."""
    if config.quantization == "none":
        return {}
    from transformers import BitsAndBytesConfig

    warnings.filterwarnings("ignore", "MatMul8bitLt: inputs will be cast")
    four = config.quantization == "4bit"
    made: Any = BitsAndBytesConfig(
        load_in_4bit=four,
        load_in_8bit=not four,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, config.dtype),
        llm_int8_skip_modules=whole or None,
    )
    return {"quantization_config": made, "device_map": {"": str(device)}}


def stored_as(config: Any) -> str:
    """The kind of quantisation that a checkpoint's configuration declares, as `model.quantization` names it; "" for none."""
    declared = getattr(config, "quantization_config", None) or {}
    found = declared if isinstance(declared, dict) else declared.to_dict()
    return next((kind for kind in ("4bit", "8bit") if found.get(f"load_in_{kind}")), "")


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The quantised layers by name."""
    if not _kinds():  # walking a model of many modules costs more than a client's share of a round
        return {}
    return {name: layer for name, layer in model.named_modules() if is_quantised(layer)}


@torch.no_grad()
def leave_the_file(model: nn.Module) -> None:
    """Copy the other tensors, in place: as views of a mapped file they would keep all its pages in memory."""
    stored = {id(one) for layer in layers(model).values() for one in layer.parameters()}
    for one in (*model.parameters(), *model.buffers()):
        if id(one) not in stored:
            one.data = one.data.clone()


def is_quantised(layer: nn.Module) -> bool:
    return isinstance(layer, _kinds())


def couples_rows(model: nn.Module) -> bool:
    """Whether a layer computes some columns in another precision for all rows of a batch, if one row has an outlier there."""
    return any(
        getattr(getattr(layer, "state", None), "threshold", 0.0) > 0 for layer in model.modules() if is_quantised(layer)
    )


def matrix_of(layer: nn.Module) -> Tensor:
    """(m, n) float32, the W that a quantised layer computes with."""
    import bitsandbytes

    weight: Any = layer.get_parameter("weight")
    if (state := getattr(weight, "quant_state", None)) is not None:
        found: Tensor = bitsandbytes.functional.dequantize_4bit(weight.data, state)
        return found.float()
    scales = weight.SCB if weight.SCB is not None else cast(Any, layer).state.SCB
    matrix: Tensor = weight.data.float() * scales.float().unsqueeze(1) / 127
    return matrix


def scales(model: nn.Module) -> dict[str, Tensor]:
    """Everything beside the stored weights that determines a matrix, by name."""
    found: dict[str, Tensor] = {}
    for name, layer in layers(model).items():
        weight: Any = layer.get_parameter("weight")
        if weight.is_meta:  # of shapes without numbers
            continue
        if (state := getattr(weight, "quant_state", None)) is not None:
            found |= {f"{name}.weight.{part}": one for part, one in state.as_dict(packed=True).items()}
        else:
            found[f"{name}.weight.SCB"] = weight.SCB if weight.SCB is not None else cast(Any, layer).state.SCB
    return found


def restore(model: nn.Module) -> None:
    """Replace the quantised layers, in place, by usual ones with the dequantised matrices, in the type of the rest."""
    found = layers(model)
    for name, layer in found.items():
        bias = getattr(layer, "bias", None)
        dtype = next(one.dtype for one in model.parameters() if one.is_floating_point())
        with torch.device(layer.get_parameter("weight").device):
            usual = nn.Linear(
                cast(int, layer.in_features), cast(int, layer.out_features), bias is not None, dtype=dtype
            )
        with torch.no_grad():
            usual.weight.copy_(matrix_of(layer))
            if bias is not None:
                usual.bias.copy_(bias)
        model.set_submodule(name, usual.requires_grad_(False))
    if found:
        for attribute in ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized"):
            setattr(model, attribute, False)
        for owner, attribute in ((model, "hf_quantizer"), (getattr(model, "config", None), "quantization_config")):
            if hasattr(owner, attribute):
                delattr(owner, attribute)


def _kinds() -> tuple[type[nn.Module], ...]:
    modules = getattr(sys.modules.get("bitsandbytes"), "nn", None)
    return () if modules is None else (modules.Linear4bit, modules.Linear8bitLt)
