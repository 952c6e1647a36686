"""The terms of a run's reservation, and the unit that its costs protect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from privacy.book import Unit
from secure_fed.config import RunConfig

if TYPE_CHECKING:
    from privacy.plan import Plan  # it loads an accountant
    from secure_fed.learning.problem import Problem


@dataclass(frozen=True)
class Subject:
    """The subject of a run's costs: digests of the data and of which rows belong to which unit, and the unit's name and kind.

    The digests are unkeyed, and only for the ledger, which stores them under its key.
    """

    data: str
    members: str
    name: str
    kind: str

    @classmethod
    def of(cls, config: RunConfig, problem: Problem) -> Subject:
        return cls(problem.data_digest, problem.unit_digest, unit_name(config), config.privacy.unit)

    def unit(self, plan: Plan) -> Unit:
        """The ledger's unit: its neighbours follow from the plan's sampling and the place of its noise."""
        return Unit(self.name, self.kind, self.members, plan.release.adjacency)


def unit_name(config: RunConfig) -> str:
    """The name of the protected unit in a ledger: the user's, else from the column that identifies units."""
    privacy, client = config.privacy, config.data.client
    columns = {"client": client, "group": privacy.group_column}
    return privacy.unit_name or columns.get(privacy.unit) or privacy.unit


CHARGED_HERE = "charged_here"


def terms_of(plan: Plan, *, charged_here: bool) -> dict[str, Any]:
    """The terms of a reservation, beside its cost and its unit.

    charged_here: whether every release of the run is charged in this ledger before it is made. Then a run without any charge
    has made none, and can be closed (`give_back`).
    """
    return {
        "noise_multiplier": plan.noise_multiplier,
        "sampling_rate": plan.sampling_rate,
        "releases": plan.releases,
        "event": repr(plan.release.event),
        CHARGED_HERE: charged_here,
    }
