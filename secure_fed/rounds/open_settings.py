"""Settles the settings that are left open: the steps of clients and server, the method's own choices, and the protection.

`auto` in federation.sampling, privacy.noise and privacy.correlation (who takes part when, who adds the noise, how) becomes,
before any party is made, what `secure-fed budget plan` would recommend among the ways that the other settings allow: clients
share the noise only if `secure_aggregation.enabled` is set. The server's secret coins are chosen only for a mechanism of the
user's own, which needs them: no server keeps them from its operators and its clients. The run's configuration records the
choice from then on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from privacy.errors import PrivacyError
from secure_fed.activity import activity
from secure_fed.config import PrivacyConfig, RunConfig
from secure_fed.config.settings import MOMENTUM
from secure_fed.errors import ConfigError
from secure_fed.methods.method import Filtering, Method, Settling, Shrinking, State
from secure_fed.rounds.cohort import cohort_size
from secure_fed.tensors.tensors import Layout

Settings = dict[tuple[str, str], Any]  # by section and name


def settled(
    config: RunConfig,
    clients: int,
    method: Method,
    initial: State,
    *,
    own: bool,
    width: int | None = None,
    sizes: Sequence[int] | None = None,
    personal: Collection[str] = (),
    scoring: bool,
    decoder: bool = False,
    steps: bool = True,
) -> RunConfig:
    """The configuration without `auto` in the settings of clients' protection, and with steps that suit the protection.

    clients: their number. own: the mechanism is the user's, which noises only unmasked sums over secret coins. width: of the
    model's hidden states, where the model has one. sizes: the numbers of the clients' examples, where they are known.
    personal: tensors that are never sent. scoring: whether a last layer of a head trains.
    decoder: whether the model continues texts. steps: whether clients train by the steps of [training].
    """
    privacy, federation = config.privacy, config.federation
    if not scoring and config.training.head_factor not in (None, 1.0):
        raise ConfigError(
            f"training.head_factor = {config.training.head_factor:g} has no effect here: no head trains whose last layer is "
            "known, as it is of models of transformers; leave it out"
        ).about("training.head_factor", config.training.head_factor, "1")
    trained = initial.tensors.select(method.plan(initial).trainable).without(personal).numel
    usual = method.card.head_factor_of(width) if scoring else 1.0
    if steps:
        planned = local_steps(config, sizes) if privacy.unit == "none" else None
        rate = method.card.lr_of(width, planned, decoder=decoder)
        config = config.replace(client_steps(config, rate, usual, trained, own=own))
    config = config.replace(server_steps(config, method, own=own))
    if isinstance(method, Settling):
        config = config.replace({("method", name): value for name, value in method.settings(federation.rounds).items()})
    if privacy.unit != "client":
        return config
    sampling = federation.sampling
    if sampling == "auto":
        sampling = "poisson" if own or privacy.hidden_cohort else "schedule"
    in_turn = sampling == "schedule"
    noise, correlation = _in_turn(config, clients, method, initial, personal) if in_turn else _of_sums(privacy)
    return config.replace(
        {("federation", "sampling"): sampling, ("privacy", "noise"): noise, ("privacy", "correlation"): correlation}
    )


def _of_sums(privacy: PrivacyConfig) -> tuple[str, str]:
    """Noise and correlation where no public order fixes the cohorts."""
    noise = "central" if privacy.noise == "auto" else privacy.noise
    return noise, "none" if privacy.correlation == "auto" else privacy.correlation


def _in_turn(
    config: RunConfig, clients: int, method: Method, initial: State, personal: Collection[str]
) -> tuple[str, str]:
    """Noise and correlation of a public order: of the ways that the settings leave open, the recommended one."""
    privacy = config.privacy
    if "auto" not in (privacy.noise, privacy.correlation) or privacy.delta * clients >= 1:
        return _of_sums(privacy)  # the planning of the noise refuses such a delta
    if privacy.noise_multiplier is not None and privacy.noise == "auto":
        # A multiplier is meant for the sum: shares, and single contributions, need other multipliers.
        config = config.replace({("privacy", "noise"): "central"})
    from privacy.forecast import Possible, Setting, in_turn, pick
    from privacy.plan import Target
    from protocols.thresholds import counted_shares

    cohort, masks = cohort_size(config, clients), config.secure_aggregation
    shares = counted_shares(cohort, masks.corrupt, masks.dropout) if masks.enabled else 0
    numbers = reached(method, initial, personal)
    takes_back = config.method.transport_form != "sketch" and privacy.clip_quantile is None
    takes_back = takes_back and not unsteady(method, initial, config.federation.rounds)
    setting = Setting(clients, cohort, config.federation.rounds, privacy.delta, dim=numbers or None)
    target = Target(privacy.epsilon, privacy.noise_multiplier, privacy.delta, stop_early=True)
    noise = "central" if privacy.clip_quantile is not None else config.privacy.noise
    possible = Possible(shares, 0, takes_back, config.federation.momentum)
    try:
        with activity("comparing the ways to add noise"):
            ways = [
                way
                for way in in_turn(setting, target, possible)
                if noise in ("auto", way.noise) and privacy.correlation in ("auto", way.correlation)
            ]
    except PrivacyError:
        ways = []
    if not ways:
        return _of_sums(privacy)  # the planning refuses impossible settings, with the reason
    chosen = pick(setting, ways)
    return chosen.noise, chosen.correlation


def client_steps(config: RunConfig, lr: float, head: float, numbers: int, *, own: bool) -> Settings:
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
    batch, longer = (training.batch, 1) if unit == "none" else (256, 4)
    schedule = "stable_decay" if unit == "none" else "constant"
    usual = head if unit == "none" and training.optimizer == "adamw" else 1.0
    rate = longer * lr if training.lr is None else training.lr
    # A contribution is clipped to the length of one step of AdamW where noise is added to it. The first step moves each of d
    # numbers by lr, so it is lr sqrt(d) long for any data: hardly any of it is clipped, and little noise is wasted on longer
    # contributions that nobody sends. Several steps are clipped to the length of one.
    clip_norm = config.privacy.clip_norm
    if clip_norm is None and unit != "none":
        clip_norm = rate * math.sqrt(numbers) if _noised(config, own=own) and numbers else config.privacy.clip
    return {
        ("training", "batch_size"): batch if training.batch_size is None else training.batch_size,
        ("training", "lr"): rate,
        ("training", "head_factor"): usual if training.head_factor is None else training.head_factor,
        ("training", "lr_schedule"): schedule if training.lr_schedule == "auto" else training.lr_schedule,
        ("privacy", "clip_norm"): clip_norm,
    }


def _noised(config: RunConfig, *, own: bool) -> bool:
    """Whether noise is added to contributions of known length; a user's own mechanism may use another norm."""
    return config.privacy.unit == "client" and config.training.optimizer == "adamw" and not own


