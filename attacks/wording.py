"""The adversaries, the units and the rates of an audit, as a person who runs none would say them."""

from __future__ import annotations

import math

from attacks.reading import Audit
from secure_fed.report.words import MISSING

UNITS = {"client": "clients", "group": "groups", "example": "examples"}
_WHO = {
    "outsider": "an outsider who has the final adapter",
    "fellow_client": "another client, who sees the shared model of every round",
    "secure_server": "a server that sees only sums over clients",
    "server": "a server that sees what every single client sends",
}
_ONE = {
    "client": "one client with everything it has",
    "example": "one training example",
    "group": "one person's examples at a client",
}
_GUESS = {
    "client": "and guesses which of two clients took part in the training, where one of them did,",
    "example": "and guesses which of two texts was trained on, where one of them was,",
    "group": "and guesses which of two persons' texts were trained on, where those of one were,",
}


def who(audit: Audit, vantage: str) -> str:
    """The adversary at a vantage point, in the midst of a sentence."""
    if vantage in _WHO:
        return _WHO[vantage]
    sees = next((known.about for known in audit.vantages if known.name == vantage), "")
    return f"somebody who sees {sees}" if sees else f"somebody at the vantage point {audit.vantage_title(vantage)}"


def unit_one(unit: str) -> str:
    """One of the units: "one training example"."""
    return _ONE.get(unit, f"one {unit}")


def guess(unit: str) -> str:
    """What an AUC is the share of right answers to."""
    return _GUESS.get(unit, _GUESS["example"])


def hundred(share: float | None, digits: int = 0) -> str:
    """`0.531` -> "53": of 100 cases."""
    return MISSING if share is None else f"{100 * share:.{digits}f}"


def at_least(value: float | None) -> str:
    """Rounded down, so that a lower bound stays one: `2.019` -> "2.01"."""
    return MISSING if value is None else f"{math.floor(100 * value) / 100:.2f}"


def confidence(audit: Audit) -> str:
    """`0.05` -> "95 %"."""
    return f"{100 * (1 - audit.significance):.4g} %"
