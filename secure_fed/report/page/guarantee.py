"""What a private run says of its guarantee, read with suspicion: whatever does not plainly hold is told as not holding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from secure_fed.report.page.masks import missing
from secure_fed.report.page.record import RunRecord

Place = Literal["server", "shares", "contribution", "gradients"]


@dataclass(frozen=True)
class Guarantee:
    """The recorded guarantee of one run.

    place: who adds noise, and to what: the server to sums, each client its share of it inside a masked sum, or each client to
    its contribution or its gradients. replaced:
    whether neighbours differ in one client's data being others, rather than being there. terms: the recorded fields, from the
    result or, while there is none, from the plan. secret: whether noise and coins came from the operating system and nowhere
    else.
    """

    unit: str
    place: Place
    replaced: bool
    epsilon: float
    epsilon_participants: float
    delta: float
    secret: bool
    terms: Mapping[str, Any]
    text: str

    @property
    def holds(self) -> bool:
        """Whether there is a guarantee at all."""
        return self.secret and math.isfinite(self.epsilon)

    @property
    def guess(self) -> float:
        """How often a guess between two equally likely neighbours can be right: (e^epsilon + delta) / (e^epsilon + 1)."""
        rest = math.exp(-self.epsilon)
        return (1 + self.delta * rest) / (1 + rest)


def stated(record: RunRecord) -> Guarantee | None:
    """The guarantee that `record` states; None where its configuration asks for none or its files state none.

    Shares of noise are a guarantee inside masked sums alone: where the files do not show any, nothing is guaranteed.
    """
    settings = record.config.privacy
    terms = (record.result if record.result is not None else record.facts).get("privacy")
    if settings.unit == "none" or not terms:
        return None
    place = place_of(record)
    if place == "shares" and missing(record):
        return None
    return Guarantee(
        unit=settings.unit,
        place=place,
        replaced=place == "contribution" or (place == "server" and record.config.federation.sampling == "fixed"),
        epsilon=float(terms["epsilon"]),
        epsilon_participants=float(terms["epsilon_participants"]),
        delta=float(terms["delta"]),
        secret=terms["private"] is True,
        terms=terms,
        text=str(terms.get("text") if record.result is None else record.result["privacy_statement"]),
    )


def place_of(record: RunRecord) -> Place:
    """Where the settings of a private run put the noise."""
    settings = record.config.privacy
    if settings.unit != "client":
        return "gradients"
    return _PLACES[settings.noise]


_PLACES: dict[str, Place] = {"central": "server", "distributed": "shares", "local": "contribution"}
