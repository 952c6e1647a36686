"""The protection of a run: its mechanism, the place of its noise, and the plan with its guarantee.

`protect` makes the protection that a configuration requests, or refuses what it cannot protect. The `require_...` functions
refuse what only the method, the model or trials show. A user's own mechanism is checked too; that its `noised` adds the noise
of its event cannot be checked.

With noise on the sum (`placement.SUM`) nothing may reveal who took part or how many: a reply has no loss and the weight one,
and records contain expected sizes. With shares of noise everybody sees who took part, and no amplification is used; or, with a
hidden cohort, everybody takes part, and each client tosses its own coin for whether to train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from privacy.correlation import INDEPENDENT, CorrelatedRows, Correlation
from privacy.entropy import Entropy, Floats, SystemEntropy
from privacy.errors import PrivacyError
from privacy.mechanisms import Mechanism, Named, NoMechanism
from privacy.participation import FixedSize, Sampler
from secure_fed.activity import activity
from secure_fed.config import RunConfig, own_files
from secure_fed.config.checks import require_small_delta
from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool.number_of_dummies import Count, Room, count
from secure_fed.learning.audit_pool.pool import kind_of
from secure_fed.learning.data.audit_unit import Plain
from secure_fed.learning.models.architecture import require_data_free_start, require_supported
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.trials import require_constant, require_uncoupled, short
from secure_fed.methods.method import Card, Method, RoundPlan, State
from secure_fed.rounds.cohort import dummy_sampler, invited
from secure_fed.rounds.open_settings import unsteady
from secure_fed.rounds.placement import NOWHERE, Placement, Population, placement_of
from secure_fed.tensors.low_rank import in_own_factors
from secure_fed.tensors.tensors import Layout, Tensors

if TYPE_CHECKING:
    from privacy.distributed import DistributedGaussian
    from privacy.plan import Made, Plan


@dataclass(frozen=True)
class Protection:
    """The mechanism of a run, with the plan that contains its guarantee.

    mechanism: bounds and noises; with shares of noise it only bounds. given: the mechanism is the user's own. shares: the
    mechanism of the shares. clip_norm: of the first round. entropy: the source of noise and secret coins. hidden: each client
    tosses its own coin for whether to train, and nobody else learns the outcome. audited: units are held out for an audit. The
    share depends on the number of units, so the guarantee takes that number as public. correlated: the server's noise, where a
    round's noise depends on earlier rounds. dummies: units beside the real ones that are nobody's data. beside: the number of
    dummies expected beside the clients of a round.
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
    dummies: Count = Count()  # noqa: RUF009 - it has no state
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
        """The standard deviation of the noise on each of `dim` coordinates of a round's mean; 0 without noise.

        cohort: the expected number of clients. Under correlated noise: of the round's new, independent noise alone
        (`noise_weights`). With shares of noise: as if no client had dropped out.
        """
        if self.shares is not None:
            return self.shares.std(clip_norm, dim, self.shares.contributors) / cohort
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


