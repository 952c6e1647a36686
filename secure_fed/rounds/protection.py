"""The protection of a run: its mechanism, the place of its noise, and the plan with its guarantee.

With noise on the sum (`placement.SUM`) nothing may reveal who took part or how many: a reply has no loss and the weight one,
and records contain expected sizes. With shares of noise everybody sees who took part, and no amplification is used; or, with a
hidden cohort, everybody takes part, and each client tosses its own coin for whether to train.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from privacy.correlation import INDEPENDENT
from privacy.entropy import Entropy, Floats, SystemEntropy
from privacy.mechanisms import Mechanism, Named, NoMechanism
from privacy.public_order import PublicOrder
from privacy.sampling import Sampler
from secure_fed.config import RunConfig, TrainingConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool.phantoms import Count, Room, count
from secure_fed.learning.audit_pool.pool import kind_of
from secure_fed.learning.data.pointing import Plain
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.supported import require_data_free_start, require_supported
from secure_fed.learning.training.uncoupled import Uncoupled
from secure_fed.methods.method import Card, Method, RoundPlan, State
from secure_fed.rounds.cohort import expected_phantoms
from secure_fed.rounds.correlated_noise import CorrelatedNoise
from secure_fed.rounds.own_mechanism import require_made, require_open_sums, require_whole
from secure_fed.rounds.placement import NOWHERE, Placement, placement_of
from secure_fed.rounds.plans import Population
from secure_fed.rounds.way import unsteady
from secure_fed.tensors.layout import Layout
from secure_fed.tensors.low_rank import in_own_factors
from secure_fed.tensors.tensors import Tensors

if TYPE_CHECKING:
    from privacy.distributed import DistributedGaussian
    from privacy.run_plan import Plan
    from privacy.run_planning import Made


@dataclass(frozen=True)
class Protection:
    """The mechanism of a run, with the plan that contains its guarantee.

    mechanism: bounds and noises; with shares of noise it only bounds. given: the mechanism is the user's own. shares: the
    mechanism of the shares. clip_norm: of the first round. entropy: the source of noise and secret coins. hidden: each client
    tosses its own coin for whether to train, and nobody else learns the outcome. audited: units are held out for an audit, a
    share that depends on their number. correlated: the server's noise, where a round's noise depends on earlier rounds.
    phantoms: units beside the real ones that are nobody's data. beside: the number of phantoms expected in a sum.
    """

    unit: str = "none"
    placement: Placement = NOWHERE
    mechanism: Mechanism = NoMechanism()  # noqa: RUF009 - it has no state
    shares: DistributedGaussian | None = None
    clip_norm: float = math.inf
    entropy: Entropy = SystemEntropy()  # noqa: RUF009 - it has no state
    plan: Plan | None = None
    hidden: bool = False
    audited: bool = False
    phantoms: Count = Count()  # noqa: RUF009 - it has no state
    beside: int = 0
    given: bool = False
    correlated: CorrelatedNoise | None = None

    @property
    def contribution_mechanism(self) -> Mechanism:
        """The mechanism on contributions and their sum. With noise in training steps it changes neither."""
        return NoMechanism() if self.placement.step_noise else self.mechanism

    @property
    def hides_cohort(self) -> bool:
        """Whether the guarantee requires that nobody learns who took part."""
        return self.placement.secret_cohort

    def layout(self, method: Method, state: State, pass_name: str, personal: Collection[str]) -> Layout:
        """The layout of a pass's sum: the method's tensors without personal ones, and the mechanism's counters."""
        entries = [entry for entry in method.layout(state, pass_name).entries if entry[0] not in personal]
        return Layout(tuple(sorted([*entries, *((name, ()) for name in self.contribution_mechanism.counters)])))

    def measurable(self, contribution: Tensors) -> Tensors:
        """A contribution in a form whose norm shows all of it: products in own factors, or dense for norms other than L2."""
        own = in_own_factors(contribution)  # otherwise a cancellation between its factors would distort the norm
        return own if self.contribution_mechanism.order == 2 else own.dense()

    def sum_noise_std(self, clip_norm: float, round_: int) -> float:
        """The standard deviation of the noise that the server adds to each coordinate of a round's sum."""
        spread = self.correlated.spread(round_) if self.correlated else 1.0
        return self.mechanism.std(clip_norm) * spread

    def noise_weights(self, rounds: int) -> Floats:
        """(rounds,) the noise of round t is sum_j weights[j] Z_(t - j), Z_t the independent noise that round t adds."""
        return (self.correlated.correlation if self.correlated else INDEPENDENT).weights(rounds)

    def noised(self, total: Named, clip_norm: float, round_: int, pass_name: str) -> dict[str, Tensor]:
        """The sum of a pass with the server's noise."""
        if self.correlated is not None:
            return self.correlated.noised(total, self.mechanism.std(clip_norm), round_, pass_name)
        noised = self.mechanism.noised(total, clip_norm, self.entropy.stream("sum", round_, pass_name))
        if self.given:
            require_whole(self.mechanism, total, noised)
        return noised

    def mean_noise_std(self, clip_norm: float, cohort: float, dim: int) -> float:
        """The standard deviation of the noise on each of `dim` coordinates of a round's mean over (an expected) `cohort`, 0 for
        none; where noise is correlated over rounds, of the independent noise that a round adds (`noise_weights`).

        With shares of noise, as if nobody had vanished.
        """
        if self.shares is not None:
            return self.shares.std(clip_norm, dim, self.shares.contributors - self.beside) / cohort
        if self.placement.server_noise:
            return self.mechanism.std(clip_norm) / cohort
        std = self.contribution_mechanism.std(clip_norm)
        return std * math.sqrt(cohort + self.beside) / cohort

    def noise_over_way(self, cohort: float, dim: int, rounds: int) -> float:
        """The length of the noise in the sum of all rounds' means, relative to the longest such sum of clipped means."""
        std = self.mean_noise_std(self.clip_norm, cohort, dim)
        # The part of a round's independent noise that remains in the end: the sum of its weights up to then.
        left = self.noise_weights(rounds).cumsum()
        return std * math.sqrt(dim * float(left @ left)) / (rounds * self.clip_norm)


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
) -> Protection:
    """The protection that a configuration requests.

    names: of the clients. units: examples, or groups of examples, at each client. passes: releases a round. numbers: the number
    of trained coordinates; 0 where it is unknown, and then there are only the phantoms that the configuration requests.
    mechanism: makes the user's own mechanism from a noise multiplier.
    """
    privacy, placement = config.privacy, placement_of(config)
    if mechanism is not None:
        require_made(mechanism)
        require_open_sums(config, passes)
    if placement.plan is None:
        return _nothing(config, cohorts)
    _require_unit(card, privacy.unit)
    _check_delta(config, len(names) if privacy.unit == "client" else sum(units))
    population = Population(names, units, cohorts, passes, mechanism)
    plan = placement.plan(config, population)
    phantoms = count(config, _room(config, placement, population, numbers, plan.noise_multiplier))
    contributors = len(names) if privacy.hidden_cohort else round(cohorts.expected)
    among_clients = 0 if placement.step_noise else phantoms.phantoms
    beside = among_clients if privacy.hidden_cohort else expected_phantoms(cohorts, among_clients)
    shares = _shares(config, plan.noise_multiplier, contributors, beside) if placement.share_noise else None
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
    if not protection.placement.private:
        return
    require_data_free_start(objective.model)
    if not protection.placement.step_noise:
        return
    require_supported(objective.model, plan.trainable)
    clients = [Plain(own) for own in train]
    uncoupled = Uncoupled.of(objective, collate, settings, max(clients, key=len))
    uncoupled.require_all(Placed.of(initial, plan.trainable, objective.device), clients)


