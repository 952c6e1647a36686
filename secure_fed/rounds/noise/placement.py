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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from privacy.statement import CLIENTS, EVERYBODY, READER, Observer
from secure_fed.config import RunConfig
from secure_fed.rounds.noise import plans
from secure_fed.rounds.noise.plans import Population

if TYPE_CHECKING:
    from privacy.plan import Plan

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
    plan=plans.of_sums,
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
    plan=plans.of_turns,
    secret_cohort=False,
    words=replace(SUM.words, not_covered=("whether and when a client takes part, which the public order reveals",)),
)
SHARES = Placement(
    name="shares",
    plan=plans.of_shares,
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
    plan=plans.of_contributions,
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
    plan=plans.of_gradients,
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
_OF_CLIENTS = {"central": SUM, "distributed": SHARES, "local": CONTRIBUTION}


def placement_of(config: RunConfig) -> Placement:
    """The placement that the settings request."""
    privacy = config.privacy
    if privacy.unit == "none":
        return NOWHERE
    if privacy.unit != "client":
        return GRADIENTS
    in_turn = privacy.noise == "central" and config.federation.sampling == "schedule"
    return SUM_IN_TURN if in_turn else _OF_CLIENTS[privacy.noise]