@dataclass
class CorrelatedNoise:
    """The noise of a run's sums where it is correlated over rounds, once the run has opened its source.

    It comes from secret keys, so that earlier noise can be made again. Each pass of a round has its own rows.
    """

    correlation: Correlation
    rounds: int
    _source: Entropy | None = field(default=None, init=False, repr=False)
    _rows: dict[str, CorrelatedRows] = field(default_factory=dict, init=False, repr=False)

    def open(self, source: Entropy) -> CorrelatedNoise:
        """Begin or resume a run. source: reproducible streams, from keys that nobody else has."""
        self.close()
        self._source = source
        return self

    def close(self) -> None:
        """Forget the source and all noise made from it."""
        self._source = None
        self._rows.clear()

    def spread(self, round_: int) -> float:
        """The standard deviation of a round's noise, relative to the independent noise that it is made from."""
        return float(np.linalg.norm(self._weights[: round_ + 1]))

    def noised(self, total: Named, std: float, round_: int, pass_name: str) -> dict[str, Tensor]:
        """The total of a pass with its noise. std: of the independent noise."""
        if self._source is None:
            raise PrivacyError("nothing may be released outside a run: Federation.run opens the noise")
        if pass_name not in self._rows:
            source = self._source
            self._rows[pass_name] = CorrelatedRows(
                self.correlation, lambda round_: source.stream("sum", round_, pass_name)
            )
        return self._rows[pass_name].noised(total, std, round_)

    @cached_property
    def _weights(self) -> Floats:
        return self.correlation.weights(self.rounds)


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
    """The protection that a configuration requests; without a unit none, beside the dummies that it requests.

    names: of the clients. units: examples, or persons, at each client. passes: releases a round. numbers: the number
    of trained coordinates; 0 where it is unknown, and then there are only the dummies that the configuration requests.
    mechanism: makes the user's own mechanism from a noise multiplier. entropy: another source than the operating system says
    itself that it is not private: whoever holds the key of `KeyedEntropy` could take the noise out again.
    """
    privacy, placement = config.privacy, placement_of(config)
    if not (entropy is None or isinstance(entropy, SystemEntropy) or getattr(entropy, "private", None) is False):
        message = f"entropy is a {type(entropy).__name__}, and noise is from the operating system: leave it out"
        raise ConfigError(message).about("entropy", type(entropy).__name__, "None, or for tests a SeededEntropy")
    if mechanism is not None:
        require_made(mechanism)
        require_open_sums(config, passes)
    if placement.plan is None:
        chosen = config.evaluation.dummies or 0
        return Protection(dummies=Count(chosen), beside=_beside(config, cohorts, chosen))
    if privacy.unit not in card.units:
        message = f"{card.name} cannot protect privacy.unit = {privacy.unit!r}: {card.refusals[privacy.unit]}"
        raise ConfigError(message).about("privacy.unit", privacy.unit, f"one of {', '.join(card.units)}")
    require_small_delta(config, len(names) if privacy.unit == "client" else sum(units))
    population = Population(names, units, cohorts, passes, mechanism)
    with activity("calibrating the noise"):
        plan = placement.plan(config, population)
    room = _room(config, placement, population, numbers, plan.noise_multiplier)
    dummies = count(config, room)
    _require_as_seldom(dummies, room)
    in_a_sum = invited(cohorts, len(names), hidden=privacy.hidden_cohort)
    shares = _shares(config, plan.noise_multiplier, in_a_sum) if placement.share_noise else None
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
        dummies=dummies,
        beside=_beside(config, cohorts, dummies.dummies),
        correlated=CorrelatedNoise(plan.correlation, config.federation.rounds) if plan.correlation.band > 1 else None,
    )


def _beside(config: RunConfig, cohorts: Sampler, dummies: int) -> int:
    """The number of dummies expected beside the clients of a round, if a run has so many dummies."""
    sampler = dummy_sampler(cohorts, dummies) if kind_of(config) == "client" else None
    return round(sampler.expected) if sampler else 0


def _require_as_seldom(dummies: Count, room: Room) -> None:
    """Refuse a number of dummies that would take part more often than a client: an audit would find more than is promised."""
    if 0 < dummies.dummies < room.fewest:
        raise ConfigError(
            f"evaluation.dummies is {dummies.dummies}: cohorts of fixed size have one dummy client at least, so each would "
            f"take part more often than a client; set it to {room.fewest} or more, or to 0"
        ).about("evaluation.dummies", dummies.dummies, f"at least {room.fewest}, or 0")


def _shares(config: RunConfig, noise_multiplier: float, clients: int) -> DistributedGaussian:
    """The mechanism of the shares: enough noise without the clients that may vanish or collude. clients: of a sum."""
    from privacy.distributed import DistributedGaussian
    from protocols.thresholds import counted_shares

    settings = config.secure_aggregation
    bits: Literal[32, 64] = 32 if settings.bits == 32 else 64
    counted = counted_shares(clients, settings.corrupt, settings.dropout)
    return DistributedGaussian(noise_multiplier, clients, counted, bits)


