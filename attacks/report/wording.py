"""Words for the adversaries, units and rates of an audit, for readers without a background in audits."""

from __future__ import annotations

import math

from attacks.report.audited import NO_UNIT, Audit
from secure_fed.report.formatting import MISSING, at_most

_ALMOST = 0.99
COIN = 0.5  # the rate at which a coin is right
UNITS = {"client": "clients", "group": "groups", "example": "examples"}
_WHO = {
    "outsider": "an outsider who has the final adapter",
    "fellow_client": "another client, who sees the shared model of every round",
    "secure_server": "a server that sees only sums over clients",
    "server": "a server that sees every single update",
}
_ONE = {
    "client": "one client with everything it has",
    "example": "one training example",
    "group": "one person's examples at a client",
}
_GUESS = {
    "client": "and guesses which of two clients took part in the training",
    "example": "and guesses which of two texts was trained on",
    "group": "and guesses which of two persons' texts were trained on",
}


def who(audit: Audit, vantage: str) -> str:
    """The adversary at a vantage point, in lower case for the middle of a sentence."""
    if vantage in _WHO:
        return _WHO[vantage]
    sees = next((known.about for known in audit.vantages if known.name == vantage), "")
    return f"somebody who sees {sees}" if sees else f"somebody at the vantage point {audit.vantage_title(vantage)}"


def capital(sentence: str) -> str:
    """The sentence with its first letter capital."""
    return sentence[:1].upper() + sentence[1:]


def unit_one(unit: str) -> str:
    """A single unit: "one training example"."""
    return _ONE.get(unit, f"one {unit}")


def units(audit: Audit) -> str:
    """The audited units: "clients", "phantoms"."""
    return "phantoms" if audit.phantoms else UNITS.get(audit.audited, "units")


def sides(audit: Audit) -> tuple[str, str]:
    """The words for members and for non-members: "in training" and "held out"."""
    return ("that contributed", "that did not") if audit.phantoms else ("in training", "held out")


def guess(audit: Audit) -> str:
    """The guess whose rate of right answers is the AUC."""
    if audit.phantoms:
        return "and guesses which of two phantoms contributed"
    return _GUESS.get(audit.audited, _GUESS["example"])


def hundred(share: float | None, digits: int = 0) -> str:
    """`0.531` -> "53": of 100 cases."""
    return MISSING if share is None else f"{100 * share:.{digits}f}"


def at_most_hundred(share: float) -> str:
    """Rounded up, so that a limit stays one: `0.6521` -> "66", `0.99966` -> "99.97"; of 100 cases."""
    digits = 0 if share <= _ALMOST else 2
    return f"{math.ceil(round(10**digits * 100 * share, 6)) / 10**digits:.{digits}f}"


def between(low: float, high: float) -> str:
    """`(0.531, 0.562)` -> "53.1 to 56.2" of 100 cases, with enough digits that neither end looks like a coin's 50."""
    digits = next(
        (n for n in (1, 2, 3) if all(end == COIN or hundred(end, n) != hundred(COIN, n) for end in (low, high))), 4
    )
    return f"{hundred(low, digits)} to {hundred(high, digits)}"


def promised(audit: Audit) -> str:
    """The accounted epsilon; or that there is none, or that an audit by coins cannot test it."""
    if audit.protected:
        return at_most(audit.epsilon)
    if audit.unit == NO_UNIT:
        return "no guarantee"
    return (
        "none that coins can test" if audit.promised is None else f"{at_most(audit.promised)}, which coins cannot test"
    )


def at_least(value: float | None) -> str:
    """Rounded down, so that a lower bound stays one: `2.019` -> "2.01"."""
    return MISSING if value is None else f"{math.floor(100 * value) / 100:.2f}"


def apart(promised: float, shown: float) -> tuple[str, str]:
    """A guaranteed epsilon, rounded up, and a lower bound above it, rounded down, with enough digits to show which is larger:
    "0.993", "0.996".
    """
    if math.floor(100 * shown) / 100 > float(at_most(promised).replace(",", "")):
        return at_most(promised), at_least(shown)
    digits = next((n for n in range(3, 12) if math.floor(10**n * shown) > math.ceil(10**n * promised)), 12)
    return (
        f"{math.ceil(10**digits * promised) / 10**digits:.{digits}f}",
        f"{math.floor(10**digits * shown) / 10**digits:.{digits}f}",
    )


def confidence(audit: Audit) -> str:
    """`0.05` -> "95 %"."""
    return f"{100 * (1 - audit.significance):.4g} %"
