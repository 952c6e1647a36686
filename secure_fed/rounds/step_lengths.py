"""How long steps are where settings leave it open: of a client's training, of its contribution, and of the server."""

from __future__ import annotations

import math
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.config.sections import MOMENTUM
from secure_fed.errors import ConfigError
from secure_fed.methods.method import Method, Shrinking

Settings = dict[tuple[str, str], Any]
_PRIVATE_BATCH, _LONGER = 256, 4
_FAR, _QUIET, _TAIL = 3.2, 0.25, 4


def of_clients(config: RunConfig, lr: float, head: float, numbers: int) -> Settings:
    """The settings of local steps that are left open, and of the length that contributions are cut to.

    lr: what suits method and model. head: that of the head's last layer, over lr. numbers: how many a client trains and sends.

    The last layer is new, and a step of AdamW moves it no further than an adapter on layers that are trained already: it takes
    longer steps to keep up. Under privacy these would be most of a contribution, whose length is bounded.

    Noise is added once to a step, or to a contribution, and hides a larger share of what few examples say. So private steps are
    few and long. The rate falls to zero in the end, so that the last rounds average out what single batches do; not earlier,
    since a short run needs all of its way. Under privacy it does not fall, since a shorter contribution of a client is hidden
    by the same noise.
    """
    training, unit = config.training, config.privacy.unit
    if training.optimizer == "sgd" and training.lr is None:
        raise ConfigError(
            "training.optimizer = 'sgd' needs training.lr: a rate that is left open is AdamW's, with which SGD learns next to "
            "nothing; set training.lr"
        ).about("training.lr", None, "above 0 with training.optimizer = 'sgd'")
    batch, longer = (training.batch, 1) if unit == "none" else (_PRIVATE_BATCH, _LONGER)
    schedule = "stable_decay" if unit == "none" else "constant"
    usual = head if unit == "none" and training.optimizer == "adamw" else 1.0
    rate = longer * lr if training.lr is None else training.lr
    return {
        ("training", "batch_size"): batch if training.batch_size is None else training.batch_size,
        ("training", "lr"): rate,
        ("training", "head_factor"): usual if training.head_factor is None else training.head_factor,
        ("training", "lr_schedule"): schedule if training.lr_schedule == "auto" else training.lr_schedule,
        ("privacy", "clip_norm"): _clip_norm(config, rate, numbers) if unit != "none" else config.privacy.clip_norm,
    }


def _clip_norm(config: RunConfig, lr: float, numbers: int) -> float:
    """The length of one step of AdamW for a client's contribution, else 1.

    The first step moves each of d numbers by lr, so it is lr sqrt(d) long whatever the data are: hardly anything of it is cut,
    and none of the noise is made for contributions that nobody sends.
    """
    if config.privacy.clip_norm is not None:
        return config.privacy.clip_norm
    return lr * math.sqrt(numbers) if _by_adam(config) and numbers else config.privacy.clip


def _by_adam(config: RunConfig) -> bool:
    """Whether contributions of clients are noised whose steps have a known length."""
    return config.privacy.unit == "client" and config.training.optimizer == "adamw"


def of_server(config: RunConfig, method: Method) -> Settings:
    """The server's optimiser and the mean of models that a run ends with, where they are left open. See `paced` for the rate.

    Momentum adds up the changes that rounds agree on, while independent noise adds up to less; it needs the same coordinates in
    all rounds. Of the noise of the last rounds a single model holds all, and the mean of the last quarter of models a part.
    """
    federation, noised = config.federation, _by_adam(config)
    kind, beta = federation.server_optimizer, federation.server_momentum
    if kind == "auto":
        adds_up = not method.card.memoryless and config.method.transport_form != "sketch"
        kind = "momentum" if noised and adds_up else "mean"
        beta = MOMENTUM if beta is None and kind == "momentum" else beta
    elif kind != "mean":
        beta = federation.server_beta
    knows_the_last = config.evaluation.patience is None and not isinstance(method, Shrinking)
    last = max(1, federation.rounds // _TAIL) if noised and knows_the_last else 1
    return {
        ("federation", "server_optimizer"): kind,
        ("federation", "server_momentum"): beta,
        ("federation", "average_last"): last if federation.average_last is None else federation.average_last,
    }


def paced(config: RunConfig, share: float) -> RunConfig:
    """The configuration with the server's learning rate, if it was left open. share: see `Protection.noise_over_way`.

    Few rounds of one step each go nowhere by mean steps. So a mean moves the model 3.2 times as far, half of it at once at
    most: momentum makes up the rest, without following each round's noise. The noise on the final model grows with the steps.
    Where it would be longer than a quarter of the longest way that mean steps can travel, steps are shortened to that.
    """
    federation = config.federation
    rate, beta = federation.server_rate, federation.momentum
    if federation.server_lr is None and _by_adam(config) and federation.server_optimizer != "adam" and share:
        rate = min(_FAR / 2, _FAR * (1 - beta), _QUIET * (1 - beta) / share)
    return config.replace({("federation", "server_lr"): rate})
