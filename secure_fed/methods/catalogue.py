"""The table that `secure-fed methods` prints: every method, counted for one model.

Models are counted on the device "meta", which has shapes and no numbers, so a folder that holds a `config.json` is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secure_fed.activity import activity
from secure_fed.config import DataConfig, ModelConfig, RunConfig
from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning import tasks
from secure_fed.learning.models.architecture import width_of
from secure_fed.learning.models.loading import (
    explained,
    head_names,
    head_of,
    load,
    pooler_names,
    quiet,
)
from secure_fed.learning.models.locate import locate
from secure_fed.methods import METHODS, build, card
from secure_fed.methods.method import Method, RoundPlan, State
from secure_fed.tensors.tensors import Tensors
from secure_fed.tensors.wire_size import wire_size

_EVERYWHERE = ("modules_to_save", "personal")  # settings of [method] that every method reads
_UNCOUNTED = ("trainable", "bytes_per_round", "bytes_up", "bytes_down")


def catalogue(model: str, overrides: Iterable[str] = (), classes: int = 2) -> list[dict[str, Any]]:
    """A row for every method, with a head for `classes` classes on the named model.

    overrides: `method.key=value`, and `model.pooling=mean`; a method that does not read a setting is counted without it.
    bytes_up and bytes_down are the bytes that one client sends and receives in the method's first round, unmasked, and
    bytes_per_round is their sum. For a method that does not fit this model, or not with these settings, they are None, and
    not_applicable says why. lr: the learning rate in this model where training.lr is not set; head_factor: the rate of the
    head's last layer divided by lr, without privacy.
    """
    settings, pooling = _settings(overrides)
    skeleton = _Skeleton.of(model, classes, pooling)
    rows = []
    with activity("counting methods", len(METHODS)) as now:
        for name in METHODS:
            now.step()
            rows.append(_row(name, settings, skeleton))
    return rows


def on(model: str, classes: int = 2, pooling: str = "model") -> Iterator[tuple[str, Method, State]]:
    """Every method that supports client-level privacy and fits the model, with its first state; also FRA with sketches."""
    skeleton = _Skeleton.of(model, classes, pooling)
    variants: dict[str, tuple[str, dict[tuple[str, str], Any]]] = {name: (name, {}) for name in METHODS}
    variants["fra_lora, sketches"] = "fra_lora", {("method", "transport_form"): "sketch"}
    for shown, (name, own) in variants.items():
        run = RunConfig().replace({("method", "name"): name, ("model", "max_length"): 2, **own})
        try:
            method = build(run)
            state = _prepared(method, skeleton, run.method.modules_to_save)
        except (MethodError, ConfigError):
            continue
        if "client" in method.card.units:
            yield shown, method, state


def _settings(overrides: Iterable[str]) -> tuple[dict[str, Any], str]:
    """The settings of [method] that were changed, and `model.pooling`."""
    usual, settings = RunConfig().to_dict(), {}
    changed = RunConfig().override(overrides)
    for section, table in changed.to_dict().items():
        for name in (name for name, value in table.items() if value != usual[section][name]):
            if section == "method" and name != "name":
                settings[name] = table[name]
            elif (section, name) != ("model", "pooling"):
                keys = "set keys of [method], and not its name, or model.pooling"
                raise ConfigError(f"--set {section}.{name} changes no count: {keys}")
    return settings, changed.model.pooling


@dataclass(frozen=True)
class _Skeleton:
    """The shapes of a classifier, and the names of its parameters that are not pre-trained."""

    config: Any
    head: tuple[str, ...]

    @classmethod
    def of(cls, name: str, classes: int, pooling: str) -> _Skeleton:
        """The skeleton of a named model. Without weights, its head is the parameters that a usual checkpoint lacks."""
        folder = Path(locate(name))
        if not folder.is_dir() or any(any(folder.glob(f"*.{ending}")) for ending in ("safetensors", "bin")):
            labels = [str(label) for label in range(classes)]
            settings = ModelConfig(name=name, max_length=2, pooling=pooling)
            loaded = load(settings, tasks.build(DataConfig()), labels, seed=0)
            return cls(loaded.model.config, loaded.head)
        from transformers import AutoConfig

        from secure_fed.learning.models.mean_pooled import MeanPooledConfig

        with quiet(), explained(name):
            base = AutoConfig.from_pretrained(str(folder), num_labels=classes)
            if pooling == "mean" and not isinstance(base, MeanPooledConfig):
                base = MeanPooledConfig(base, num_labels=classes)
            found = cls(base, ())
            model = found.model()
        return cls(found.config, head_names(model) + pooler_names(model))

    def model(self) -> nn.Module:
        from transformers import AutoModelForSequenceClassification

        with quiet(), torch.device("meta"):
            made: nn.Module = AutoModelForSequenceClassification.from_config(self.config, dtype=torch.float32)
        return made


def _row(name: str, settings: Mapping[str, Any], skeleton: _Skeleton) -> dict[str, Any]:
    described, width = card(name), width_of(skeleton.config)
    read = {*described.options, *_EVERYWHERE}
    own = {("method", key): value for key, value in settings.items() if key in read}
    row = {
        **{name: getattr(described, name) for name in ("name", "paper", "travels", "mean_exact")},
        "units": ["none", *described.units],
        "refusals": dict(described.refusals),
        "lr": described.lr_of(width),
        "head_factor": described.head_factor_of(width),
    }
    try:
        run = RunConfig().replace({("method", "name"): name, ("model", "max_length"): 2, **own})
        return row | _counted(build(run), skeleton, run.method.modules_to_save) | {"not_applicable": None}
    except (MethodError, ConfigError) as error:
        return row | dict.fromkeys(_UNCOUNTED) | {"not_applicable": str(error)}


def _counted(method: Method, skeleton: _Skeleton, saved: Sequence[str]) -> dict[str, int]:
    state = _prepared(method, skeleton, saved)
    plan = method.plan(state)
    after = state.tensors.select(plan.trainable)
    up = _up(method, state, plan, after)
    down = state.tensors.select(plan.down).wire_size
    return {"trainable": after.numel, "bytes_per_round": up + down, "bytes_up": up, "bytes_down": down}


def _prepared(method: Method, skeleton: _Skeleton, saved: Sequence[str]) -> State:
    model = skeleton.model()
    return State(method.prepare(model, head_of(model, skeleton.head, saved), seed=0))


def _up(method: Method, state: State, plan: RoundPlan, after: Tensors) -> int:
    """The bytes of a contribution, in factors if the method sends factors; with several passes, as dense matrices."""
    if len(plan.passes) == 1:
        return method.contribute(plan.passes[0], state.tensors, after, {}).wire_size
    return sum(
        wire_size(tuple((name, shape, torch.float32) for name, shape in method.layout(state, pass_name).entries))
        for pass_name in plan.passes
    )
