"""The guarantee of a private run as its files state it, in the pictures and the details of its report.

stated                            the guarantee that the files state; one that does not clearly hold is reported as void
guarantee_picture, path_picture   the first screen: how much each observer may learn, and what each party sees of an update
together                          what it is worth for a person who is more than one unit
in_detail                         true-positive rates that it allows, other deltas, and groups
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from secure_fed.config import PrivacyConfig
from secure_fed.report import markup
from secure_fed.report.formatting import at_most, counted, number, rate
from secure_fed.report.markup import Bar, Station, figure, figures, folded, paragraph, table
from secure_fed.report.masks import masked, missing
from secure_fed.report.record import RunRecord

Floats = NDArray[np.float64]
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
    def mu(self) -> float | None:
        """The mu of Gaussian differential privacy, where one is known; it is recorded once there is a result."""
        mu: float | None = self.terms.get("gaussian_mu")
        return mu

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
    follows = "the signing keys are right" if record.config.secure_aggregation.active else _FOLLOWS
    assumed = f" Against the server it assumes that {follows}." if guarantee.place == "shares" else ""
    how = (
        f"An observer guesses whether {GUESSED[guarantee.unit]}; yes and no are equally likely. {PRESENCE} A bar shows epsilon,"
        f" and beside it the most guesses that can be right {_BY_MU if guarantee.mu is not None else _BY_EPSILON} A guess at"
        f" random is right in 50 %.{assumed}"
    )
    seen = guarantee.epsilon_participants
    server = math.inf if guarantee.place == "sum" else seen
    observers = ((_MODEL, guarantee.epsilon), (_CLIENTS, seen), (_SERVER, server))
    bars = [Bar(name, epsilon, limit(epsilon, guarantee.delta, guarantee.mu)) for name, epsilon in observers]
    return figure("How often a guess may be right", markup.limits("epsilon against each observer", bars), how)


def limit(epsilon: float, delta: float, mu: float | None = None) -> str:
    """Epsilon and the share of right guesses, both rounded up."""
    if not math.isfinite(epsilon):
        return "no limit"
    most = share(epsilon, delta, mu)
    return f"ε ≤ {at_most(epsilon)}: {'next to no limit' if most == '100 %' else f'right in ≤ {most}'}"


def share(epsilon: float, delta: float, mu: float | None = None) -> str:
    """The share of right guesses, rounded up: with a known mu to a tenth of a per cent, else to a hundredth."""
    by_epsilon = right_at_most(epsilon, delta)
    if mu is not None and (by_mu := NormalDist().cdf(mu / 2)) < min(by_epsilon, 0.999):
        return f"{math.ceil(1000 * by_mu) / 10:.1f} %"
    hundredths = math.ceil(10_000 * by_epsilon) / 100
    return "100 %" if hundredths > 99.99 else f"{hundredths:.2f} %"


def right_at_most(epsilon: float, delta: float) -> float:
    """The largest success probability of a guess between equally likely neighbours: (e^epsilon + delta) / (e^epsilon + 1).

    Where the two are N(0, 1) and N(mu, 1) it is Phi(mu / 2).
    """
    rest = math.exp(-epsilon)
    return (1 + delta * rest) / (1 + rest)


def path_picture(record: RunRecord) -> str:
    """Clients, server and the final model: what each party sees, where noise is added, and the guarantee against each."""
    carried = "masked updates; masks cancel when summed" if masked(record) else "updates, not texts"
    drawn = markup.path("who sees what", stations(record, stated(record)), (carried, "the shared model"))
    how = _EPSILON if record.private else _UNLIMITED
    if record.deployed:
        return figure("Who sees what", drawn, how)
    return figure("Who sees what (simulated)", drawn, f"{how} {SIMULATED} In a deployment each party would see this.")


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
        Station(counted(len(record.client_names), "client"), _TRAIN[place], noise=_BY_CLIENTS.get(place, "")),
        Station("Server", sees, server, noise="+ noise" if place == "sum" else ""),
        Station(_MODEL, "the model after every round", readers),
    )


def in_detail(guarantee: Guarantee) -> str:
    """True-positive rates that are allowed, other deltas, and groups, folded away; empty where the result lacks them."""
    terms = guarantee.terms
    if not terms.get("curve"):
        return ""
    curve = table(("delta", "epsilon"), ((f"{one['delta']:g}", at_most(one["epsilon"])) for one in terms["curve"]))
    by, known = "By epsilon at all these deltas.", "No mu of Gaussian differential privacy is known for this noise."
    if (mu := terms["gaussian_mu"]) is not None:
        by = "By the mu of this noise."
        known = (
            f"It is Gaussian differential privacy of mu {rate(mu)}: as hard as telling one draw of N(0, 1) from one of"
            f" N(mu, 1), so no attack has an AUC above {at_most(most_auc(terms))}."
        )
    how = (
        f"Somebody who knows all else says whether {GUESSED[guarantee.unit]}. No attack lies above the line; dashed:"
        f" guessing. {by}"
    )
    drawn = markup.tradeoff("most catches at a rate of false alarms", allowed(terms))
    caught = figures(figure("Catches that the guarantee allows", drawn, how))
    several = _groups(guarantee)
    return folded("The guarantee in detail", caught, paragraph(known), paragraph(_AT_ONCE), curve, several)


def most_auc(terms: Mapping[str, Any] | None) -> float | None:
    """The largest AUC of any attack on a unit under these terms; None without a known mu, or a guarantee.

    Of N(0, 1) and N(mu, 1) it is Phi(mu / sqrt(2)).
    """
    mu = terms and terms["private"] is True and terms.get("gaussian_mu")
    return NormalDist().cdf(mu / math.sqrt(2)) if mu else None


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


def two_units(unit: str, terms: Mapping[str, Any]) -> tuple[str, str]:
    """A person who is two units, and the epsilon of the two together, as a name and its value."""
    whose = "two examples of a person" if unit == "example" else "a person at two clients"
    two = next((one for one in terms["groups"] if one["units"] == _TWO), None)
    return whose, f"epsilon {at_most(two['epsilon'])} at delta {_delta(two, terms)}" if two else "no epsilon"


def together(guarantee: Guarantee) -> str:
    """What the guarantee is worth for a person who is two units, in a sentence; empty before there is a result."""
    if "groups" not in guarantee.terms:
        return ""
    who, found = _TWO_UNITS[guarantee.unit], two_units(guarantee.unit, guarantee.terms)[1]
    # a smaller delta for each of the two has a larger epsilon
    why = ", more than twice that of one, since delta stays the same" if found.endswith(f" {guarantee.delta:g}") else ""
    return f"{who} counts as two units, covered together by {found}{why}."


def _delta(group: Mapping[str, Any], terms: Mapping[str, Any]) -> str:
    return f"{group.get('delta', terms['delta']):g}"


def _groups(guarantee: Guarantee) -> str:
    groups = guarantee.terms["groups"]
    rows = [(number(one["units"]), at_most(one["epsilon"]), _delta(one, guarantee.terms)) for one in groups]
    if not rows:
        return paragraph(together(guarantee))
    loose = "" if all(one["exact"] for one in groups) else " This bound is loose."
    return paragraph(f"For several units together:{loose}") + table(("units", "epsilon", "delta"), rows)


_AT_ONCE = "All of these hold at once:"
_MODEL, _CLIENTS, _SERVER = "Whoever gets the final model", "The other clients", "The server"
_TWO = 2
_TWO_UNITS = {
    "client": "A person with data at two clients",
    "example": "A person with two examples",
    "person": "A person with data at two clients, such as a patient of two clinics,",
}
GUESSED = {
    "client": "one client's data were used in the training",
    "example": "one example was used in the training",
    "person": "one person's examples at one client were used in the training",
}
PRESENCE = "Protected are the data, not the presence: the clients' names, and that they are clients, are public."
SIMULATED = "Simulated: one process held all data and acted as the server, so nothing was hidden from whoever ran it."
_FOLLOWS = "the server follows the protocol, and nothing stops one that lies"
_BY_MU = "under this run's noise. Below the axis: the same by epsilon alone, for noise of any kind."
_BY_EPSILON = "by epsilon alone. Axis: epsilon, and below it that share."
_BY_CLIENTS = {"shares": "+ share of the noise", "contribution": "+ noise", "gradients": "+ noise in every step"}
_TRAIN = {
    "nowhere": "train on their own data",
    "sum": "train, clip their updates",
    "shares": "train, clip their updates",
    "contribution": "train, clip their updates",
    "gradients": "train, clip every gradient",
}
_NOISED = {"contribution": "noised "}
_IN_SUM = {"shares": ", noise included", "contribution": ", noise included"}
_UNLIMITED = "No limit: nothing bounds how often this party guesses rightly whether one unit's data were used."
_EPSILON = "Right side of a box: the epsilon against this party, or that it is trusted. “+ noise” marks who adds it."
