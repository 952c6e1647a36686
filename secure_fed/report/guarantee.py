"""The guarantee of a private run as its files state it, in the pictures, the details and the statement of its report.

stated                            the guarantee that the files state; one that does not clearly hold is reported as void
guarantee_picture, path_picture   the first screen: how much each observer may learn, and what each party sees of an update
in_detail                         true-positive rates that it allows, other deltas, and groups
statement                         the guarantee in the words of the result, and every term that it rests on
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from secure_fed.config import PrivacyConfig
from secure_fed.report import markup
from secure_fed.report.formatting import MISSING, at_most, counted, number, rate
from secure_fed.report.markup import Bar, Station, facts, figure, figures, folded, paragraph, section, table
from secure_fed.report.masks import masked, missing
from secure_fed.report.record import RunRecord

Floats = NDArray[np.float64]
Rows = list[tuple[str, str]]
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


def guarantee_picture(record: RunRecord) -> str:
    """Epsilon against each observer on one scale, with the share of right guesses that it allows; "" without a guarantee."""
    guarantee = stated(record)
    if guarantee is None or not guarantee.holds:
        return ""
    assumed = " Against the server it rests on the assumptions below." if guarantee.place == "shares" else ""
    how = (
        f"An observer guesses whether {_ONE[guarantee.unit]} was in the training; yes and no are equally likely. A bar shows"
        " the most guesses that can be right by epsilon alone (a known mechanism allows fewer, which the audit states). Axis:"
        f" epsilon, and below it that share. A coin is right in 50 %.{assumed}"
    )
    drawn = markup.limits("epsilon against each observer", observers(guarantee))
    return figure("How often a guess may be right", drawn, how)


def observers(guarantee: Guarantee) -> tuple[Bar, ...]:
    """A bar for the reader, the participant and the server; observers with equal epsilon share one."""
    seen = guarantee.epsilon_participants
    server = math.inf if guarantee.place == "sum" else seen
    found: tuple[tuple[str, float], ...] = ((_READERS, guarantee.epsilon), (_PARTICIPANTS, seen), (_SERVER, server))
    if guarantee.epsilon == seen:
        found = ((_EVERYBODY, seen),) if server == seen else ((_BUT_THE_SERVER, seen), (_SERVER, server))
    return tuple(Bar(name, epsilon, limit(epsilon, guarantee.delta)) for name, epsilon in found)


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


def right_at_most(epsilon: float, delta: float) -> float:
    """The largest success probability of a guess between equally likely neighbours: (e^epsilon + delta) / (e^epsilon + 1)."""
    rest = math.exp(-epsilon)
    return (1 + delta * rest) / (1 + rest)


def path_picture(record: RunRecord) -> str:
    """Clients, server and readers of the model: what each sees, where noise is added, and the guarantee against each."""
    drawn = markup.path("who sees what", stations(record, stated(record)), carried(record))
    return figure("Who sees what", drawn, _EPSILON if record.private else _UNLIMITED)


def stations(record: RunRecord, guarantee: Guarantee | None) -> tuple[Station, ...]:
    """The places that an update passes, in order."""
    place = guarantee.place if guarantee else "nowhere"
    holds = guarantee is not None and guarantee.holds
    against = at_most(guarantee.epsilon_participants) if guarantee else ""
    server = f"epsilon {against}" if holds and place != "sum" else "trusted" if holds else "no limit"
    readers = f"epsilon {at_most(guarantee.epsilon)}" if guarantee and holds else "no limit"
    sees = f"sees every {_NOISED.get(place, '')}update"
    if masked(record):
        few = record.draws_by_coins and not record.config.secure_aggregation.active
        sees = f"sees {'each sum, even of one client' if few else 'only the sum of a round'}{_IN_SUM.get(place, '')}"
    return (
        Station(counted(len(record.client_names), "client"), _CLIENTS[place], noise=_BY_CLIENTS.get(place, "")),
        Station("Server", sees, server, noise="+ noise" if place == "sum" else ""),
        Station("Readers of the model", "the model after every round", readers),
    )


def carried(record: RunRecord) -> tuple[str, str]:
    """The data sent between the stations."""
    return (
        "masked updates; masks cancel when summed" if masked(record) else "updates, not texts",
        "the shared model",
    )


def in_detail(guarantee: Guarantee) -> str:
    """True-positive rates that are allowed, other deltas, and groups, folded away; empty where the result lacks them."""
    terms = guarantee.terms
    if not terms.get("curve"):
        return ""
    mu = terms["gaussian_mu"]
    curve = table(("delta", "epsilon"), ((f"{one['delta']:g}", at_most(one["epsilon"])) for one in terms["curve"]))
    return folded(
        "The guarantee in detail",
        figures(
            figure(
                "Catches that the guarantee allows",
                markup.tradeoff("most catches at a rate of false alarms", allowed(terms)),
                "Somebody who knows all else says who was in the training. No attack lies above the line; dashed: guessing. "
                + ("By epsilon at all these deltas." if mu is None else "Exact for this mechanism."),
            )
        ),
        paragraph(
            "The guarantee is not exactly that of one Gaussian, so no mu is given."
            if mu is None
            else f"It is exactly Gaussian differential privacy of mu {rate(mu)}: telling one draw of N(0, 1) from one of N(mu, "
            "1)."
        ),
        paragraph("All of these hold at once:"),
        curve,
        _groups(terms, guarantee.delta),
    )


def allowed(terms: Mapping[str, Any]) -> Callable[[Floats], Floats]:
    """The largest true-positive rate at a false-positive rate: by mu where it is exact, else by all (epsilon, delta)."""
    from scipy.special import ndtr, ndtri

    mu, curve = terms["gaussian_mu"], terms["curve"]

    def caught(alarms: Floats) -> Floats:
        if mu is not None:
            exact: Floats = ndtr(ndtri(alarms) + mu)
            return exact
        bounds = [np.ones_like(alarms)]
        for one in curve:
            up, down = np.exp(min(one["epsilon"], 700.0)), np.exp(-one["epsilon"])
            bounds += [up * alarms + one["delta"], 1 - down * (1 - one["delta"] - alarms)]
        least: Floats = np.min(bounds, axis=0)
        return least

    return caught


def _groups(terms: Mapping[str, Any], delta: float) -> str:
    rows = [(number(one["units"]), at_most(one["epsilon"])) for one in terms["groups"]]
    if not rows:
        return paragraph(f"At delta {delta:g} nothing follows for two units together.")
    loose = "" if all(one["exact"] for one in terms["groups"]) else " This bound is loose."
    return paragraph(f"For several units together, at delta {delta:g}:{loose}") + table(("units", "epsilon"), rows)


def statement(record: RunRecord) -> str:
    """The recorded statement, whole, and its terms as a table; empty where the run recorded none."""
    guarantee = stated(record)
    if guarantee is not None:
        return section(
            "Statement for the record",
            "" if guarantee.holds else paragraph("This is no guarantee: the run is NOT PRIVATE.", "notice"),
            paragraph(guarantee.text, "recorded"),
            facts(_terms(record, guarantee), "terms"),
        )
    recorded = (record.result or {}).get("privacy_statement")
    return section("Statement for the record", paragraph(str(recorded), "recorded") if recorded else "")


def _terms(record: RunRecord, guarantee: Guarantee) -> Rows:
    """Everything needed to check the guarantee, or to doubt it."""
    terms = guarantee.terms
    return [
        ("unit", terms["unit"]),
        ("neighbours", terms["adjacency"]),
        ("epsilon", at_most(guarantee.epsilon)),
        *_against(guarantee),
        ("delta", f"{guarantee.delta:g} (1 in {number(round(1 / guarantee.delta))})"),
        ("mechanism", terms["mechanism"]),
        ("clip norm", f"{terms['clip_norm']:g}"),
        ("noise is added", terms["noise"]),
        *_realised(terms),
        ("sampling", terms["sampling"]),
        ("accountant", terms["accountant"]),
        ("trusted", terms["trust"]),
        ("released", terms["released"]),
        *_spending(record, guarantee),
    ]


def _against(guarantee: Guarantee) -> Rows:
    """The observers that epsilon holds against, and the second epsilon where the first does not hold against participants."""
    those = guarantee.terms.get("holds_against", ("reader",))
    seen = f"{at_most(guarantee.epsilon_participants)}, against observers who see which clients take part in a round"
    held = [("epsilon holds against", ", ".join(_OBSERVERS[one] for one in those))]
    return held if "participant" in those else [*held, ("epsilon against participants", seen)]


def _realised(terms: Mapping[str, Any]) -> Rows:
    """The noise that the surviving clients actually added, where clients add it. The guarantee does not rely on it."""
    found = terms.get("realised")
    if not found:
        return []
    smallest = (
        f"multiplier {rate(found['noise_multiplier'])} in the smallest sum, of {number(found['survivors'])} clients"
    )
    would_be = f"that would be epsilon {at_most(found['epsilon'])}, but the guarantee does not count on it"
    return [("noise as realised", f"{smallest}; {would_be}")]


def _spending(record: RunRecord, guarantee: Guarantee) -> Rows:
    """The charges and their ledger, once there is a result."""
    if record.result is None:
        return [("ledger", record.config.privacy.ledger or "in the run directory")]
    terms = guarantee.terms
    limit, limit_delta = terms["budget_epsilon"], terms["budget_delta"]
    of_limit = "without a limit" if limit is None else f"of {at_most(limit)} (delta {limit_delta:g})"
    most = terms["participations"]
    return [
        ("releases", f"{number(record.result['releases'])} charged, {number(terms['planned_releases'])} planned"),
        *([("rounds of one client", f"at most {number(most)}")] if most else []),
        ("ledger", str(terms["ledger"])),
        ("data set of the ledger", str(terms["data_set"]) or MISSING),
        (
            "spent in the ledger",
            f"epsilon {at_most(record.result['epsilon_cumulative'])} {of_limit}, when this run ended",
        ),
    ]


_READERS, _PARTICIPANTS, _SERVER = "Readers of the model", "Whoever sees cohorts", "The server"
_EVERYBODY, _BUT_THE_SERVER = "Everybody", "Everybody but the server"
_ONE = {"client": "one client", "example": "one example", "person": "one person"}
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
_UNLIMITED = "No limit: nothing bounds how often this party guesses rightly whether one unit was in the training."
_EPSILON = "Right side of a box: the epsilon against this party, or that it is trusted. “+ noise” marks who adds it."
_OBSERVERS = {
    "reader": "readers of the models",
    "participant": "observers who see when each client takes part",
    "server": "the server",
}
