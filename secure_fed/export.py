"""A trained model as a folder that others can load: a PEFT adapter, or the whole model with the adapter merged in.

Either is written beside its destination and renamed into place, so that an export which fails or is killed leaves no
half of one there. It is not waited for the disk, as a checkpoint is: after a power cut, export again.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor, nn

from secure_fed.adapters.lora import LoraAdapter, pairs
from secure_fed.errors import ModelError, UsageError
from secure_fed.model_card import ModelCard
from secure_fed.models.loading import locate, quiet

_PEFT_ROOT = "base_model.model."
# What PEFT's class for sequence classification trains in full without being told.
_PEFT_HEADS = ("classifier", "score")


class Tokenizer(Protocol):
    """Anything that `transformers` calls a tokenizer, as far as an export needs it."""

    def save_pretrained(self, save_directory: Any) -> Any: ...


def write_adapter(
    out_dir: Path,
    model: nn.Module,
    head: Sequence[str],
    *,
    adapter: LoraAdapter,
    card: ModelCard,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write the adapter and the head of `model` as a standard PEFT folder.

    model: the module that a method's `prepare` adapted, with the trained tensors loaded. `PeftModel.from_pretrained` on a
    fresh base model of the same kind computes what `model` does.
    """
    config = _peft_config(model, head, adapter, locate(card.base_model) if card.base_model else None)
    tensors = _adapter_tensors(model, head, config)
    with _appearing(out_dir) as folder:
        stored = safetensors.torch.save(tensors, {"format": "pt"})
        (folder / "adapter_model.safetensors").write_bytes(stored)
        config.save_pretrained(str(folder))
        (folder / "README.md").write_text(card.text(merged=False), encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def write_merged(out_dir: Path, model: nn.Module, *, card: ModelCard, tokenizer: Tokenizer | None = None) -> None:
    """Write `model`, its adapters merged into its weights, as a folder for `from_pretrained`; `model` stays merged."""
    save = getattr(model, "save_pretrained", None)
    if save is None:
        raise ModelError(
            f"a merged export needs a transformers model, and {type(model).__name__} has no save_pretrained: "
            "export the adapter, or merge it with PEFT's merge_and_unload"
        )
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer) and isinstance(module, nn.Module):
            module.merge(safe_merge=True)
            model.set_submodule(name, module.get_base_layer())
    model.__dict__.pop("peft_config", None)
    with _appearing(out_dir) as folder, quiet():
        save(folder)
        (folder / "README.md").write_text(card.text(merged=True), encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def _peft_config(model: nn.Module, head: Sequence[str], adapter: LoraAdapter, base_model: str | None) -> LoraConfig:
    """The shortest configuration that PEFT's own matching of names reads as it is meant."""
    adapted = {pair.module for pair in pairs(name for name, _ in model.named_parameters())}
    names = _names_outside(model, adapted)
    endings = sorted({name.rpartition(".")[2] for name in adapted})
    pattern = "|".join(re.escape(name) for name in sorted(adapted))
    tasks = ("SEQ_CLS", None) if type(model).__name__.endswith("ForSequenceClassification") else (None,)
    for task in tasks:
        saved = _head_modules(head, _PEFT_HEADS if task else ())
        for modules in (saved, []):  # not named, PEFT loads the head's tensors as the base model's own
            for targets in (endings, pattern):
                config = adapter.peft_config(targets, modules_to_save=modules, base_model=base_model)
                config.task_type, config.inference_mode = task, True
                config.fan_in_fan_out = any(getattr(module, "fan_in_fan_out", False) for module in model.modules())
                if _matches(config, names) == adapted and _holds_only(saved, _wrapped(config, names)):
                    return config
    raise ModelError(f"PEFT cannot name the adapted layers of {type(model).__name__} apart: export it merged")


def _adapter_tensors(model: nn.Module, head: Sequence[str], config: LoraConfig) -> dict[str, Tensor]:
    """The factors, the head, and whatever else is in a module that PEFT trains in full."""
    state = model.state_dict()
    whole = _wrapped(config, [name for name, _ in model.named_modules()])
    factors = [name for pair in pairs(state) for name in (pair.a, pair.b)]
    rest = [name for name in state if name in head or any(name.startswith(f"{module}.") for module in whole)]
    return {
        _PEFT_ROOT + name.replace(".default.weight", ".weight"): state[name].detach().cpu().contiguous()
        for name in sorted({*factors, *rest})
    }


def _names_outside(model: nn.Module, adapted: Set[str]) -> list[str]:
    """Module names as they were before the adapters went in."""
    inner = tuple(f"{name}." for name in adapted)
    return [name for name, _ in model.named_modules() if name and not name.startswith(inner)]


def _head_modules(head: Sequence[str], roots: Sequence[str]) -> list[str]:
    """The modules that own the head's parameters, or the part of the model called like one of `roots` they are in."""
    found = set()
    for name in head:
        parts = name.split(".")[:-1]
        paths = [".".join(parts[: depth + 1]) for depth in range(len(parts))] or [""]
        found.add(next((path for path in paths if path.endswith(tuple(roots))), paths[-1]))
    return sorted(found)


def _to_save(config: LoraConfig) -> list[str]:
    return [*(config.modules_to_save or ()), *(_PEFT_HEADS if config.task_type else ())]


def _matches(config: LoraConfig, names: Sequence[str]) -> set[str]:
    """Where PEFT would put adapters."""
    seen = copy.copy(config)
    seen.modules_to_save = _to_save(config)
    return {name for name in names if check_target_module_exists(seen, name)}


def _wrapped(config: LoraConfig, names: Sequence[str]) -> list[str]:
    """The modules that PEFT would train in full: it compares the ends of names."""
    return [name for name in names if name.endswith(tuple(_to_save(config)))]


def _holds_only(saved: Sequence[str], wrapped: Sequence[str]) -> bool:
    """Whether PEFT would wrap modules of the head alone, and none inside another."""
    nested = any(inner.startswith(f"{outer}.") for outer in wrapped for inner in wrapped)
    return not nested and set(wrapped) <= set(saved)


@contextmanager
def _appearing(out_dir: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out_dir` if all goes well and is gone if not."""
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise UsageError(f"{out_dir} exists and is not an empty folder: give a new one to export to")
    folder = out_dir.parent / f".{out_dir.name}.{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True)
        yield folder
        if out_dir.exists():
            out_dir.rmdir()
        os.replace(folder, out_dir)
    except OSError as error:
        raise UsageError(f"cannot export to {out_dir}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
