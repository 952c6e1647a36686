"""Settles the settings that are left open: the clients' steps, the method's own choices, and the clients' protection.

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
from typing import TYPE_CHECKING

from privacy.errors import PrivacyError
from secure_fed.activity import activity
from secure_fed.config import PrivacyConfig, RunConfig
from secure_fed.errors import ConfigError
from secure_fed.methods.method import Filtering, Method, Settling, Shrinking, State
from secure_fed.rounds import step_lengths
from secure_fed.rounds.cohort import cohort_size
from secure_fed.tensors.tensors import Layout

if TYPE_CHECKING:
    from privacy.forecast import Way


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
        planned = step_lengths.local_steps(config, sizes) if privacy.unit == "none" else None
        rate = method.card.lr_of(width, planned, decoder=decoder)
        config = config.replace(step_lengths.of_clients(config, rate, usual, trained, own=own))
    config = config.replace(step_lengths.of_server(config, method, own=own))
    if isinstance(method, Settling):
        config = config.replace({("method", name): value for name, value in method.settings(federation.rounds).items()})
    if privacy.unit != "client":
        return config
    sampling = federation.sampling
    if sampling == "auto":
        sampling = "poisson" if own or privacy.hidden_cohort else "schedule"
    noise, correlation = (
        _of_sums(privacy) if sampling != "schedule" else _in_turn(config, clients, method, initial, personal)
    )
    return config.replace(
        {
            ("federation", "sampling"): sampling,
            ("privacy", "noise"): noise,
            ("privacy", "correlation"): correlation,
        }
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

    cohort = cohort_size(config, clients)
    numbers = reached(method, initial, personal)
    takes_back = config.method.transport_form != "sketch" and privacy.clip_quantile is None
    takes_back = takes_back and not unsteady(method, initial, config.federation.rounds)
    setting = Setting(clients, cohort, config.federation.rounds, privacy.delta, dim=numbers or None)
    target = Target(privacy.epsilon, privacy.noise_multiplier, privacy.delta, stop_early=True)
    possible = Possible(_counted(config, cohort), 0, takes_back, config.federation.momentum)
    try:
        with activity("comparing the ways to add noise"):
            ways = [way for way in in_turn(setting, target, possible) if _left_open(config.privacy, way)]
    except PrivacyError:
        ways = []
    if not ways:
        return _of_sums(privacy)  # the planning refuses impossible settings, with the reason
    chosen = pick(setting, ways)
    return chosen.noise, chosen.correlation


def _left_open(privacy: PrivacyConfig, way: Way) -> bool:
    """Whether the settings allow this way."""
    noise = "central" if privacy.clip_quantile is not None else privacy.noise
    return noise in ("auto", way.noise) and privacy.correlation in ("auto", way.correlation)


def _counted(config: RunConfig, cohort: int) -> int:
    """The number of noise shares that the guarantee counts in a masked sum of the cohort; 0 without masks."""
    from protocols.thresholds import counted_shares

    settings = config.secure_aggregation
    return counted_shares(cohort, settings.corrupt, settings.dropout) if settings.enabled else 0


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
