"""A LoRA adapter and a head as the files of PEFT's folder, which `PeftModel.from_pretrained` loads."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Collection, Sequence, Set
from pathlib import Path

import safetensors.torch
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from secure_fed.errors import ModelError
from secure_fed.learning.models.adapters.lora import LoraForm
from secure_fed.learning.models.architecture import is_pooled
from secure_fed.learning.models.locate import locate
from secure_fed.learning.models.mean_pooled import MeanPooledForSequenceClassification

_PEFT_ROOT = "base_model.model."
POOLED = MeanPooledForSequenceClassification.__name__
# The modules that PEFT's class for sequence classification trains in full by default.
_PEFT_HEADS = ("classifier", "score")


def fill(
    folder: Path,
    model: nn.Module,
    head: Sequence[str],
    form: LoraForm,
    start: LoraForm,
    base_model: str,
    revision: str = "",
) -> None:
    """Write the files.

    model: the adapted model, whose head and buffers are trained. start: the form of the initial state, which has every adapted
    module; `form` may have left some out. base_model, revision: `model.name` and
    `model.revision` of the base model, or empty.
    """
    places = set(start.factors)
    if not form.factors:  # an adapter that changes nothing, since PEFT refuses one without matrices
        name, (a, b) = min(start.factors.items())
        form = LoraForm(start.adapter, {name: (a, torch.zeros_like(b))})
    config = _config(model, head, form, places, locate(base_model) if base_model else None)
    config.revision = revision or None
    stored = safetensors.torch.save(_tensors(model, head, form, places, config), {"format": "pt"})
    (folder / "adapter_model.safetensors").write_bytes(stored)
    config.save_pretrained(str(folder))


def _config(
    model: nn.Module, head: Sequence[str], form: LoraForm, places: Collection[str], base_model: str | None
) -> LoraConfig:
    """The shortest configuration with which PEFT's matching of names selects exactly the adapted layers and the head."""
    adapted = set(form.factors)
    names = _names_outside(model, places)
    endings = sorted({name.rpartition(".")[2] for name in adapted})
    pattern = "|".join(re.escape(name) for name in sorted(adapted))
    base = getattr(model, "config", None)
    of_transformers = type(model).__name__.endswith("ForSequenceClassification") and not is_pooled(base)
    # The class by which AutoPeftModel loads the base model, if that is secure-fed's own.
    ours = {"base_model_class": POOLED, "parent_library": "secure_fed"} if is_pooled(base) else None
    tasks = ("SEQ_CLS", None) if of_transformers else (None,)
    for task in tasks:
        saved = _untied(model, _head_modules(head, _PEFT_HEADS if task else ()))
        for modules in (saved, []):  # if not named, PEFT loads the head's tensors into the base model
            for targets in (endings, pattern):
                config = form.adapter.peft_config(targets, modules_to_save=modules, base_model=base_model)
                config.task_type, config.inference_mode, config.auto_mapping = task, True, ours
                config.fan_in_fan_out = _is_transposed(model, adapted)
                config.rank_pattern, config.alpha_pattern = _patterns(form)
                if _matches(config, names) == adapted and _holds_only(saved, _wrapped(config, names)):
                    return config
    raise ModelError(f"PEFT cannot name the adapted layers of {type(model).__name__} apart: export it merged")


def on_mean_pooled(folder: Path) -> bool:
    """Whether the adapter in a folder was trained with a head that reads the mean over tokens."""
    try:
        noted = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["auto_mapping"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return isinstance(noted, dict) and noted.get("base_model_class") == POOLED


def _patterns(form: LoraForm) -> tuple[dict[str, int], dict[str, float]]:
    """The rank, and the alpha that keeps the scale, of every matrix whose rank is not the adapter's."""
    adapter = form.adapter
    # ^: a pattern of PEFT that matches this name alone, and not other names with the same ending
    ranks = {
        f"^{re.escape(name)}": a.shape[0] for name, (a, _) in sorted(form.factors.items()) if a.shape[0] != adapter.rank
    }
    return ranks, {
        name: adapter.scaling * (math.sqrt(rank) if adapter.rslora else rank) for name, rank in ranks.items()
    }


def _is_transposed(model: nn.Module, adapted: Set[str]) -> bool:
    """Whether the adapted layers keep W^T, as GPT-2's do."""
    inside = tuple(f"{name}." for name in adapted)
    return any(
        isinstance(module, Conv1D)
        for name, module in model.named_modules()
        if name in adapted or name.startswith(inside)
    )


def _tensors(
    model: nn.Module, head: Sequence[str], form: LoraForm, places: Collection[str], config: LoraConfig
) -> dict[str, Tensor]:
    """The factors, the head, and all other tensors of the modules that PEFT trains in full."""
    state = model.state_dict()
    whole = _wrapped(config, _names_outside(model, places))
    rest = [name for name in state if name in head or any(name.startswith(f"{module}.") for module in whole)]
    found = {name: state[name] for name in rest}
    for module, (a, b) in form.factors.items():
        found |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    return {_PEFT_ROOT + name: found[name].detach().cpu().contiguous() for name in sorted(found)}


def _names_outside(model: nn.Module, places: Collection[str]) -> list[str]:
    """Module names as they were before the adapters went in."""
    inner = tuple(f"{name}." for name in places)
    return [name for name, _ in model.named_modules() if name and not name.startswith(inner)]


def _head_modules(head: Sequence[str], roots: Sequence[str]) -> list[str]:
    """The modules that own the head's parameters, or the enclosing module whose name ends in one of `roots`."""
    found = set()
    for name in head:
        parts = name.split(".")[:-1]
        paths = [".".join(parts[: depth + 1]) for depth in range(len(parts))] or [""]
        found.add(next((path for path in paths if path.endswith(tuple(roots))), paths[-1]))
    return sorted(found)


def _untied(model: nn.Module, modules: Sequence[str]) -> list[str]:
    """The modules that share no parameter with the rest of the model: PEFT trains a copy, and the rest would keep the old."""
    places = [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]

    def owned(module: str, *, inside: bool) -> set[int]:
        return {parameter for name, parameter in places if name.startswith(f"{module}.") is inside}

    return [one for one in modules if owned(one, inside=True).isdisjoint(owned(one, inside=False))]


def _to_save(config: LoraConfig) -> list[str]:
    return [*(config.modules_to_save or ()), *(_PEFT_HEADS if config.task_type else ())]


def _matches(config: LoraConfig, names: Sequence[str]) -> set[str]:
    """The modules that PEFT would adapt."""
    seen = copy.copy(config)
    seen.modules_to_save = _to_save(config)
    return {name for name in names if check_target_module_exists(seen, name)}


def _wrapped(config: LoraConfig, names: Sequence[str]) -> list[str]:
    """The modules that PEFT would train in full: it compares the endings of names."""
    return [name for name in names if name.endswith(tuple(_to_save(config)))]


def _holds_only(saved: Sequence[str], wrapped: Sequence[str]) -> bool:
    """Whether PEFT would wrap only modules of the head, and none inside another."""
    nested = any(inner.startswith(f"{outer}.") for outer in wrapped for inner in wrapped)
    return not nested and set(wrapped) <= set(saved)
