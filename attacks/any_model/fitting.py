"""Whether a configuration can train an audited model's shadows: same starting weights, architecture, and kind of adapter."""

from __future__ import annotations

import json
from typing import Any

from attacks.any_model.in_options import in_options
from attacks.any_model.subject import Asked
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.export.peft_folder import on_mean_pooled
from secure_fed.learning.models.architecture import is_pooled, of_text
from secure_fed.learning.models.loading import explained, quiet
from secure_fed.learning.models.locate import locate

FEWEST = 4
_SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


def require_fits(config: RunConfig, asked: Asked, count: int) -> None:
    """ConfigError if the configuration's shadows would be models of another kind, or if `count` is too small."""
    if count < FEWEST:
        raise ConfigError(f"--shadows is {count}: at least {FEWEST}, and 16 to see a small leak")
    begun, audited = config.model.name, asked.model
    with in_options(texts=False):
        _read(audited)  # errors below are about the configuration's model
    same = str(locate(begun)) == str(locate(audited))
    if asked.adapter is not None and not same:
        raise _refused(begun, f"and the audited adapter is on {audited}: set model.name to that")
    if asked.adapter is None and same:
        raise _refused(
            begun,
            "which is the audited model itself, and has seen the members: set model.name to the base model of its training",
        )
    for name in _SIZES:
        ours, theirs = (getattr(of_text(_read(one)), name, None) for one in (begun, audited))
        if ours != theirs:
            raise _refused(
                begun, f"with {name} = {ours}, and {audited} has {theirs}: name the base model of its training"
            )
    _require_head(config, asked)
    if asked.adapter is not None:
        _require_rank(config, asked)


def _require_head(config: RunConfig, asked: Asked) -> None:
    """Require that the shadows' head reads the same input as the audited model's head."""
    ours = config.model.pooling == "mean" or is_pooled(_read(config.model.name))
    theirs = on_mean_pooled(asked.adapter) if asked.adapter is not None else is_pooled(_read(asked.model))
    if ours != theirs:
        wanted = "mean" if theirs else "model"
        raise ConfigError(
            f"--config has model.pooling = {config.model.pooling!r}, and the audited model's head reads another pooling: "
            f"set model.pooling = {wanted!r}"
        ).about("model.pooling", config.model.pooling, f"{wanted!r}, as in the audited model")


def _require_rank(config: RunConfig, asked: Asked) -> None:
    """Require the audited adapter's rank. Only PEFT's adapters state one."""
    try:
        noted = json.loads((asked.adapter / "adapter_config.json").read_text(encoding="utf-8")) if asked.adapter else {}
    except (OSError, ValueError):
        return
    rank = noted.get("r")
    if noted.get("peft_type") == "LORA" and config.method.name in _OF_FACTORS and rank != config.method.rank:
        raise ConfigError(
            f"--config trains adapters of rank {config.method.rank}, and {asked.adapter} has rank {rank}: set "
            f"method.rank = {rank}"
        ).about("method.rank", config.method.rank, f"the rank of the adapter, {rank}")


def _read(name: str) -> Any:
    import transformers

    with quiet(), explained(name):
        return transformers.AutoConfig.from_pretrained(locate(name))


def _refused(begun: str, why: str) -> ConfigError:
    return ConfigError(f"--config trains {begun}, {why}").about("model.name", begun, "the base model of that training")


_OF_FACTORS = ("fedlora", "ffa_lora", "fra_lora", "rolora")
