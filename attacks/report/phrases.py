"""The phrases that every part of an audit's report shares: adversaries, units, marks, and numbers as limits.

For people who are responsible for the data and are not statisticians. `sentences` puts them together for a verdict; the
tables, the curves, the notebook, and the audits of models, attributes and shares (`CAPITALS`) use them alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attacks.evidence.baseline import SHUFFLES
from attacks.evidence.verdict import CHANCE
from attacks.record import Audit, Estimate, Interval
from secure_fed.report.formatting import MISSING, at_most
from secure_fed.report.formatting import number as shown
from secure_fed.runs.guarantee import dummy_units

ONE_IN = SHUFFLES + 1  # in one of so many audits the baseline fails by chance
# Of the audits of a model, an attribute and a share: the headline on a terminal; and that of a model's page.
CAPITALS = {"void": "CANNOT TELL", "leak": "LEAK", "nothing": "nothing found"}
MODEL_HEADLINES = {
    "void": "This audit cannot tell: members and others differ without any model",
    "leak": "The model gives away which texts were in its training",
    "nothing": "Nothing was found",
}
# Of each mark of a cell (`mark`): its name on a terminal, and on a page, where texts have their own words.
MARKS = {
    "leak": ("LEAK", "leak"),
    "within": ("as guaranteed", "within the guarantee"),
    "beyond": ("MORE THAN ALLOWED", "more than the guarantee allows"),
    "part": ("in part", ""),
    "sign": ("weak sign", "weak sign"),
    "inverted": ("below .5", "below chance"),
    "chance": ("", "not above chance"),
    "none": ("", ""),
}
UNITS = {"client": "clients", "person": "persons", "example": "examples"}
_ALMOST = 0.99
_WHO = {
    "outsider": "whoever gets the final model",
    "fellow_client": "another client (it sees the shared model of every round)",
    "secure_server": "the server behind masks (it sees only sums over clients)",
    "server": "the server without masks (it sees every single update)",
}
_ONE = {
    "client": "one client with everything it has",
    "example": "one training example",
    "person": "one person's examples at a client",
}
_GUESS = {
    "client": "guesses which of two clients' data were used in the training",
    "example": "guesses which of two texts was trained on",
    "person": "guesses which of two persons' texts were trained on",
}


def who(audit: Audit, vantage: str) -> str:
    """The adversary at a vantage point, in lower case for the middle of a sentence."""
    if vantage in _WHO:
        return _WHO[vantage]
    sees = next((known.sees for known in audit.vantages if known.name == vantage), "")
    return f"somebody who sees {sees}" if sees else f"somebody at the vantage point {audit.vantage_title(vantage)}"


def capital(sentence: str) -> str:
    """The sentence with its first letter capital."""
    return sentence[:1].upper() + sentence[1:]


def unit_one(unit: str | None) -> str:
    """A single unit: "one training example"."""
    return _ONE.get(unit or "", f"one {unit}")


def units(audit: Audit) -> str:
    """The audited units: "clients", "dummy clients"."""
    return f"dummy {dummy_units(audit.audited_unit)}" if audit.dummies else UNITS.get(audit.audited_unit, "units")


def sides(audit: Audit) -> tuple[str, str]:
    """The words for members and for non-members: "in training" and "held out"."""
    return ("that contributed", "that did not") if audit.dummies else ("in training", "held out")


def members(audit: Audit) -> str:
    """Those that an attack tries to identify: "dummy clients that contributed", or "members"."""
    return f"{units(audit)} {sides(audit)[0]}" if audit.dummies else "members"


def guess(audit: Audit) -> str:
    """The guess whose rate of right answers is the AUC."""
    if audit.dummies:
        return f"guesses which of two {units(audit)} contributed"
    return _GUESS.get(audit.audited_unit, _GUESS["example"])


def hundred(share: float | None, digits: int = 0) -> str:
    """`0.531` -> "53": of 100 cases."""
    return MISSING if share is None else f"{100 * share:.{digits}f}"


def at_most_hundred(share: float) -> str:
    """Rounded up, so that a limit stays one: `0.6521` -> "66", `0.99966` -> "99.97"; of 100 cases."""
    digits = 0 if share <= _ALMOST else 2
    return f"{math.ceil(round(10**digits * 100 * share, 6)) / 10**digits:.{digits}f}"


def between(low: float, high: float) -> str:
    """`(0.531, 0.562)` -> "53.1 to 56.2" of 100 cases, with enough digits that neither end looks like chance, 50."""
    digits = next(
        (n for n in (1, 2, 3) if all(end == CHANCE or hundred(end, n) != hundred(CHANCE, n) for end in (low, high))), 4
    )
    return f"{hundred(low, digits)} to {hundred(high, digits)}"


def ends(interval: Interval | None, written: Callable[[float], str] = shown) -> str:
    """An interval behind its number: " (0.53 to 0.56)"; empty without one."""
    return "" if interval is None else f" ({written(interval[0])} to {written(interval[1])})"


def allowed_auc(auc: float) -> str:
    """Rounded up, so that a limit stays one: `0.8657` -> "0.866"."""
    return f"{math.ceil(round(1000 * auc, 6)) / 1000:.3f}"


def promised(audit: Audit) -> str:
    """The accounted epsilon; or that there is none, or that an audit cannot test it."""
    if audit.protected:
        return at_most(audit.epsilon_accounted)
    if not audit.guaranteed:
        return "no guarantee"
    promise = audit.epsilon_promised
    return "none that an audit can test" if promise is None else f"{at_most(promise)}, which an audit cannot test"


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


NAMES = {"independent": "if canaries are independent", "sampled_gaussian": "if the mechanism is Gaussian too"}
SUPPOSES = {
    "independent": "the exact distribution of non-members' scores, and canaries that are independent of each other",
    "sampled_gaussian": "the same, and a Gaussian mechanism with the run's sampling rate and number of releases",
}


def estimates(audit: Audit) -> tuple[Estimate, ...]:
    """The main attack's estimates, if there is a guarantee to compare them with."""
    cell = audit.main_cell
    return cell.estimates if cell is not None and audit.covers(cell) else ()
