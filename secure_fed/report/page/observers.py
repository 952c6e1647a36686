"""The two pictures of the first screen: how much each observer may learn, and the data that each party sees of an update."""

from __future__ import annotations

import math

from secure_fed.report.formatting import at_most, counted
from secure_fed.report.page import pictures
from secure_fed.report.page.guarantee import Guarantee, right_at_most, stated
from secure_fed.report.page.markup import figure
from secure_fed.report.page.masks import masked
from secure_fed.report.page.pictures import Bar, Station
from secure_fed.report.page.record import RunRecord


def guarantee_picture(record: RunRecord) -> str:
    """Epsilon against each observer on one scale, with the share of right guesses that it allows; "" without a guarantee."""
    guarantee = stated(record)
    if guarantee is None or not guarantee.holds:
        return ""
    drawn = pictures.limits("epsilon against each observer", observers(guarantee))
    return figure("How often a guess may be right", drawn, _scale(guarantee))


def path_picture(record: RunRecord) -> str:
    """Clients, server and readers of the model: what each sees, where noise is added, and the guarantee against each."""
    drawn = pictures.path("who sees what", stations(record, stated(record)), carried(record))
    return figure("Who sees what", drawn, _EPSILON if record.private else _UNLIMITED)


def observers(guarantee: Guarantee) -> tuple[Bar, ...]:
    """A bar for the reader, the participant and the server; observers with equal epsilon share one."""
    seen = guarantee.epsilon_participants
    server = math.inf if guarantee.place == "sum" else seen
    found: tuple[tuple[str, float], ...] = ((_READERS, guarantee.epsilon), (_PARTICIPANTS, seen), (_SERVER, server))
    if guarantee.epsilon == seen:
        found = ((_EVERYBODY, seen),) if server == seen else ((_BUT_THE_SERVER, seen), (_SERVER, server))
    return tuple(Bar(name, epsilon, limit(epsilon, guarantee.delta)) for name, epsilon in found)


def stations(record: RunRecord, guarantee: Guarantee | None) -> tuple[Station, ...]:
    """The places that an update passes, in order."""
    place = guarantee.place if guarantee else "nowhere"
    holds = guarantee is not None and guarantee.holds
    against = at_most(guarantee.epsilon_participants) if guarantee else ""
    server = f"epsilon {against}" if holds and place != "sum" else "trusted" if holds else "no limit"
    readers = f"epsilon {at_most(guarantee.epsilon)}" if guarantee and holds else "no limit"
    return (
        Station(counted(len(record.client_names), "client"), _CLIENTS[place], noise=_BY_CLIENTS.get(place, "")),
        Station("Server", _sees(record, place), server, noise="+ noise" if place == "sum" else ""),
        Station("Readers of the model", "the model after every round", readers),
    )


def carried(record: RunRecord) -> tuple[str, str]:
    """The data sent between the stations."""
    return (
        "masked updates; masks cancel when summed" if masked(record) else "updates, not texts",
        "the shared model",
    )


def _sees(record: RunRecord, place: str) -> str:
    """The server's view of a round, in a few words."""
    if not masked(record):
        return f"sees every {_NOISED.get(place, '')}update"
    few = record.draws_by_coins and not record.config.secure_aggregation.active
    return f"sees {'each sum, even of one client' if few else 'only the sum of a round'}{_IN_SUM.get(place, '')}"


def _scale(guarantee: Guarantee) -> str:
    assumed = _ASSUMED if guarantee.place == "shares" else ""
    return (
        f"An observer guesses whether {_ONE[guarantee.unit]} was in the training; yes and no are equally likely. A bar shows"
        " the most guesses that can be right by epsilon alone (a known mechanism allows fewer, which the audit states). Axis:"
        f" epsilon, and below it that share. A coin is right in 50 %.{assumed}"
    )


def limit(epsilon: float, delta: float) -> str:
    """Epsilon and the share of right guesses, both rounded up."""
    if not math.isfinite(epsilon):
        return "no limit"
    most = share(epsilon, delta)
    return f"ε ≤ {at_most(epsilon)}: {'next to no limit' if most == '100 %' else f'right in ≤ {most}'}"


def share(epsilon: float, delta: float) -> str:
    """The share of right guesses, rounded up to a hundredth of a per cent."""
    hundredths = math.ceil(10_000 * right_at_most(epsilon, delta)) / 100
    return "100 %" if hundredths > 99.99 else f"{hundredths:.2f} %"


_READERS, _PARTICIPANTS, _SERVER = "Readers of the model", "Whoever sees cohorts", "The server"
_EVERYBODY, _BUT_THE_SERVER = "Everybody", "Everybody but the server"
_ONE = {"client": "one client", "example": "one example", "group": "one person"}
_BY_CLIENTS = {"shares": "+ share of the noise", "contribution": "+ noise", "gradients": "+ noise in every step"}
_CLIENTS = {
    "nowhere": "train on their own data",
    "sum": "train, clip their updates",
    "shares": "train, clip their updates",
    "contribution": "train, clip their updates",
    "gradients": "train, clip every gradient",
}
_NOISED = {"contribution": "noised "}
_IN_SUM = {"shares": ", noise included", "contribution": ", noise included"}
_ASSUMED = " Against the server it rests on the assumptions below."
_UNLIMITED = "No limit: nothing bounds how often this party guesses rightly whether one unit was in the training."
_EPSILON = "Right side of a box: the epsilon against this party, or that it is trusted. “+ noise” marks who adds it."
