"""Step lengths that the settings leave open: of a client's training, of its contribution, and of the server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.config.settings import MOMENTUM
from secure_fed.errors import ConfigError
from secure_fed.methods.method import Method, Shrinking

Settings = dict[tuple[str, str], Any]
_PRIVATE_BATCH, _LONGER = 256, 4
_FAR, _QUIET, _TAIL = 3.2, 0.25, 4


def of_clients(config: RunConfig, lr: float, head: float, numbers: int, *, own: bool) -> Settings:
    """The settings of local steps, and of the clip norm of contributions, that are left open.

    lr: the rate for method and model. head: the rate of the head's last layer, relative to lr. numbers: the number of
    coordinates that a client trains and sends. own: the mechanism is the user's.

    The last layer is new, and a step of AdamW moves it no further than an adapter on pretrained layers: it needs longer steps
    to keep up. Under privacy these would be most of a contribution, whose length is bounded.

    Noise is added once to a step, or to a contribution, and hides a larger share of the signal of few examples. So private
    steps are few and long. The rate falls to zero at the end, so that the last rounds average out the effect of single batches;
    not earlier, since a short run needs its full steps. Under privacy it does not fall, since the same noise would hide a
    client's shorter contribution.
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
        ("privacy", "clip_norm"): _clip_norm(config, rate, numbers, own=own),
    }


def local_steps(config: RunConfig, sizes: Sequence[int] | None) -> float | None:
    """The local steps of one client that takes part in every round, a mean over clients; None if it is unknown.

    sizes: the numbers of the clients' examples, where they are known.
    """
    training, rounds = config.training, config.federation.rounds
    if training.steps is not None:
        return float(rounds * training.steps)
    each = [-(-size // training.batch) for size in sizes or () if size]
    return rounds * training.epochs * fmean(each) if each else None


def _clip_norm(config: RunConfig, lr: float, numbers: int, *, own: bool) -> float | None:
    """The length of one step of AdamW for a client's contribution, else 1; none where nothing is clipped.

    The first step moves each of d numbers by lr, so it is lr sqrt(d) long for any data: hardly any of it is clipped, and little
    noise is wasted on longer contributions that nobody sends. Several steps are clipped to the length of one.
    """
    if config.privacy.clip_norm is not None or config.privacy.unit == "none":
        return config.privacy.clip_norm
    return lr * math.sqrt(numbers) if _noised(config, own=own) and numbers else config.privacy.clip


def _noised(config: RunConfig, *, own: bool) -> bool:
    """Whether noise is added to contributions of known length; a user's own mechanism may use another norm."""
    return config.privacy.unit == "client" and config.training.optimizer == "adamw" and not own


def of_server(config: RunConfig, method: Method, *, own: bool) -> Settings:
    """The server's optimiser, its rate and the mean of models that a run ends with, where they are left open.

    Momentum adds up the changes that rounds agree on, while independent noise adds up to less; it needs the same coordinates in
    all rounds. A single model contains all noise of the last rounds, and the mean of the last quarter of models only a part.
    Where noise determines the rate it stays open, for `paced`. own: the mechanism is the user's.
    """
    federation, noised = config.federation, _noised(config, own=own)
    kind, beta = federation.server_optimizer, federation.server_momentum
    if kind == "auto":
        adds_up = not method.card.memoryless and config.method.transport_form != "sketch"
        kind = "momentum" if noised and adds_up else "mean"
        if kind == "mean" and beta is not None:
            raise ConfigError(
                f"federation.server_momentum = {beta:g} has no effect here, where the server takes the mean as it is "
                "(federation.server_optimizer = 'auto'): leave it out"
            ).about("federation.server_momentum", beta, "not set")
        beta = MOMENTUM if beta is None and kind == "momentum" else beta
    elif kind != "mean":
        beta = federation.server_beta
    may_end_early = config.evaluation.patience is not None or config.privacy.on_exhausted == "stop"
    averages = noised and not may_end_early and not isinstance(method, Shrinking)
    last = max(1, federation.rounds // _TAIL) if averages else 1
    return {
        ("federation", "server_optimizer"): kind,
        ("federation", "server_momentum"): beta,
        ("federation", "server_lr"): federation.server_lr if noised and kind != "adam" else federation.server_rate,
        ("federation", "average_last"): last if federation.average_last is None else federation.average_last,
    }


def paced(config: RunConfig, share: float) -> RunConfig:
    """The configuration with the server's learning rate, if it was left open. share: see `Protection.noise_over_way`.

    With few rounds of one step each, plain mean steps hardly move the model. So a mean moves the model 3.2 times as far, at
    most half of it at once: momentum adds the rest, without following each round's noise. The noise on the final model grows
    with the steps. Where it would be longer than a quarter of the longest distance that mean steps can move, steps are
    shortened so that it is not.
    """
    federation = config.federation
    if federation.server_lr is not None:
        return config
    beta = federation.momentum
    rate = min(_FAR / 2, _FAR * (1 - beta), _QUIET * (1 - beta) / share) if share else federation.server_rate
    return config.replace({("federation", "server_lr"): rate})


def unhurt(config: RunConfig) -> RunConfig:
    """The configuration with the server's learning rate of a run whose noise is too little to shorten its steps."""
    return paced(config, math.ulp(0.0))
