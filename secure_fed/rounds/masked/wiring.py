"""Puts a federation together: `behind_masks` makes both sides of its masked sums, `in_process` the transport of a simulation.

On many machines each party makes its own part with `behind_masks` (`Elsewhere`), and the transport is another.
"""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from privacy.mechanisms import AdaptiveGaussian
from privacy.participation import Poisson, PublicOrder, Sampler
from protocols.client import Here, Players
from protocols.masking import cores
from protocols.parameters import stages
from protocols.thresholds import FEWEST
from protocols.workers import OneProcess, Workers
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.rounds.client import Client, ClientSetup, Together
from secure_fed.rounds.cohort import invited
from secure_fed.rounds.masked.checks import ExpectedRounds
from secure_fed.rounds.masked.client import MaskedClient
from secure_fed.rounds.masked.server import MaskedSum
from secure_fed.rounds.masked.terms import Registry, Terms
from secure_fed.rounds.placement import placement_of
from secure_fed.rounds.protection import Protection
from secure_fed.rounds.sums import Clock
from secure_fed.rounds.transport import InProcess, Participant, Transport, Vanishing


@dataclass(frozen=True)
class Masks:
    """The masked clients, and the server's side of their sums. workers: the processes that play the clients, if any do."""

    clients: Sequence[MaskedClient]
    sums: MaskedSum
    workers: Workers | None = None

    @property
    def invited(self) -> int:
        """The number of clients invited to a sum."""
        return self.sums.terms.invited

    def begin(self, releases: int | None, barred: Iterable[int] = ()) -> None:
        """Begin or resume a run. releases: noised sums still to come; None if clients do not add the noise. barred: clients
        that dealt wrong shares in rounds before this start.
        """
        self.sums.barred.clear()
        self.sums.barred.update(barred)
        for client in self.clients:
            client.begin(releases)

    def require_precise(self, sizes: Sequence[int], clip_norm: float, rounds: int, expected: float) -> None:
        """Refuse words that are too coarse for contributions of these sizes, at any clip norm that the run may reach.

        An adaptive clip norm is checked at its minimum, and above one, where the grid follows it, where the grid is coarsest.
        """
        terms, reached = self.sums.terms, [clip_norm]
        if isinstance(mechanism := terms.protection.mechanism, AdaptiveGaussian):
            coarsest = 2 * math.frexp(1 / terms.places)[0]
            reached += [mechanism.least(clip_norm, rounds, expected), coarsest]
        for size, reachable in itertools.product(sizes, reached):
            terms.encoding(size, reachable).require_precise()


@dataclass(frozen=True)
class Elsewhere:
    """This machine's part of the masks of a federation whose clients are on separate machines.

    run: the identifier of the run, the same for all parties. registry: everybody's public keys, and this machine's own keys.
    players: keep the record of the sessions that this machine's client opened.
    """

    run: str
    registry: Registry
    players: Players


@dataclass(frozen=True)
class Spread:
    """Makes the processes begin the answers of some masked clients, after `training` has trained them."""

    workers: Workers
    training: Together | None

    def __call__(self, some: Sequence[tuple[Any, Any]]) -> None:
        if self.training:
            self.training(some)
        for client, stage in some:
            client.ahead(stage)
        self.workers.send()


def behind_masks(
    config: RunConfig, sampler: Sampler, clients: Sequence[Client], setup: ClientSetup, elsewhere: Elsewhere | None
) -> Masks | None:
    """The masks for `secure_aggregation`; None if it is not enabled. Refuses a federation that is too small.

    setup: shared by all clients. elsewhere: given where not all clients are on this machine.
    """
    if not config.secure_aggregation.enabled:
        return None
    protection, device = setup.protection, setup.objective.device
    terms = _terms(config, protection, sampler, len(clients), elsewhere)
    terms.require_feasible()
    if terms.order is not None:
        _require_full(terms, terms.order, config.federation.rounds)
    terms.require_contributors(len(clients), sampler.rate)
    clock, workers = Clock(), None
    if elsewhere:
        players: Players = elsewhere.players
        sums = MaskedSum.resumable(terms, len(clients), clock, device)
    else:
        together = OneProcess()  # both sides are made here, so all clients are of this process
        # masks are spread over processes if there are several cores, clients that work at the same time, and many shares
        several = cores() != 1 and config.training.together != 1
        worth = several and terms.invited * terms.choice(terms.invited).neighbours >= _WORTH_WORKERS
        workers = Workers() if worth else None
        players, during = workers or Here(together), (workers or together).session
        sums = MaskedSum(terms, len(clients), clock, device, during)
    rounds = ExpectedRounds(setup.method, setup.initial, terms, setup.personal, setup.acceptable)
    coin, fails = sampler.rate if protection.hidden else None, config.federation.nonfinite == "fail"
    identities = terms.registry.identities if terms.registry else (None,) * len(clients)
    behind = [
        MaskedClient(client, rounds, clock, coin, identity, players, fails_nonfinite=fails)
        for client, identity in zip(clients, identities, strict=True)
    ]
    return Masks(behind, sums, workers)


