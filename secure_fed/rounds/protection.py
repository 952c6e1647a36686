"""What protects the clients of a run, and where the noise is put.

    place           who adds noise, and to what                   whom it protects
    "nowhere"       nobody                                        nobody
    "sum"           the server, to the sum of a pass              a client          (privacy.noise = "central")
    "shares"        each client, a share inside the masked sum    a client          (privacy.noise = "distributed")
    "contribution"  each client, to what it sends                 a client          (privacy.noise = "local")
    "gradients"     each client, to every step of its training    an example, or all examples of one person

With noise on the sum nothing may tell who took part or how many: a reply's loss and weight are not sent, and records hold
expected sizes. With shares of noise everybody sees who took part, and no amplification is counted on; or, with a hidden cohort,
everybody takes part, and each client tosses for itself whether to train.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from privacy.clipping import AdaptiveGaussian
from privacy.entropy import Entropy, SystemEntropy
from privacy.mechanisms import Gaussian, Mechanism, NoMechanism
from privacy.sampling import Sampler
from secure_fed.config import RunConfig, TrainingConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool.phantom_plan import Count, Room, count
from secure_fed.learning.audit_pool.pool import kind_of
from secure_fed.learning.data.pointing import Plain
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.dp_sgd import batch_sampler, planned_steps
from secure_fed.learning.training.local import Objective, Placed
from secure_fed.learning.training.packs import Packs
from secure_fed.learning.training.supported import require_data_free_start, require_supported
from secure_fed.methods.method import Card, Method, RoundPlan, State
from secure_fed.rounds.cohort import expected_phantoms
from secure_fed.tensors.tensors import Layout, Tensors

if TYPE_CHECKING:
    from privacy.distributed import DistributedGaussian
    from privacy.run_plan import Plan

Place = Literal["nowhere", "sum", "shares", "contribution", "gradients"]


@dataclass(frozen=True)
class Protection:
    """The mechanism of a run, with the plan that says what it guarantees.

    mechanism: what bounds and noises; with shares of noise, only bounds. shares: that of the shares, if there are any.
    clip_norm: that of the first round. entropy: where noise and secret coins come from. hidden: whether each client tosses for
    itself whether to train, so that nobody else knows. audited: whether units are held out for an audit, a share of them that
    goes by their number. phantoms: how many units there are beside the real ones that are nobody's data. beside: how many of
    them are expected in a sum.
    """

    unit: str = "none"
    place: Place = "nowhere"
    mechanism: Mechanism = NoMechanism()  # noqa: RUF009 - it has no state
    shares: DistributedGaussian | None = None
    clip_norm: float = math.inf
    entropy: Entropy = SystemEntropy()  # noqa: RUF009 - it has no state
    plan: Plan | None = None
    hidden: bool = False
    audited: bool = False
    phantoms: Count = Count()  # noqa: RUF009 - it has no state
    beside: int = 0

    @property
    def in_travel(self) -> Mechanism:
        """What is done to contributions and to their sum."""
        return NoMechanism() if self.place == "gradients" else self.mechanism

    @property
    def hides_cohort(self) -> bool:
        """Whether the guarantee counts on nobody's learning who took part."""
        return self.place == "sum"

    def layout(self, method: Method, state: State, pass_name: str, personal: Collection[str]) -> Layout:
        """The layout of a pass's sum, which holds nothing personal, and the mechanism's counters."""
        entries = [entry for entry in method.layout(state, pass_name).entries if entry[0] not in personal]
        return Layout(tuple(sorted([*entries, *((name, ()) for name in self.in_travel.counters)])))

    def mean_noise_std(self, clip_norm: float, cohort: float, dim: int) -> float:
        """The standard deviation of the noise on each of `dim` coordinates of a mean over (an expected) `cohort`, 0 for none.

        Shares of noise are counted as if nobody had vanished.
        """
        if self.shares is not None:
            return self.shares.std(clip_norm, dim, self.shares.contributors - self.beside) / cohort
        std = self.in_travel.std(clip_norm)
        return std / cohort if self.place == "sum" else std * math.sqrt(cohort + self.beside) / cohort


