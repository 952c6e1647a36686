"""Where a run adds its noise, and everything that follows from that: one row of a table for each place.

    row           who adds noise, and to what                   what it protects
    NOWHERE       nobody                                        nothing
    SUM           the server, to the sum of a pass              a client          (privacy.noise = "central")
    SUM_IN_TURN   the same, over cohorts of a public order      a client          (and federation.sampling = "schedule")
    SHARES        each client, a share inside the masked sum    a client          (privacy.noise = "distributed")
    CONTRIBUTION  each client, to its contribution              a client          (privacy.noise = "local")
    GRADIENTS     each client, to every step of its training    an example, or all examples of one person

Code of the round reads a row's fields and never compares its name; reports look their words up by the name. A new place is one
row, and mypy reports every missing field.

A row's plan is the number of the run's releases, their noise, and their cost. Accounting takes seconds to import, which a run
without privacy need not wait for: it is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from privacy.correlation import INDEPENDENT, Correlation, best, square_root
from privacy.mechanisms import AdaptiveGaussian, Gaussian
from privacy.participation import PublicOrder, Sampler
from privacy.statement import CLIENTS, EVERYBODY, READER, Observer
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.training.local import batch_sampler, planned_steps

if TYPE_CHECKING:
    from privacy.plan import Made, Plan, Target


@dataclass(frozen=True)
class Population:
    """The parties that a plan counts.

    names: of the clients. units: examples, or persons, at each client. cohorts: the sampler of cohorts. passes:
    releases a round. mechanism: makes the user's own mechanism from a noise multiplier.
    """

    names: Sequence[str]
    units: Sequence[int]
    cohorts: Sampler
    passes: int
    mechanism: Made | None = None


Planner = Callable[[RunConfig, Population], "Plan"]


@dataclass(frozen=True)
class Words:
    """A placement in the sentences of a guarantee.

    noise: who adds it, and to what. clipped: the clipped vectors. released: the kind of release, with a place for its number.
    not_covered: the limits of the guarantee that follow from the place of the noise.
    """

    noise: str
    clipped: str
    released: str
    not_covered: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One place for the noise.

    name: in records, `result.json` and reports. plan: computes the number of releases and their noise; None without a
    guarantee.

    Who adds noise, one of four where the run has a guarantee:
    server_noise: the server, to the sum of a pass; it is trusted with this sum, and computes it in float64. share_noise: each
    client, a share that is too little to protect it, inside a masked sum. own_noise: each client, to its contribution, enough
    to protect it. step_noise: each client, to every step of its training.

    bounds_contribution: each client clips its contribution.
    charges_federation: each pass is one release of the federation. Without it, each client accounts for its own releases.
    expected_divisor: sums are divided by the expected size of the cohort. Without it, by the weight that arrived.
    secret_cohort: the guarantee requires that nobody learns who takes part, or how many.
    """

    name: str
    plan: Planner | None
    server_noise: bool = False
    share_noise: bool = False
    own_noise: bool = False
    step_noise: bool = False
    bounds_contribution: bool
    charges_federation: bool
    expected_divisor: bool
    secret_cohort: bool
    words: Words

    @property
    def private(self) -> bool:
        """Whether the run has a guarantee."""
        return self.plan is not None

    @property
    def masks_alone(self) -> bool:
        """Whether masks alone keep a client's contribution from the server, in runs that have masks."""
        return not self.bounds_contribution

    @property
    def local(self) -> bool:
        """Whether each client's own noise protects it, so that no other party has to be trusted."""
        return self.own_noise or self.step_noise

    @property
    def holds_against(self) -> tuple[Observer, ...]:
        """The observers that the guarantee holds against, if there is one."""
        if not self.server_noise:
            return EVERYBODY
        return READER if self.secret_cohort else CLIENTS


def of_sums(config: RunConfig, population: Population) -> Plan:
    """Noise on the sum over a secret cohort."""
    from privacy.plan import for_sums

    cohorts, passes = population.cohorts, population.passes
    releases = config.federation.rounds * passes
    return for_sums(_target(config), cohorts, releases, passes, _made(config, population))


def _made(config: RunConfig, population: Population) -> Made:
    """Makes the mechanism on sums from a noise multiplier."""
    if (quantile := config.privacy.clip_quantile) is not None:
        return partial(AdaptiveGaussian.of, quantile=quantile, expected=population.cohorts.expected)
    return population.mechanism or Gaussian


def of_turns(config: RunConfig, population: Population) -> Plan:
    """Noise on the sums of a public order's rounds."""
    from privacy.plan import for_turns

    order, rounds, passes = population.cohorts, config.federation.rounds, population.passes
    if not isinstance(order, PublicOrder):
        raise TypeError("the cohorts of a public order are not drawn at random")
    shares, correlation = config.privacy.noise == "distributed", correlation_of(config, order)
    made = _made(config, population)
    return for_turns(_target(config), order, rounds, passes, made, shares=shares, correlation=correlation)


