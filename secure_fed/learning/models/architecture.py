"""What a model's configuration and its layers say about it.

The text part of a model may have a configuration of its own (`of_text`). Some layers break a guarantee for examples, which
needs two properties: an example's loss depends on that example alone, and the computed per-example gradient is its gradient.
`require_supported` refuses violations that the model's layers show, and `couples_examples` recognises models that compute one
example at a time. Trials find the rest (`training/trials.py`, `training/pass_shapes.py`). An `Objective` has no layers with
running statistics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from secure_fed.config import ModelConfig
from secure_fed.errors import MethodError, ModelError
from secure_fed.learning.models.locate import found
from secure_fed.learning.models.quantised import couples_rows

# Class names of layers that route tokens to experts.
_EXPERTS = re.compile(r"M[oO][eE](?![a-z])|Router(?![a-z])|Experts?(?![a-z])|SparseMLP")
# Parts of the names of parameters whose per-example gradients are not proven, and what to do.
_UNPROVEN = {
    "lora_magnitude_vector": "the per-example gradients of DoRA's magnitudes are not proven; set use_dora to false",
    "lora_embedding_": "the per-example gradients of LoRA on embeddings are not proven; adapt linear layers only",
    "trainable_tokens": "the per-example gradients of trainable_token_indices are not proven; leave it out",
    "token_adapter": "the per-example gradients of trainable_token_indices are not proven; leave it out",
}
# PEFT's initialisations that read data: activations (EVA, CorDA), or gradients (LoRA-GA).
_DATA_DRIVEN = ("eva", "corda", "lora_ga", "loraga")


def of_text(config: Any) -> Any:
    """The configuration of the text part; the whole configuration if it has no parts, or is not from transformers."""
    return getattr(config, "get_text_config", lambda: config)()


def width_of(config: Any) -> int | None:
    """The width of a model's hidden states, if its configuration names it; 0 for a module without a configuration."""
    if config is None:
        return 0
    width = getattr(of_text(config), "hidden_size", None)
    return width if isinstance(width, int) else None


def positions_of(model: nn.Module) -> int | None:
    """The number of tokens that the model has positions for; None if there is no limit, or the model names none."""
    limit = getattr(of_text(getattr(model, "config", None)), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    learned = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    before = getattr(next(learned, None), "padding_idx", None)  # RoBERTa's positions start after its padding token
    return limit if before is None else limit - before - 1


def kind_of(model: nn.Module) -> str:
    """The architecture, such as "bert", by which PEFT chooses layers to adapt; "" for a module without a configuration."""
    return str(getattr(of_text(getattr(model, "config", None)), "model_type", ""))


def name_of(model: nn.Module) -> str:
    """The name of a model's class; with our own head (`mean_pooled`), the name of its base model's class."""
    ours = is_pooled(getattr(model, "config", None))
    return type(model.get_submodule("encoder") if ours else model).__name__


def class_names(model: nn.Module) -> tuple[str, ...]:
    """The names of classes in a model's configuration, in order; empty for a module without a configuration."""
    names: Mapping[int, str] = getattr(getattr(model, "config", None), "id2label", None) or {}
    return tuple(str(names[index]) for index in sorted(names))


def is_pooled(config: Any) -> bool:
    """Whether the configuration is for the classifier in `mean_pooled`, whose head reads the mean over tokens."""
    return getattr(config, "model_type", None) == "mean_pooled"


def reads_the_mean(model: nn.Module) -> bool:
    """Whether a classifier's head reads the mean over tokens: our own (`mean_pooled`), or a class of transformers."""
    return getattr(getattr(model, "config", None), "classifier_pooling", None) == "mean"


def means_tokens(config: ModelConfig) -> bool:
    """Whether a model is a sentence encoder for the mean over its tokens, by its sentence-transformers configuration."""
    from transformers.utils.hub import cached_file

    place, chosen = found(config)
    try:
        noted = json.loads(Path(str(cached_file(place, "1_Pooling/config.json", **chosen))).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(noted, dict):
        return False
    of_old = noted.get("pooling_mode_mean_tokens") and not noted.get("pooling_mode_cls_token")
    return bool(noted.get("pooling_mode", "mean" if of_old else "") == "mean")


def couples_examples(model: nn.Module) -> bool:
    """Whether examples of a batch are known to move each other's numbers: by experts, or by outliers in 8 bits.

    A batch of one example couples nothing.
    """
    return mixes_experts(model) or couples_rows(model)


def mixes_experts(model: nn.Module) -> bool:
    """Whether a layer routes tokens to experts, as far as class names tell.

    An expert processes the tokens of all examples of a batch together: with a capacity it drops tokens beyond it, and without a
    capacity its rounding depends on the number of tokens of all examples. A batch of one example couples nothing.
    """
    return any(_EXPERTS.search(type(module).__name__) for module in model.modules())


def require_supported(model: nn.Module, trainable: Collection[str]) -> None:
    """Refuse, by name, layers and parameters without proven per-example gradients."""
    require_data_free_start(model)
    for name in trainable:
        reason = next((reason for part, reason in _UNPROVEN.items() if part in name), None)
        if reason:
            raise MethodError(f"{name} cannot train under example-level privacy: {reason}")


def require_data_free_start(model: nn.Module) -> None:
    """Refuse what reveals data without noise for any unit: adapters that PEFT initialised from it, and `max_norm`."""
    for name, module in model.named_modules():  # the shortened rows show which tokens occur
        most = module.max_norm if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None
        if most is not None:
            raise ModelError(
                f"layer {name or type(model).__name__} of the model is {type(module).__name__} with max_norm = {most:g}, which "
                "shortens the rows of a batch's tokens whenever it runs, without noise; set max_norm = None"
            )
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, Mapping) else ():
        start = getattr(config, "init_lora_weights", None)
        if isinstance(start, str) and start.lower() in _DATA_DRIVEN:
            raise MethodError(
                f"the model's adapters were started by {start!r}, which reads the data, so the start itself would leak them; "
                "use a start without data, or set privacy.unit to none"
            )