def _terms(
    config: RunConfig, protection: Protection, sampler: Sampler, clients: int, elsewhere: Elsewhere | None
) -> Terms:
    """The terms of the masked sums of so many clients."""
    settings = config.secure_aggregation
    registry = elsewhere.registry if elsewhere else Registry(clients)
    return Terms(
        settings,
        protection,
        invited=_invited(sampler, protection, clients),
        places=clients if protection.hidden else sampler.most,
        varies=isinstance(sampler, Poisson) and sampler.rate < 1 and not protection.hidden,
        most_weight=float(settings.most_examples) if config.federation.weighting == "examples" else 1.0,
        registry=registry if settings.active else None,
        clients=clients,
        order=sampler if isinstance(sampler, PublicOrder) else None,
        run=elsewhere.run if elsewhere else uuid.uuid4().hex,
    )


def _require_full(terms: Terms, order: PublicOrder, rounds: int) -> None:
    """Refuse an order in which some round has so many empty places that it has no sum and would end the run."""
    emptiest = min(range(rounds), key=lambda round_: len(order.of_round(round_)))
    if (found := len(order.of_round(emptiest))) < (least := max(FEWEST, terms.least(found))):
        raise ConfigError(
            f"round {emptiest + 1} of the public order has {found} clients, fewer than the {least} that a masked sum needs, "
            "since held-out clients leave places empty: set evaluation.audit_fraction to 0, or raise "
            "secure_aggregation.dropout"
        ).about("evaluation.audit_fraction", found, f"at least {least} in every masked sum")


def _invited(sampler: Sampler, protection: Protection, clients: int) -> int:
    """The number of clients invited to a sum.

    A secret cohort is filled up to a public number, which it exceeds with a probability of at most 2^-40. So neither the
    outcome of a sum nor its cost depends on the cohort size.
    """
    usual = invited(sampler, clients, hidden=protection.hidden)
    if usual < FEWEST:
        raise ConfigError(
            f"secure_aggregation.enabled needs {FEWEST} clients at least in a round, and there are {usual}: raise "
            "federation.cohort; in a sum of two, each client could compute the other's contribution"
        ).about("federation.cohort", usual, f"at least {FEWEST} with secure_aggregation.enabled = true")
    if protection.hides_cohort and isinstance(sampler, Poisson):
        return min(sampler.seldom_exceeded(_SELDOM), clients)
    return usual


def in_process(
    config: RunConfig,
    clients: Sequence[Client],
    masks: Masks | None,
    training: Together | None = None,
    at_once: int = 1,
) -> Transport:
    """The transport of a simulated federation, which loses clients as set by `federation.vanishing`.

    training: trains clients in common passes, `at_once` of them; without it each trains at its request.
    """
    participants: Sequence[Participant] = masks.clients if masks else clients
    prepare = Spread(masks.workers, training) if masks and masks.workers else training
    inner = InProcess(participants, prepare, at_once) if prepare else InProcess(participants)
    if not config.federation.vanishing:
        return inner
    exchanges = 1
    if masks is not None:
        terms = masks.sums.terms
        exchanges = len(stages(terms.parameters(0, range(masks.invited), bytes(32), 1, 0)))
    everybody = len(clients) if placement_of(config).secret_cohort else None
    return Vanishing(inner, config.federation.vanishing, exchanges, config.federation.seed, everybody)


_WORTH_WORKERS = 4096  # shares dealt in a sum
_SELDOM = 2.0**-40  # as the masks' own chance of failure