def protect(
    config: RunConfig,
    card: Card,
    names: Sequence[str],
    units: Sequence[int],
    cohorts: Sampler,
    passes: int,
    entropy: Entropy | None = None,
    numbers: int = 0,
) -> Protection:
    """The protection that a configuration asks for.

    names: of the clients. units: how many examples, or groups of them, each has. passes: releases a round. numbers: that train;
    0 where that is not known, and then there are no phantoms but those that were asked for.
    """
    privacy = config.privacy
    if privacy.unit == "none":
        asked = config.evaluation.phantoms or 0
        among_clients = asked if kind_of(config) == "client" else 0
        return Protection(phantoms=Count(asked), beside=expected_phantoms(cohorts, among_clients))
    if privacy.unit not in card.units:
        raise ConfigError(f"{card.name} cannot protect privacy.unit = {privacy.unit!r}: {card.refusals[privacy.unit]}")
    _check_delta(config, len(names) if privacy.unit == "client" else sum(units))
    place: Place = _PLACES[privacy.noise] if privacy.unit == "client" else "gradients"
    plan = _plan(config, place, names, units, cohorts, passes)
    mechanism: Mechanism = Gaussian(plan.noise_multiplier)
    if privacy.clip_quantile is not None:
        mechanism = AdaptiveGaussian.of(plan.noise_multiplier, privacy.clip_quantile, cohorts.expected)
    phantoms = count(config, _room(config, place, names, units, cohorts, numbers, plan.noise_multiplier))
    contributors = len(names) if privacy.hidden_cohort else round(cohorts.expected)
    beside = 0
    if place != "gradients":
        beside = phantoms.phantoms if privacy.hidden_cohort else expected_phantoms(cohorts, phantoms.phantoms)
    shares = _shares(config, plan.noise_multiplier, contributors, beside) if place == "shares" else None
    return Protection(
        unit=privacy.unit,
        place=place,
        mechanism=mechanism,
        shares=shares,
        clip_norm=privacy.clip_norm,
        entropy=entropy or SystemEntropy(),
        plan=plan,
        hidden=privacy.hidden_cohort,
        audited=config.audit_fraction > 0,
        phantoms=phantoms,
        beside=beside,
    )


def require_protectable(
    protection: Protection,
    objective: Objective,
    train: Sequence[Sequence[Any]],
    collate: Collate,
    plan: RoundPlan,
    initial: Tensors,
    settings: TrainingConfig,
) -> None:
    """Refuse a model, a loss or a method's tensors for which the guarantee would not hold, with the reason."""
    if protection.place == "nowhere":
        return
    require_data_free_start(objective.model)
    if protection.place != "gradients":
        return
    require_supported(objective.model, plan.trainable)
    clients = [Plain(own) for own in train]
    packs = Packs.of(objective, collate, settings, max(clients, key=len))
    packs.try_out(Placed.of(initial, plan.trainable, objective.device), clients)


def _shares(config: RunConfig, noise_multiplier: float, contributors: int, silent: int) -> DistributedGaussian:
    """Shares of noise that are enough without the clients that may vanish, without those that collude, and without phantoms:
    these bring none, so that the noise is what it would be without them, and rests on nobody but real clients.
    """
    from privacy.distributed import DistributedGaussian
    from protocols.choice import colluding, surviving

    settings, everybody = config.secure_aggregation, contributors + silent
    counted = surviving(everybody, settings.dropout) - colluding(everybody, settings.corrupt) - silent
    bits: Literal[32, 64] = 32 if settings.bits == 32 else 64
    if silent and counted < 1:
        raise ConfigError(
            f"evaluation.phantoms puts {silent} phantoms beside {contributors} clients of a sum, of whom as many may vanish or "
            "collude as leave no share of noise to count on: lower it, or secure_aggregation.dropout and corrupt"
        )
    return DistributedGaussian(noise_multiplier, everybody, counted, bits)


def _room(
    config: RunConfig,
    place: Place,
    names: Sequence[str],
    units: Sequence[int],
    cohorts: Sampler,
    numbers: int,
    z: float,
) -> Room:
    """The public numbers that say how many phantoms there is room for."""
    if place == "gradients":
        return Room(sum(units), config.training.batch_size, numbers, z, place)
    lost = config.secure_aggregation.corrupt + config.secure_aggregation.dropout
    return Room(len(names), cohorts.expected, numbers, z, place, lost)


def _plan(
    config: RunConfig, place: Place, names: Sequence[str], units: Sequence[int], cohorts: Sampler, passes: int
) -> Plan:
    # Accounting takes seconds to import, which a run without privacy need not wait for.
    from privacy.run_plan import Wish, for_contributions, for_gradients, for_shares, for_sums, usual_participations

    privacy, rounds = config.privacy, config.federation.rounds
    wish = Wish(privacy.epsilon, privacy.noise_multiplier, privacy.delta, privacy.on_exhausted == "stop")
    if place == "sum":
        return for_sums(wish, cohorts, rounds * passes, passes)
    if place == "shares" and passes > 1 and privacy.hidden_cohort:
        raise ConfigError(
            f"privacy.hidden_cohort is refused where a round has {passes} passes, over one toss of each client: no bound is "
            "proven for what the second one adds; use a method of one pass (FRA is one with method.transport_form = 'dense')"
        )
    if place == "shares":
        return for_shares(wish, cohorts, rounds * passes, passes, hidden=privacy.hidden_cohort)
    participations = min(rounds, privacy.participations or usual_participations(rounds, cohorts.rate))
    if place == "contribution":
        return for_contributions(wish, cohorts.rate, names, passes, participations)
    draws = [batch_sampler(count, config.training) for count in units]
    steps = [planned_steps(count, config.training) for count in units]
    return for_gradients(wish, names, draws, steps, participations)


def _check_delta(config: RunConfig, units: int) -> None:
    """A delta of one over the number of units allows giving one of them away."""
    if config.privacy.delta * units >= 1:
        raise ConfigError(
            f"privacy.delta is {config.privacy.delta:g}, no less than one over {units} units, so that it would allow "
            f"publishing one of them: set it well below {1 / units:.2g}"
        )


_PLACES: dict[str, Place] = {"central": "sum", "distributed": "shares", "local": "contribution"}
