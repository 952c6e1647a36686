"""The terms of a run's masked sums, computed by each party from the run's configuration.

A client accepts no other terms, so no server can lower its minima.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from privacy.errors import PlanError
from privacy.participation import PublicOrder
from protocols.errors import Aborted, ParameterError
from protocols.keys import Identity, registry_digest
from protocols.parameters import Parameters, Policy
from protocols.thresholds import FEWEST, Choice, choose, colluding, surviving
from secure_fed.config import SecureAggregationConfig
from secure_fed.errors import ConfigError
from secure_fed.rounds.masked.encoding_plan import Encoding, Noised, PublicPlan, Rounded
from secure_fed.rounds.protection import Protection


@dataclass(frozen=True)
class Registry:
    """The identity keys of a federation's clients, whose public halves everybody knows.

    known: the public keys, where clients are on separate machines. own: the keys of the clients on this machine. Without them
    all keys are made here, as for a simulation.
    """

    clients: int
    known: Mapping[int, bytes] | None = None
    own: Mapping[int, Identity] = field(default_factory=dict)

    @cached_property
    def identities(self) -> tuple[Identity | None, ...]:
        """Each client's key, None for clients on other machines."""
        made = (Identity.new() if self.known is None else self.own.get(client) for client in range(self.clients))
        return tuple(made)

    @cached_property
    def public(self) -> Mapping[int, bytes]:
        if self.known is not None:
            return self.known
        return {client: identity.public for client, identity in enumerate(self.identities) if identity}


