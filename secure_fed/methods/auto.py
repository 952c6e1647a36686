"""`method.name = "auto"` and `model.pooling = "auto"`: the choices of docs/choosing.md, each with its reason.

A run has what was chosen in its settings, so a resumed, an audited or an exported run chooses nothing anew.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from secure_fed.config import MethodConfig, RunConfig
from secure_fed.config.settings import WRITE
from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning.models.adapters.lora import find_targets
from secure_fed.learning.models.architecture import means_tokens

AUTO = "auto"
_OF_WHOLE_TEXTS = ("classification", "multi_label", "regression")


def decided(run: RunConfig, model: nn.Module | None = None) -> tuple[RunConfig, list[str]]:
    """The run without an open choice, and a sentence with the reason for each choice. model: the user's own object."""
    said: list[str] = []
    if run.method.name == AUTO:
        found, why = _method(run, model)
        run = run.replace({("method", key): value for key, value in found.items()})
        named = ", ".join(f"method.{key} = {value!r}" for key, value in found.items())
        said.append(f"method.name = 'auto' chose {named}: {why}")
    if run.model.pooling == AUTO and model is None and run.data.task in _OF_WHOLE_TEXTS:
        mean = means_tokens(run.model)
        run = run.replace({("model", "pooling"): "mean" if mean else "model"})
        if mean:
            made = "is a sentence encoder, made for the mean over its tokens"
            said.append(f"model.pooling = 'auto' chose 'mean': {run.model.name} {made}")
    return run, said


def as_begun(run: RunConfig, stored: RunConfig) -> RunConfig:
    """The run with the choices of the stored run that it goes on with, where it leaves them open."""
    method, model = (run.method.name == AUTO) * ("name", "rule"), (run.model.pooling == AUTO) * ("pooling",)
    return run.replace(
        {("method", key): getattr(stored.method, key) for key in method}
        | {("model", key): getattr(stored.model, key) for key in model}
    )


def _method(run: RunConfig, model: nn.Module | None) -> tuple[dict[str, Any], str]:
    """The settings of [method] to choose, and why."""
    if model is not None and not _adaptable(model, run.method):
        return {"name": "fedft"}, f"no layers for an adapter are known in {type(model).__name__}, so all of it trains"
    if run.privacy.unit != "none":
        of_adapters = {field.name for field in fields(MethodConfig)} - {"name", "modules_to_save"}
        open_for_it = model is None and run.data.task in _OF_WHOLE_TEXTS and run.model.train_head
        open_for_it = open_for_it and run.model.pooling != "model" and all(map(run.method.left_alone, of_adapters))
        if open_for_it and means_tokens(run.model):
            why = f"{run.model.name} is a sentence encoder: its features often suffice, and it reads each text once"
            return {"name": "head"}, f"{why}; compare 'federa', which may learn more and takes far longer"
        if run.model.device_map or not run.method.left_alone("freeze_init"):
            return {"name": "ffa_lora"}, "with A frozen, noise reaches the model linearly"
        rule = {"rule": "ffa_lora"} if run.method.left_alone("rule") else {}
        why = "noise reaches the model linearly with A frozen, and the largest directions of the weights are its best start"
        return {"name": "federa", **rule}, why
    federation = run.federation
    if run.secure_aggregation.enabled or run.data.task in WRITE:
        return {"name": "fedlora"}, "the mean of LoRA's factors needs no matrix of a weight's size"
    if federation.aggregate != "mean" or federation.optimizer != "mean":
        return {"name": "fedlora"}, "its factors can be combined by other rules than one round's mean"
    return {"name": "fra_lora"}, "it is as accurate as averaged LoRA factors, and its mean is exact"


def _adaptable(model: nn.Module, settings: MethodConfig) -> bool:
    """Whether a LoRA adapter finds layers in the user's model."""
    try:
        return bool(find_targets(model, settings.target_modules, ()))
    except (MethodError, ConfigError):
        return bool(settings.target_modules)  # what is wrong with them is said where they are used
