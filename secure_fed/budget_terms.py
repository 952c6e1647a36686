"""On what terms a run reserves, and which runs' costs add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from privacy.errors import LedgerError
from privacy.ledger import Ledger
from secure_fed.config.sections import PrivacyConfig

if TYPE_CHECKING:
    from secure_fed.privacy_plan import Plan


@dataclass(frozen=True)
class Subject:
    """What a run's costs are counted for: the data by their digest, and by another which rows belong to which client."""

    data: str
    division: str


def require_same_kind(ledger: Ledger, privacy: PrivacyConfig, plan: Plan, subject: Subject) -> None:
    """Costs add up for one unit and one kind of neighbours: an example is no client, and a client replaced is not one more.

    Nor is a client that has other rows the same one, unless the user says by `data_set` that it is.
    """
    asked = {"unit": privacy.unit, "adjacency": plan.release.adjacency}
    if privacy.unit != "example" and not privacy.data_set:
        asked["division"] = subject.division
    for row in ledger.rows():
        terms = row.body.get("terms", {}) if row.kind == "reserve" else {}
        if differing := [name for name, value in asked.items() if terms.get(name, value) != value]:
            shown = " and ".join(f"{_SAID[name]} {terms[name]!r:.20}, not {asked[name]!r:.20}" for name in differing)
            raise LedgerError(
                f"{ledger.path} counts privacy for {shown} (row {row.id}): use the same privacy.unit, privacy.noise, "
                "federation.sampling and division of the data, or another ledger"
            )


_SAID = {"unit": "unit", "adjacency": "neighbours", "division": "clients who hold other rows:"}


def terms_of(privacy: PrivacyConfig, plan: Plan, subject: Subject) -> dict[str, Any]:
    """What a reservation says beside its cost."""
    return {
        "unit": privacy.unit,
        "noise_multiplier": plan.noise_multiplier,
        "sampling_rate": plan.sampling_rate,
        "releases": plan.releases,
        "event": repr(plan.release.event),
        "adjacency": plan.release.adjacency,
        "division": subject.division,
    }