def local_steps(config: RunConfig, sizes: Sequence[int] | None) -> float | None:
    """The local steps of one client that takes part in every round, a mean over clients; None if it is unknown.

    sizes: the numbers of the clients' examples, where they are known.
    """
    training, rounds = config.training, config.federation.rounds
    if training.steps is not None:
        return float(rounds * training.steps)
    each = [-(-size // training.batch) for size in sizes or () if size]
    return rounds * training.epochs * fmean(each) if each else None


def server_steps(config: RunConfig, method: Method, *, own: bool) -> Settings:
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
    last = max(1, federation.rounds // 4) if averages else 1
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
    rate = min(3.2 / 2, 3.2 * (1 - beta), 0.25 * (1 - beta) / share) if share else federation.server_rate
    return config.replace({("federation", "server_lr"): rate})


def unhurt(config: RunConfig) -> RunConfig:
    """The configuration with the server's learning rate of a run whose noise is too little to shorten its steps."""
    return paced(config, math.ulp(0.0))


def reached(method: Method, state: State, personal: Collection[str] = ()) -> int:
    """The number of noised coordinates that reach the model in a round, each counted once for every pass.

    Passes divide a round's noise. personal: tensors that are never sent.
    """
    layouts = _layouts(method, state)
    if isinstance(method, Filtering) and len(layouts) == 1:
        return method.taken_in(state) - state.tensors.select(personal).numel
    sent = (math.prod(shape) for layout in layouts.values() for name, shape in layout.entries if name not in personal)
    return len(layouts) * sum(sent)


def unsteady(method: Method, initial: State, rounds: int) -> str:
    """The reason why a round's noise cannot cancel earlier noise with this method; empty where it can.

    A method declares whether the means of several rounds can be added up. Where the tensors themselves differ, streams of noise
    would not line up either.
    """
    if why := method.card.memoryless:
        return why
    first = _layouts(method, initial)
    later = (replace(initial, round=round_) for round_ in range(1, rounds))
    if isinstance(method, Shrinking) or any(_layouts(method, state) != first for state in later):
        return "its rounds do not all sum the same tensors"
    return ""


def _layouts(method: Method, state: State) -> dict[str, Layout]:
    return {name: method.layout(state, name) for name in method.plan(state).passes}
