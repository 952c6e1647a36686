"""The protection that a configuration requests, or a refusal of what it cannot protect."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from privacy.entropy import Entropy, SystemEntropy
from privacy.sampling import FixedSize, PublicOrder, Sampler
from secure_fed.activity import activity
from secure_fed.config import RunConfig
from secure_fed.config.checks import require_small_delta
from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool.phantoms import Count, Room, count
from secure_fed.learning.audit_pool.pool import kind_of
from secure_fed.learning.data.pointing import Plain
from secure_fed.learning.models.supported import require_data_free_start, require_supported
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.made_up import short
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.trial import require_constant, require_uncoupled
from secure_fed.methods.method import Card, Method, RoundPlan, State
from secure_fed.rounds.cohort import beside_cohort, expected_phantoms, invited, with_phantoms
from secure_fed.rounds.noise.correlated import CorrelatedNoise
from secure_fed.rounds.noise.own_mechanism import require_made, require_open_sums
from secure_fed.rounds.noise.placement import Placement, placement_of
from secure_fed.rounds.noise.plans import Population
from secure_fed.rounds.open_settings import unsteady
from secure_fed.rounds.protection import Protection
from secure_fed.tensors.tensors import Tensors

if TYPE_CHECKING:
    from privacy.distributed import DistributedGaussian
    from privacy.plan import Made


def protect(
    config: RunConfig,
    card: Card,
    names: Sequence[str],
    units: Sequence[int],
    cohorts: Sampler,
    passes: int,
    entropy: Entropy | None = None,
    numbers: int = 0,
    mechanism: Made | None = None,
    allows: Callable[[int], bool] = lambda phantoms: True,
) -> Protection:
    """The protection that a configuration requests.

    names: of the clients. units: examples, or groups of examples, at each client. passes: releases a round. numbers: the number
    of trained coordinates; 0 where it is unknown, and then there are only the phantoms that the configuration requests.
    mechanism: makes the user's own mechanism from a noise multiplier. allows: whether the masked sums of the configuration are
    possible with a number of phantom clients.
    """
    privacy, placement = config.privacy, placement_of(config)
    if mechanism is not None:
        require_made(mechanism)
        require_open_sums(config, passes)
    if placement.plan is None:
        return _nothing(config, cohorts)
    _require_unit(card, privacy.unit)
    require_small_delta(config, len(names) if privacy.unit == "client" else sum(units))
    population = Population(names, units, cohorts, passes, mechanism)
    with activity("calibrating the noise"):
        plan = placement.plan(config, population)
    room = _room(config, placement, population, numbers, plan.noise_multiplier, allows)
    phantoms = count(config, room)
    _require_as_seldom(phantoms, room, cohorts)
    everybody, beside = _of_a_sum(config, placement, population, phantoms.phantoms)
    shares = _shares(config, plan.noise_multiplier, everybody, beside) if placement.share_noise else None
    return Protection(
        unit=privacy.unit,
        placement=placement,
        mechanism=plan.mechanism,
        given=mechanism is not None,
        shares=shares,
        clip_norm=privacy.clip,
        entropy=entropy or SystemEntropy(),
        plan=plan,
        hidden=privacy.hidden_cohort,
        audited=config.audit_fraction > 0,
        phantoms=phantoms,
        beside=beside,
        correlated=CorrelatedNoise(plan.correlation, config.federation.rounds) if plan.correlation.band > 1 else None,
    )


def _nothing(config: RunConfig, cohorts: Sampler) -> Protection:
    """No protection, with the phantoms that the configuration requests."""
    chosen = config.evaluation.phantoms or 0
    among_clients = chosen if kind_of(config) == "client" else 0
    return Protection(phantoms=Count(chosen), beside=expected_phantoms(cohorts, among_clients))


def _require_unit(card: Card, unit: str) -> None:
    """Refuse a unit that the method cannot protect."""
    if unit not in card.units:
        message = f"{card.name} cannot protect privacy.unit = {unit!r}: {card.refusals[unit]}"
        raise ConfigError(message).about("privacy.unit", unit, f"one of {', '.join(card.units)}")


def require_steady(protection: Protection, method: Method, initial: State, rounds: int) -> None:
    """Refuse correlated noise over rounds whose sums have different coordinates: noise cancels coordinate by coordinate.

    A method declares whether the means of several rounds can be added up. Where the tensors themselves differ, streams of noise
    would not line up either.
    """
    if protection.correlated is None:
        return
    if why := unsteady(method, initial, rounds):
        raise ConfigError(
            f"privacy.correlation = 'banded' is refused with {method.card.name}: {why}; set privacy.correlation = 'none'"
        ).about("privacy.correlation", "banded", f"'none' with method.name = {method.card.name!r}")


def require_protectable(protection: Protection, objective: Objective, plan: RoundPlan) -> None:
    """Refuse layers and tensors for which the guarantee would not hold, by their names. Nothing is computed."""
    if not protection.placement.private:
        return
    require_data_free_start(objective.model)
    if protection.placement.step_noise:
        require_supported(objective.model, plan.trainable)


def require_by_trials(
    protection: Protection,
    objective: Objective,
    train: Sequence[Sequence[Any]],
    collate: Collate,
    plan: RoundPlan,
    initial: Tensors,
) -> None:
    """Refuse what only trials show, which take time: passes that change a parameter, and where units are parts of a client,
    a loss that couples the examples of a batch.
    """
    if not protection.placement.private:
        return
    placed = Placed.of(initial, plan.trainable, objective.device)
    if protection.placement.step_noise:
        require_uncoupled(objective, collate, placed, max(map(Plain, train), key=len))
    else:
        objective.note_parameters()  # before the first pass of all: a layer may write once
        for item in short(objective, collate, placed, train[0][0], 1)[:1]:
            require_constant(objective, collate, placed, item)


def _require_as_seldom(phantoms: Count, room: Room, cohorts: Sampler) -> None:
    """Refuse a number of phantoms that would take part more often than a client: an audit would find more than is promised."""
    if isinstance(cohorts, FixedSize) and 0 < phantoms.phantoms < room.fewest:
        raise ConfigError(
            f"evaluation.phantoms is {phantoms.phantoms}: cohorts of fixed size have one phantom at least, so each would take "
            f"part more often than a client; set it to {room.fewest} or more, or to 0"
        ).about("evaluation.phantoms", phantoms.phantoms, f"at least {room.fewest}, or 0")


def _of_a_sum(config: RunConfig, placement: Placement, population: Population, phantoms: int) -> tuple[int, int]:
    """The participants invited to a sum of clients, and the phantoms among them, if a run has so many phantoms."""
    among, hidden, cohorts = 0 if placement.step_noise else phantoms, config.privacy.hidden_cohort, population.cohorts
    beside = beside_cohort(cohorts, among, hidden=hidden)
    return invited(with_phantoms(cohorts, among), len(population.names) + among, hidden=hidden), beside


def _shares(config: RunConfig, noise_multiplier: float, everybody: int, silent: int) -> DistributedGaussian:
    """The mechanism of the shares: enough noise without the clients that may vanish or collude, and without phantoms.

    everybody: the participants of a sum. silent: the phantoms among them. They add no noise, so the noise is the same as
    without them and comes from real clients.
    """
    from privacy.distributed import DistributedGaussian

    counted = _counted(config, everybody, silent)
    bits: Literal[32, 64] = 32 if config.secure_aggregation.bits == 32 else 64
    if silent and counted < 1:
        raise ConfigError(
            f"evaluation.phantoms puts {silent} phantoms beside {everybody - silent} clients of a sum; after the assumed "
            "dropouts and colluding clients no share of noise is certain to remain: lower it, or secure_aggregation.dropout "
            "and corrupt"
        ).about("evaluation.phantoms", silent, "fewer, so that a share of noise is left to count on")
    return DistributedGaussian(noise_multiplier, everybody, counted, bits)


def _counted(config: RunConfig, everybody: int, silent: int) -> int:
    """The noise shares that a sum has at least, if all who vanish or collude are clients and none is a phantom."""
    from protocols.thresholds import counted_shares

    settings = config.secure_aggregation
    return counted_shares(everybody, settings.corrupt, settings.dropout) - silent


def _room(
    config: RunConfig,
    placement: Placement,
    population: Population,
    numbers: int,
    z: float,
    allows: Callable[[int], bool] = lambda phantoms: True,
) -> Room:
    """The public numbers that determine how many phantoms a run can have."""
    if placement.step_noise:
        return Room(sum(population.units), config.training.batch, numbers, z)
    cohorts, masked = population.cohorts, config.secure_aggregation.enabled
    in_turn = masked and isinstance(cohorts, PublicOrder)
    whole = (
        isinstance(cohorts, FixedSize) and not config.privacy.hidden_cohort
    )  # a whole number of phantoms in every sum
    return Room(
        len(population.names),
        cohorts.expected,
        numbers,
        z,
        own_noise=placement.own_noise,
        shares=(lambda m: _counted(config, *_of_a_sum(config, placement, population, m)))
        if placement.share_noise
        else None,
        allows=allows,
        fewest=math.ceil(1 / cohorts.rate - 1e-9) if in_turn or whole else 0,
    )
