"""What a configuration must be for a user's function to be the local step (`learning/training/local_function.py`)."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from torch import nn

from secure_fed.config import RunConfig, TrainingConfig
from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning.models.devices import is_divided
from secure_fed.methods.method import Method, OwnObjective


def require_function(local: Any) -> None:
    """Refuse what cannot be called as local(model, examples, round)."""
    try:
        fits = callable(local) and bool(inspect.signature(local).bind(None, (), 1))
    except TypeError:
        fits = False
    except ValueError:  # a callable without a signature
        fits = True
    if not fits:
        message = f"local is {local!r:.80}; give a function of three arguments, local(model, examples, round)"
        raise ConfigError(message).about("local", local, "a function of (model, examples, round)")


def require_trainable(config: RunConfig, method: Method) -> None:
    """Refuse a guarantee that a function cannot keep, and a method whose training is more than the change of its tensors.

    A client's contribution is clipped whatever computed it. That the gradient of each example was, nobody can see.
    """
    if (unit := config.privacy.unit) in ("example", "person"):
        raise ConfigError(
            f"privacy.unit = {unit!r} is refused with local: it cannot be shown that a function clips the gradient of each "
            "example; set privacy.unit = 'client', or train with secure-fed's own steps"
        ).about("privacy.unit", unit, "'none' or 'client' with local")
    if isinstance(method, OwnObjective):
        raise MethodError(
            f"{method.card.name} trains on a loss of its own, which local does not see: choose a method that trains on the "
            "task's loss"
        ).about("method.name", method.card.name, "a method without a loss of its own")
    if config.method.ranks or config.method.ranks_column:
        raise ConfigError(
            "method.ranks is set, and local trains a model that has all ranks of the adapter: leave it out"
        ).about("method.ranks", config.method.ranks, "not set with local")
    require_undivided(config)


def require_undivided(config: RunConfig, model: nn.Module | None = None) -> None:
    """Refuse a model that accelerate divides over devices, or has divided."""
    if config.model.device_map or (model is not None and is_divided(model)):
        raise ConfigError(
            "local trains a copy of the model, and a model divided over devices is not copied: load it on one device, without "
            "model.device_map"
        ).about("model.device_map", config.model.device_map, "not set with local")


def require_read(config: RunConfig) -> None:
    """Refuse settings of secure-fed's own steps where all clients train by a function, and open ones that follow from these.

    Without privacy, a unit of an audit that moves along a direction moves as far as the steps of [training].
    """
    for setting in fields(TrainingConfig):
        if (value := getattr(config.training, setting.name)) != setting.default:
            raise ConfigError(
                f"training.{setting.name} = {value!r} has no effect here: local trains, and decides this itself; leave it out"
            ).about(f"training.{setting.name}", value, "left out with local")
    if "," in config.model.device:
        raise ConfigError(
            f"model.device = {config.model.device!r} names several devices, and local trains one client after the other: name "
            "one"
        ).about("model.device", config.model.device, "one device with local")
    if config.privacy.unit == "client" and config.privacy.clip_norm is None:
        raise ConfigError(
            "privacy.clip_norm is not set, and its default is the length of one of secure-fed's own steps: set it to the "
            "length of the change that local makes in a round, such as its median on public data"
        ).about("privacy.clip_norm", None, "set with local")
    evaluation = config.evaluation
    if config.privacy.unit == "none" and (evaluation.dummies or evaluation.canaries == "direction"):
        name = "dummies" if evaluation.dummies else "canaries"
        value = getattr(evaluation, name)
        raise ConfigError(
            f"evaluation.{name} = {value!r} is refused with local and without privacy: an audited unit would move as far as "
            "secure-fed's own steps, and it is unknown how far local moves; set privacy.unit = 'client', or leave it out"
        ).about(f"evaluation.{name}", value, "left out with local and privacy.unit = 'none'")
