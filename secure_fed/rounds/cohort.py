"""Samplers of a round's cohort, and of the dummies beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from privacy.participation import FixedSize, Poisson, PublicOrder, Sampler
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError

_DEFAULT_COHORT = 10


@dataclass(frozen=True)
class PoissonWithVacancies(Poisson):
    """Poisson sampling of a federation in which `empty` clients are held out for an audit.

    Rate, expected cohort size and largest cohort follow from `population + empty`, so they do not depend on which clients were
    held out.
    """

    empty: int = 0

    @property
    def most(self) -> int:
        return self.population + self.empty


def vacancies(present: Sequence[str], everybody: Sequence[str]) -> tuple[int, ...]:
    """The indices in `everybody` of the clients that are not present."""
    there = set(present)
    return tuple(number for number, name in enumerate(everybody) if name not in there)


def cohort_sampler(config: RunConfig, clients: int, held_out: Sequence[int] = ()) -> Sampler:
    """The sampler of cohorts for `federation.sampling`; of a fixed size where it is left open.

    held_out: the indices, among all clients, of the clients that do not train. Under Poisson sampling nothing depends on their
    number. In a public order they keep their places, which stay empty, so that nobody's turn depends on who is held out. A
    cohort of fixed size is drawn from the clients that train, and is all of them if they are fewer: its rate depends on their
    number, which follows from the clients' names and the seed, and from no private datum.
    """
    federation = config.federation
    everybody = clients + len(held_out)
    cohort = cohort_size(config, everybody)
    kind = federation.sampling
    if kind == "poisson":
        return PoissonWithVacancies(clients, cohort / everybody, len(held_out))
    if kind == "schedule":
        return PublicOrder(clients, cohort, tuple(held_out), federation.seed)
    return FixedSize(clients, min(cohort, clients))


def cohort_size(config: RunConfig, everybody: int) -> int:
    """The expected number of clients in a round, out of `everybody`."""
    cohort = config.federation.cohort or min(_DEFAULT_COHORT, everybody)
    if cohort > everybody:
        message = f"federation.cohort is {cohort}, more than the {everybody} clients there are; lower it"
        raise ConfigError(message).about("federation.cohort", cohort, f"at most {everybody}")
    return cohort


def counts_on_secrecy(config: RunConfig, everybody: int) -> bool:
    """Whether, by its settings, the guarantee of a run with `everybody` clients relies on the secrecy of cohorts.

    It does where the server's noise is on sums over random cohorts. Noise that clients add suffices even if the cohort is seen,
    and a cohort of everybody is no secret. Sampling by `auto` is a public order, or each client's own coin; a user's own
    mechanism, which draws by the server's coins, is not asked about here.
    """
    by_server = config.privacy.unit == "client" and config.privacy.noise in ("central", "auto")
    by_chance = config.federation.sampling in ("fixed", "poisson")
    return by_server and by_chance and cohort_size(config, everybody) < everybody


def dummy_sampler(cohorts: Sampler, dummies: int) -> Sampler | None:
    """The sampler of a round's dummies, None without dummies. The cohort is drawn as if there were none.

    Beside Poisson cohorts each dummy has a coin of the same rate. Beside a cohort of fixed size there is a fixed number of
    dummies: as many as take part no more often than a client, but one at least. Beside a public order dummies have their own
    order, in which turns are no closer together and no more numerous.
    """
    if not dummies:
        return None
    if isinstance(cohorts, Poisson):
        return Poisson(dummies, cohorts.rate)
    if isinstance(cohorts, PublicOrder):
        together = max(1, dummies * cohorts.size // cohorts.places)
        places = max(dummies, -(-together * cohorts.places // cohorts.size))
        return PublicOrder(dummies, together, tuple(range(dummies, places)), cohorts.seed)
    return FixedSize(dummies, max(1, math.floor(dummies * cohorts.rate + 1e-9)))


def invited(cohorts: Sampler, clients: int, *, hidden: bool) -> int:
    """The number of clients invited to a masked sum whose size is public; all of them if `hidden`.

    The shares of noise that a guarantee counts, and the survivors that a sum needs, both follow from this number.
    """
    return clients if hidden else min(round(cohorts.expected), clients)
