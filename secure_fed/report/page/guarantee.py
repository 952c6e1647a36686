"""The guarantee of a private run as its files state it. A guarantee that does not clearly hold is reported as not holding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from secure_fed.config import PrivacyConfig
from secure_fed.report.page.masks import missing
from secure_fed.report.page.record import RunRecord

Place = Literal["sum", "shares", "contribution", "gradients"]


@dataclass(frozen=True)
class Guarantee:
    """The recorded guarantee of one run.

    place: as `result.json` names it, who adds the noise: the server to sums, each client its share inside a masked sum, each
    client to its contribution, or each client to its gradients. replaced: whether neighbours have one client's data replaced,
    rather than removed. terms: the recorded fields, of the result or, before there is one, of the plan. secret: whether noise
    and coins came from the operating system alone.
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


def right_at_most(epsilon: float, delta: float) -> float:
    """The largest success probability of a guess between equally likely neighbours: (e^epsilon + delta) / (e^epsilon + 1)."""
    rest = math.exp(-epsilon)
    return (1 + delta * rest) / (1 + rest)


def stated(record: RunRecord) -> Guarantee | None:
    """The guarantee that `record` states; None if its configuration asks for none or its files state none.

    Shares of noise protect only inside masked sums: if the files show no masks, there is no guarantee.
    """
    settings = record.config.privacy
    terms = (record.result if record.result is not None else record.facts).get("privacy")
    if settings.unit == "none" or not terms:
        return None
    place = _place(settings)
    if place == "shares" and missing(record):
        return None
    return Guarantee(
        unit=settings.unit,
        place=place,
        replaced=place == "contribution" or (place == "sum" and record.config.federation.sampling == "fixed"),
        epsilon=float(terms["epsilon"]),
        epsilon_participants=float(terms["epsilon_participants"]),
        delta=float(terms["delta"]),
        secret=terms["private"] is True,
        terms=terms,
        text=str(terms.get("text") if record.result is None else record.result["privacy_statement"]),
    )


def _place(settings: PrivacyConfig) -> Place:
    """From the configuration, since a run that has not ended has recorded no place."""
    places: dict[str, Place] = {"central": "sum", "distributed": "shares", "local": "contribution"}
    return places[settings.noise] if settings.unit == "client" else "gradients"