def _shares(config: RunConfig, noise_multiplier: float, contributors: int, silent: int) -> DistributedGaussian:
    """The mechanism of the shares: enough noise without the clients that may vanish or collude, and without phantoms.

    silent: the phantoms in a sum. They add no noise, so the noise is the same as without them and comes from real clients.
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
        ).about("evaluation.phantoms", silent, "fewer, so that a share of noise is left to count on")
    return DistributedGaussian(noise_multiplier, everybody, counted, bits)


def _room(config: RunConfig, placement: Placement, population: Population, numbers: int, z: float) -> Room:
    """The public numbers that determine how many phantoms a run can have."""
    if placement.step_noise:
        return Room(sum(population.units), config.training.batch, numbers, z)
    missing, order = config.secure_aggregation.corrupt + config.secure_aggregation.dropout, population.cohorts
    in_turn = config.secure_aggregation.enabled and isinstance(order, PublicOrder)
    return Room(
        len(population.names),
        population.cohorts.expected,
        numbers,
        z,
        own_noise=placement.own_noise,
        lost=missing if placement.share_noise else 0.0,
        fewest=math.ceil(1 / order.rate) if in_turn else 0,
    )


def _check_delta(config: RunConfig, units: int) -> None:
    """Refuse a delta of one over the number of units: it allows revealing one unit completely."""
    if config.privacy.delta * units >= 1:
        raise ConfigError(
            f"privacy.delta is {config.privacy.delta:g}, no less than one over {units} units, so that it would allow "
            f"publishing one of them: set it well below {1 / units:.2g}"
        ).about("privacy.delta", config.privacy.delta, f"below {1 / units:.2g}")
