"""The table that `secure-fed methods` prints: every method, counted for one model.

Models are counted on the device "meta", which has shapes and no numbers, so a folder that holds a `config.json` is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from secure_fed.activity import activity
from secure_fed.config import ModelConfig, RunConfig
from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning import tasks
from secure_fed.learning.models import quantised
from secure_fed.learning.models.architecture import width_of
from secure_fed.learning.models.loading import (
    explained,
    has_weights,
    head_names,
    head_of,
    outline,
    pooler_names,
    quiet,
    require_decoder,
)
from secure_fed.learning.models.locate import found as located
from secure_fed.methods import METHODS, build, card
from secure_fed.methods.method import Method, State
from secure_fed.tensors.tensors import wire_size

COUNTED = ("pooling", "quantization", "revision", "trust_remote_code")  # settings of [model] that may change a count
_EVERYWHERE = ("modules_to_save", "personal")  # settings of [method] that every method reads
_UNCOUNTED = ("trainable", "bytes_per_round", "bytes_up", "bytes_down")


def catalogue(
    model: str, overrides: Iterable[str] = (), classes: int | None = 2, task: str = "classification"
) -> list[dict[str, Any]]:
    """A row for every method, with what the task trains of the named model: a head for `classes` classes, or none.

    overrides: `method.key=value`, and settings of [model] that `COUNTED` names; a method that does not read a setting is
    counted without it. task: as `data.task`; classes: None for a task without classes.
    bytes_up and bytes_down are the bytes that one client sends and receives in the method's first round, unmasked, and
    bytes_per_round is their sum. For a method that does not fit this model, or not with these settings, they are None, and
    not_applicable says why. lr: the learning rate in this model where training.lr is not set; head_factor: the rate of the
    head's last layer divided by lr, without privacy.
    """
    settings, run = _settings(_run(task, model), overrides)
    skeleton = _Skeleton.of(run, classes)
    rows = []
    with activity("counting methods", len(METHODS)) as now:
        for name in METHODS:
            now.step()
            rows.append(_row(name, settings, skeleton))
    return rows


def on(
    model: str, classes: int | None = 2, pooling: str = "model", task: str = "classification"
) -> Iterator[tuple[str, Method, State]]:
    """Every method that supports client-level privacy and fits the model, with its first state; also FRA with sketches."""
    skeleton = _Skeleton.of(_run(task, model).replace({("model", "pooling"): pooling}), classes)
    variants: dict[str, tuple[str, dict[tuple[str, str], Any]]] = {name: (name, {}) for name in METHODS}
    variants["fra_lora, sketches"] = "fra_lora", {("method", "transport_form"): "sketch"}
    for shown, (name, own) in variants.items():
        run = skeleton.run.replace({("method", "name"): name, **own})
        try:
            method = build(run)
            state = _prepared(method, skeleton, run.method.modules_to_save)
        except (MethodError, ConfigError):
            continue
        if "client" in method.card.units:
            yield shown, method, state


def _run(task: str, model: str) -> RunConfig:
    """A run of the task, on data that nobody reads."""
    data = {} if task == "classification" else {("data", "task"): task, ("data", "train"): "nobody.jsonl"}
    return RunConfig().replace({("model", "name"): model, ("model", "max_length"): 2, **data})


def _settings(run: RunConfig, overrides: Iterable[str]) -> tuple[dict[str, Any], RunConfig]:
    """The settings of [method] that were changed, and the run with those of [model] changed."""
    usual, settings = run.to_dict(), {}
    changed = run.override(overrides)
    for section, table in changed.to_dict().items():
        for name in (name for name, value in table.items() if value != usual[section][name]):
            if section == "method" and name not in ("name", "ranks", "ranks_column"):
                settings[name] = table[name]
            elif section != "model" or name not in COUNTED:
                keys = f"set keys of [method], but not name or ranks, or of [model] {', '.join(COUNTED)}"
                raise ConfigError(f"--set {section}.{name} changes no count: {keys}").about(
                    f"{section}.{name}", table[name], "left out"
                )
    return settings, replace(run, model=changed.model)


@dataclass(frozen=True)
class _Skeleton:
    """The shapes of a task's model, and the names of its parameters that are not pre-trained.

    auto: the Auto class of transformers that makes it. run: a run of the task, with `model.quantization` as the model is
    stored.
    """

    config: Any
    head: tuple[str, ...]
    auto: str
    run: RunConfig

    @classmethod
    def of(cls, run: RunConfig, classes: int | None) -> _Skeleton:
        """The skeleton of the run's model.

        Without weights, and of a checkpoint that is stored quantised, its head is the parameters that a usual checkpoint lacks.
        """
        task, labels = tasks.build(run.data), [str(label) for label in range(classes or 0)]
        place, chosen = located(replace(run.model, quantization="none"))
        config = _described(run.model, place, chosen, task.model_settings(labels))
        if task.auto == "AutoModelForCausalLM":
            require_decoder(run.model.name, config)
        if stored := quantised.stored_as(config):
            run = run.replace({("model", "quantization"): stored})
        elif has_weights(place):
            return cls(*outline(run.model, task, labels), task.auto, run)
        found = cls(config, (), task.auto, run)
        if task.keeps_head:
            return found
        model = found.model()
        return replace(found, head=head_names(model) + pooler_names(model))

    def model(self) -> nn.Module:
        import transformers

        with quiet(), explained(self.run.model.name), torch.device("meta"):
            made: nn.Module = getattr(transformers, self.auto).from_config(
                self.config, dtype=torch.float32, trust_remote_code=self.run.model.trust_remote_code
            )
        return made


def _described(settings: ModelConfig, place: str, chosen: Mapping[str, Any], outputs: Mapping[str, Any]) -> Any:
    """The configuration of the model with these outputs."""
    from transformers import AutoConfig

    from secure_fed.learning.models.mean_pooled import MeanPooledConfig

    with quiet(), explained(settings.name):
        base = AutoConfig.from_pretrained(place, **chosen, **outputs)
        pooled = settings.pooling == "mean" and not isinstance(base, MeanPooledConfig)
        return MeanPooledConfig(base, **outputs) if pooled else base


def _row(name: str, settings: Mapping[str, Any], skeleton: _Skeleton) -> dict[str, Any]:
    described, width = card(name), width_of(skeleton.config)
    read = {*described.options, *_EVERYWHERE}
    own = {("method", key): value for key, value in settings.items() if key in read}
    row = {
        **{name: getattr(described, name) for name in ("name", "paper", "travels", "mean_exact")},
        "units": ["none", *described.units],
        "refusals": dict(described.refusals),
        "lr": described.lr_of(width, decoder=skeleton.auto == "AutoModelForCausalLM"),
        "head_factor": described.head_factor_of(width) if skeleton.head else 1.0,
    }
    try:
        run = skeleton.run.replace({("method", "name"): name, **own})
        return row | _counted(build(run), skeleton, run.method.modules_to_save) | {"not_applicable": None}
    except (MethodError, ConfigError) as error:
        return row | dict.fromkeys(_UNCOUNTED) | {"not_applicable": str(error)}


def _counted(method: Method, skeleton: _Skeleton, saved: Sequence[str]) -> dict[str, int]:
    state = _prepared(method, skeleton, saved)
    plan = method.plan(state)
    after = state.tensors.select(plan.trainable)
    if len(plan.passes) == 1:  # a contribution in factors, if the method sends factors
        up = method.contribute(plan.passes[0], state.tensors, after, {}).wire_size
    else:  # dense matrices
        layouts = [method.layout(state, pass_name) for pass_name in plan.passes]
        up = sum(wire_size(tuple((name, shape, torch.float32) for name, shape in one.entries)) for one in layouts)
    down = state.tensors.select(plan.down).wire_size
    return {"trainable": after.numel, "bytes_per_round": up + down, "bytes_up": up, "bytes_down": down}


def _prepared(method: Method, skeleton: _Skeleton, saved: Sequence[str]) -> State:
    model = skeleton.model()
    return State(method.prepare(model, head_of(model, skeleton.head, saved), seed=0))
