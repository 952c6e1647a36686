"""Facts from a model's files: on its text part, which may have a configuration of its own, and on its use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from secure_fed.config import ModelConfig
from secure_fed.learning.models.locate import found

_POOLING = "1_Pooling/config.json"  # of sentence-transformers


def of_text(config: Any) -> Any:
    """The configuration of the text part; the whole configuration if it has no parts, or is not from transformers."""
    return getattr(config, "get_text_config", lambda: config)()


def width_of(config: Any) -> int | None:
    """The width of a model's hidden states, if its configuration names it."""
    width = getattr(of_text(config), "hidden_size", None)
    return width if isinstance(width, int) else None


def is_pooled(config: Any) -> bool:
    """Whether the configuration is for the classifier in `mean_pooled`, whose head reads the mean over tokens."""
    return getattr(config, "model_type", None) == "mean_pooled"


def class_names(model: nn.Module) -> tuple[str, ...]:
    """The names of classes in a model's configuration, in order; empty for a module without a configuration."""
    names: Mapping[int, str] = getattr(getattr(model, "config", None), "id2label", None) or {}
    return tuple(str(names[index]) for index in sorted(names))


def name_of(model: nn.Module) -> str:
    """The name of a model's class; with our own head (`mean_pooled`), the name of its base model's class."""
    ours = is_pooled(getattr(model, "config", None))
    return type(model.get_submodule("encoder") if ours else model).__name__


def kind_of(model: nn.Module) -> str:
    """The architecture, such as "bert", by which PEFT chooses layers to adapt; "" for a module without a configuration."""
    return str(getattr(of_text(getattr(model, "config", None)), "model_type", ""))


def reads_the_mean(model: nn.Module) -> bool:
    """Whether a classifier's head reads the mean over tokens: our own (`mean_pooled`), or a class of transformers."""
    return getattr(getattr(model, "config", None), "classifier_pooling", None) == "mean"


def positions_of(model: nn.Module) -> int | None:
    """The number of tokens that the model has positions for; None if there is no limit, or the model names none."""
    limit = getattr(of_text(getattr(model, "config", None)), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    learned = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    before = getattr(next(learned, None), "padding_idx", None)  # RoBERTa's positions start after its padding token
    return limit if before is None else limit - before - 1


def means_tokens(config: ModelConfig) -> bool:
    """Whether a model is a sentence encoder for the mean over its tokens, by its sentence-transformers configuration."""
    from transformers.utils.hub import cached_file

    place, chosen = found(config)
    try:
        noted = json.loads(Path(str(cached_file(place, _POOLING, **chosen))).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(noted, dict):
        return False
    of_old = noted.get("pooling_mode_mean_tokens") and not noted.get("pooling_mode_cls_token")
    return bool(noted.get("pooling_mode", "mean" if of_old else "") == "mean")