@dataclass(frozen=True)
class Terms:
    """The terms of a run's masked sums.

    invited: the number of clients invited to a sum, which is public. places: the largest number of clients in a sum. varies:
    coins draw the cohort; it is then filled up to `invited` with clients that contribute zeros, and only a larger draw invites
    more, up to `places`. most_weight: the largest weight; a larger one counts as this. registry: the identities of all clients,
    known to everybody before the run; needed where the server may lie. clients: the number of the run's clients; None: it is
    not checked. order: the public order of clients, if cohorts follow one. run: an identifier that no other run has.
    """

    settings: SecureAggregationConfig
    protection: Protection
    invited: int
    places: int
    varies: bool = False
    most_weight: float = 1.0
    registry: Registry | None = None
    clients: int | None = None
    order: PublicOrder | None = None
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    def choice(self, clients: int) -> Choice:
        """Neighbours and threshold for a sum of `clients` clients.

        A sum that lost invited clients before it began keeps the terms for all of them: equally many may be corrupt, and
        equally many must survive.
        """
        chosen = self.settings
        corrupt, dropout = chosen.corrupt, chosen.dropout
        if clients < self.invited:
            if clients < self.least(clients):
                raise Aborted(f"{clients} clients are left, fewer than the {self.least(clients)} that a sum needs")
            corrupt = max(0.0, colluding(self.invited, corrupt) - 0.5) / clients  # counted upwards
            dropout = (clients - surviving(self.invited, chosen.dropout) + 0.5) / clients
        fixed = {name: getattr(chosen, name) for name in ("active", "neighbours", "threshold")}
        try:
            return _chosen(clients, corrupt=corrupt, dropout=dropout, **fixed)
        except ParameterError as error:
            raise ConfigError(
                f"no masked sum of {clients} clients meets these settings: {error} (secure_aggregation.corrupt, dropout, "
                "neighbours, threshold; federation.cohort)"
            ).about("secure_aggregation.corrupt", corrupt, "a sum that so many clients can be masked in") from error

    def parameters(self, number: int, invited: Sequence[int], layout: bytes, length: int, bound: int) -> Parameters:
        """The parameters of the run's sum with this number. length: words of a vector. bound: largest magnitude of a word."""
        choice = self.choice(len(invited))
        return Parameters(
            run=self.run,
            round=number,
            layout=layout,
            length=length,
            bits=self.settings.bits,
            clients=tuple(invited),
            neighbours=choice.neighbours,
            threshold=choice.threshold,
            survivors=self.least(len(invited)),
            active=self.settings.active,
            bound=bound,
            partners=choice.partners,
            registry=registry_digest(self.registry.public, invited) if self.registry else bytes(32),
        )

    def policy(self, clients: int) -> Policy:
        """The terms that a client accepts for a sum of `clients` invited clients."""
        least, most = self.least(clients), self.places if self.varies else self.invited
        if not least <= clients <= most:
            raise ParameterError(
                f"the server invites {clients} clients to a sum, and the run's terms are {least} to {most}",
                protected="nothing was sent",
            )
        choice = self.choice(clients)
        return Policy(
            threshold=choice.threshold,
            survivors=self.least(clients),
            corrupt=choice.corrupt,
            window=choice.window,
            partners=choice.partners,
            colluding=choice.colluding,
            active=self.settings.active,
            identities=self.registry.public if self.registry else {},
            clients=FEWEST,
            neighbours=choice.neighbours,
        )

    @property
    def declares(self) -> bool:
        """Whether clients check the list of contributors: if others send zeros, and the server may lie about which."""
        return self.varies and self.settings.active

    def fewest(self, clients: int) -> int:
        """The least number of contributors in a sum of `clients` clients if others send zeros: two of them are honest."""
        return max(FEWEST, colluding(max(clients, self.invited), self.settings.corrupt) + 2)

    def require_contributors(self, places: int, rate: float) -> None:
        """Refuse coins that may draw a cohort too small for a sum that declares its contributors.

        places: the number of coins.

        Such a round can be neither skipped nor redrawn: either would reveal the cohort size, which the guarantee requires to be
        secret. So its probability must be negligible.
        """
        if not self.declares:
            return
        from scipy.special import bdtr

        enough = self.fewest(self.invited) + self.invited - surviving(self.invited, self.settings.dropout)
        chance = float(bdtr(enough - 1, places, rate)) if enough <= places else 1.0
        if chance > _NEVER:
            raise ConfigError(
                f"secure_aggregation.active needs {enough} contributors in every sum, and a random draw of {places * rate:g} "
                f"of {places} clients on average has fewer with a chance of 2^{math.log2(chance):.1f}, above 2^-40: raise "
                "federation.cohort, set federation.sampling = 'fixed', or hide who trains "
                "(privacy.noise = 'distributed', privacy.hidden_cohort = true)"
            ).about("federation.cohort", places * rate, f"hardly ever fewer than {enough} contributors")

    def least(self, clients: int) -> int:
        """The least number of survivors of a sum with `clients` invited clients."""
        return surviving(max(clients, self.invited), self.settings.dropout)

    def require_feasible(self) -> None:
        """Refuse, before the run, terms under which some cohort size has no sum, or less noise than the guarantee counts."""
        self.choice(self.invited)
        self._require_counted_shares()
        if not self.varies:
            return
        settings = self.settings
        for name in ("neighbours", "threshold"):
            if (value := getattr(settings, name)) is not None:
                raise ConfigError(
                    f"secure_aggregation.{name} = {value} cannot be fixed where the cohort's size is random, since it goes by "
                    "this size: leave it out, or set federation.sampling = 'fixed'"
                ).about(f"secure_aggregation.{name}", value, "federation.sampling = 'fixed'")
        for clients in range(self.invited, self.places + 1):
            corrupt, left = colluding(clients, settings.corrupt), surviving(clients, settings.dropout)
            threshold = (clients - 1 + corrupt) // 2 + 1 if settings.active else corrupt + 1
            if threshold > left - 1 or left < corrupt + 2:
                self.choice(clients)  # its error names the setting to lower

    def _require_counted_shares(self) -> None:
        """PlanError if the fewest survivors, without colluders, have fewer shares of noise than are counted.

        No setting leads there: noise and terms follow from one number of clients. This holds the two together.
        """
        shares = self.protection.shares
        if shares is None:
            return
        honest = self.least(self.invited) - colluding(self.invited, self.settings.corrupt)
        if honest < shares.shares:
            raise PlanError(
                f"the guarantee counts {shares.shares} shares of noise, and a sum may have only {honest} of honest clients"
            )

    def encoding(self, size: int, clip_norm: float) -> Encoding:
        """The encoding of contributions of `size` numbers, which does not depend on the number of participants."""
        mechanism, placement = self.protection.mechanism, self.protection.placement

        def plan(bound: float, clip_norm: float = math.inf) -> PublicPlan:
            return PublicPlan(size, self.settings.bits, self.places, bound, clip_norm)

        if self.protection.shares is not None:
            return Noised(plan(clip_norm, clip_norm), self.protection.shares)
        if placement.server_noise:
            return Rounded(plan(max(clip_norm, 1.0), clip_norm))
        if placement.own_noise:
            return Rounded(plan(clip_norm + _FARTHEST * mechanism.std(clip_norm)))
        return Rounded(plan(self.settings.range), self.most_weight, with_loss=not placement.private)


_chosen = lru_cache(maxsize=1024)(choose)
_NEVER = 2.0**-40  # as in `protocols.thresholds`
_FARTHEST = 9.0  # standard deviations: no normal number of `privacy.entropy` is farther out