def correlation_of(config: RunConfig, order: PublicOrder) -> Correlation:
    """The correlation of a run's noise over rounds, for the models that the server's optimizer makes."""
    federation, privacy = config.federation, config.privacy
    if privacy.correlation == "none":
        return INDEPENDENT
    momentum = federation.momentum
    if privacy.band is not None:
        return square_root(min(privacy.band, federation.rounds), momentum)
    return best(federation.rounds, order.gap, order.turns(federation.rounds), momentum)


def of_shares(config: RunConfig, population: Population) -> Plan:
    """Shares of noise inside masked sums."""
    from privacy.plan import for_shares

    if isinstance(population.cohorts, PublicOrder):
        return of_turns(config, population)
    passes, hidden = population.passes, config.privacy.hidden_cohort
    if passes > 1 and hidden:
        raise ConfigError(
            f"privacy.hidden_cohort is refused with {passes} passes a round: a client draws in secret, for one pass, whether "
            "it takes part; use a method of one pass (e.g. FRA with method.transport_form = 'dense')"
        ).about("privacy.hidden_cohort", hidden, "a method of one pass a round")
    releases = config.federation.rounds * passes
    return for_shares(_target(config), population.cohorts, releases, passes, hidden=hidden)


def of_contributions(config: RunConfig, population: Population) -> Plan:
    """Noise on each client's own contribution."""
    from privacy.plan import for_contributions

    rate, participations = population.cohorts.rate, _participations(config, population)
    return for_contributions(_target(config), rate, population.names, population.passes, participations)


def of_gradients(config: RunConfig, population: Population) -> Plan:
    """Noise on every step of each client's training."""
    from privacy.plan import for_gradients

    draws = [batch_sampler(count, config.training) for count in population.units]
    steps = [planned_steps(count, config.training) for count in population.units]
    return for_gradients(_target(config), population.names, draws, steps, _participations(config, population))


def _target(config: RunConfig) -> Target:
    from privacy.plan import Target

    privacy = config.privacy
    return Target(privacy.epsilon, privacy.noise_multiplier, privacy.delta, privacy.on_exhausted == "stop")


def _participations(config: RunConfig, population: Population) -> int:
    """The most rounds that one client takes part in."""
    from privacy.plan import usual_participations

    rounds = config.federation.rounds
    if isinstance(population.cohorts, PublicOrder):
        return min(config.privacy.participations or rounds, population.cohorts.turns(rounds))
    return min(rounds, config.privacy.participations or usual_participations(rounds, population.cohorts.rate))


NOWHERE = Placement(
    name="nowhere",
    plan=None,
    bounds_contribution=False,
    charges_federation=False,
    expected_divisor=False,
    secret_cohort=False,
    words=Words(noise="", clipped="", released="", not_covered=()),
)
SUM = Placement(
    name="sum",
    plan=of_sums,
    server_noise=True,
    bounds_contribution=True,
    charges_federation=True,
    expected_divisor=True,
    secret_cohort=True,
    words=Words(
        noise="by the server, to the sum of each pass",
        clipped="client's contribution",
        released="{} noised sums",
        not_covered=(),
    ),
)
SUM_IN_TURN = replace(
    SUM,
    plan=of_turns,
    secret_cohort=False,
    words=replace(SUM.words, not_covered=("whether and when a client takes part, which the public order reveals",)),
)
SHARES = Placement(
    name="shares",
    plan=of_shares,
    share_noise=True,
    bounds_contribution=True,
    charges_federation=True,
    expected_divisor=True,
    secret_cohort=False,
    words=Words(
        noise="by the clients: each adds its share to its own contribution before masking",
        clipped="client's contribution",
        released="{} noised sums",
        not_covered=("whether and when a client takes part",),
    ),
)
CONTRIBUTION = Placement(
    name="contribution",
    plan=of_contributions,
    own_noise=True,
    bounds_contribution=True,
    charges_federation=False,
    expected_divisor=False,
    secret_cohort=False,
    words=Words(
        noise="by each client, to its own contribution",
        clipped="client's contribution",
        released="at most {} noised contributions of any one client",
        not_covered=("whether and when a client takes part",),
    ),
)
GRADIENTS = Placement(
    name="gradients",
    plan=of_gradients,
    step_noise=True,
    bounds_contribution=False,
    charges_federation=False,
    expected_divisor=False,
    secret_cohort=False,
    words=Words(
        noise="by each client, to every step of its training",
        clipped="gradient",
        released="at most {} noised gradient steps of any one client",
        not_covered=("how many examples a client has, which sets its sampling rate and number of steps",),
    ),
)


def placement_of(config: RunConfig) -> Placement:
    """The placement that the settings request."""
    privacy = config.privacy
    if privacy.unit == "none":
        return NOWHERE
    if privacy.unit != "client":
        return GRADIENTS
    summed = SUM_IN_TURN if config.federation.sampling == "schedule" else SUM
    return {"central": summed, "distributed": SHARES, "local": CONTRIBUTION}[privacy.noise]