def _room(config: RunConfig, placement: Placement, population: Population, numbers: int, z: float) -> Room:
    """The public numbers that determine how many dummies a run can have."""
    if placement.step_noise:
        return Room(sum(population.units), config.training.batch, numbers, z)
    cohorts = population.cohorts
    fewest = math.ceil(1 / cohorts.rate - 1e-9) if isinstance(cohorts, FixedSize) else 0
    return Room(len(population.names), cohorts.expected, numbers, z, own_noise=placement.own_noise, fewest=fewest)


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


def own_mechanism(config: RunConfig) -> Made | None:
    """The mechanism in the file of `privacy.mechanism`, as a function of the noise multiplier; None if it names no file."""
    if not (file := config.privacy.mechanism):
        return None
    found: Made | None = getattr(own_files.executed("privacy.mechanism", file), "MECHANISM", None)
    if not callable(found):
        why = "has no MECHANISM: set MECHANISM to your subclass of privacy.mechanisms.Mechanism"
        raise own_files.refused("privacy.mechanism", file, why)
    return found


def require_made(mechanism: Callable[[float], Mechanism]) -> None:
    """Refuse a function that makes no mechanism from a noise multiplier, or one that bounds too small a norm for its event.

    |x|_p falls as p grows: a bound on the L1 norm bounds the L2 norm too, and not the reverse.
    """
    name = getattr(mechanism, "__name__", repr(mechanism))
    try:
        made: Any = mechanism(1.0)
    except TypeError as error:
        why = f"cannot be made of a noise multiplier ({error}): give the class, as in mechanism=Laplace"
        raise _wrong(name, why) from error
    if not isinstance(made, Mechanism):
        raise _wrong(name, f"makes {type(made).__name__}, which is no privacy.mechanisms.Mechanism")
    event, order = type(made.event).__name__, made.order
    if not (isinstance(order, int | float) and order >= 1):
        raise _wrong(name, f"has order {order!r}, but it is p of a norm, so a number of at least 1")
    if order > _ORDER_OF.get(event, math.inf):
        raise _wrong(
            name,
            f"bounds contributions in the L{order:g} norm, and its event, {event}, is about a shift of bounded "
            f"L{_ORDER_OF[event]:g} norm: set order = {_ORDER_OF[event]:.1f} in the class",
        )


def require_open_sums(config: RunConfig, passes: int) -> None:
    """Refuse a user's own mechanism where its event does not determine the cost of a release."""
    privacy, sampling = config.privacy, config.federation.sampling
    for setting, value, refused, limit in (
        ("privacy.unit", privacy.unit, privacy.unit != "client", "'client'"),
        ("privacy.noise", privacy.noise, privacy.noise != "central", "'central'"),
        ("privacy.clip_quantile", privacy.clip_quantile, privacy.clip_quantile is not None, "not set"),
        ("federation.sampling", sampling, sampling in ("fixed", "schedule"), "'poisson'"),
        ("secure_aggregation.enabled", True, config.secure_aggregation.enabled, "false"),
        ("method.name", config.method.name, passes > 1, "a method of one pass a round"),
    ):
        if refused:
            raise ConfigError(
                f"{setting} = {value!r} is refused with a mechanism of your own, which can noise only one unmasked sum a "
                f"round, over clients drawn at random: set it to {limit}"
            ).about(setting, value, f"{limit} with a mechanism of your own")


def require_whole(mechanism: Mechanism, total: Mapping[str, Tensor], noised: Any) -> None:
    """Refuse a noised sum that lacks a tensor of the sum, has an additional one, or one of another shape."""
    name = f"{type(mechanism).__name__}.noised"
    if not isinstance(noised, Mapping):
        raise _wrong(name, f"returns {type(noised).__name__}, and not the tensors of the sum by name")
    if odd := Layout.of(Tensors(noised)).differing(Layout.of(Tensors(total))):
        raise _wrong(name, f"does not return the tensors of the sum: {odd}")


def _wrong(name: str, why: str) -> ConfigError:
    return ConfigError(f"the mechanism {name} {why}").about(
        "mechanism", name, "as docs/adding_a_mechanism.md describes"
    )


_ORDER_OF = {"LaplaceDpEvent": 1.0, "GaussianDpEvent": 2.0}  # the order of the norm between an event's two sums
