"""The plan of a private run, for each place where its noise can be: the number of releases, their noise, and their cost.

Accounting takes seconds to import, which a run without privacy need not wait for: it is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from privacy.correlation import INDEPENDENT, Correlation, best, square_root
from privacy.mechanisms import AdaptiveGaussian, Gaussian
from privacy.sampling import PublicOrder, Sampler
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.training.local import batch_sampler, planned_steps

if TYPE_CHECKING:
    from privacy.plan import Made, Plan, Target


@dataclass(frozen=True)
class Population:
    """The parties that a plan counts.

    names: of the clients. units: examples, or groups of examples, at each client. cohorts: the sampler of cohorts. passes:
    releases a round. mechanism: makes the user's own mechanism from a noise multiplier.
    """

    names: Sequence[str]
    units: Sequence[int]
    cohorts: Sampler
    passes: int
    mechanism: Made | None = None


def of_sums(config: RunConfig, population: Population) -> Plan:
    """Noise on the sum over a secret cohort."""
    from privacy.plan import for_sums

    releases, cohorts, quantile = (
        config.federation.rounds * population.passes,
        population.cohorts,
        config.privacy.clip_quantile,
    )
    made: Made = population.mechanism or Gaussian
    if quantile is not None:
        made = partial(AdaptiveGaussian.of, quantile=quantile, expected=cohorts.expected)
    return for_sums(_target(config), cohorts, releases, population.passes, made)


def of_turns(config: RunConfig, population: Population) -> Plan:
    """Noise on the sums of a public order's rounds."""
    from privacy.plan import for_turns

    order, rounds, quantile = _order(population), config.federation.rounds, config.privacy.clip_quantile
    shares = config.privacy.noise == "distributed"
    correlation = correlation_of(config, order)
    made: Made = Gaussian
    if quantile is not None:
        made = partial(AdaptiveGaussian.of, quantile=quantile, expected=order.expected)
    return for_turns(_target(config), order, rounds, population.passes, made, shares=shares, correlation=correlation)


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
            f"privacy.hidden_cohort is refused with {passes} passes a round over one coin toss of each client: no bound is "
            "proven for the cost of the second pass; use a method of one pass (e.g. FRA with method.transport_form = 'dense')"
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


def _order(population: Population) -> PublicOrder:
    if not isinstance(population.cohorts, PublicOrder):
        raise TypeError("the cohorts of a public order are not drawn by coins")
    return population.cohorts


def _participations(config: RunConfig, population: Population) -> int:
    """The most rounds that one client takes part in."""
    from privacy.plan import usual_participations

    rounds = config.federation.rounds
    if isinstance(population.cohorts, PublicOrder):
        return min(config.privacy.participations or rounds, population.cohorts.turns(rounds))
    return min(rounds, config.privacy.participations or usual_participations(rounds, population.cohorts.rate))
