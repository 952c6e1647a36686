"""The ROC at low false-positive rates for each adversary, and the lower bounds on epsilon."""

from __future__ import annotations

import math

from attacks.report import significance
from attacks.report.audited import NO_UNIT, Audit, Cell
from attacks.report.page import plots
from attacks.report.page.plots import Curve
from attacks.report.sentences_estimates import NAMES, SUPPOSES, estimates
from attacks.report.values import numbers
from attacks.report.wording import apart, at_least, confidence, promised, unit_one
from secure_fed.report.formatting import MISSING, at_most, percent
from secure_fed.report.formatting import number as shown
from secure_fed.report.page.markup import figure, figures, folded, paragraph, section, subsection, table

_LOWEST = 1e-4
_FIRST = 6  # lower bounds shown before the fold
_HEAD = ("attack", "weakest adversary", "epsilon, lower bound", "epsilon accounted", "guarantee")


def first_curve(audit: Audit) -> str:
    """The main attack's ROC, else the strongest attack's; "" for a void audit, whose curves show nothing about the model."""
    first = None if audit.baseline.at_chance is False else _first(audit)
    return "" if first is None else _drawing(audit, first, _AXES)


def roc_curves(audit: Audit) -> str:
    """The ROC of each adversary's strongest attack that no weaker adversary can make, without the one on the first screen."""
    shown = None if audit.baseline.at_chance is False else _first(audit)
    drawn = [_drawing(audit, cell) for cell in _best(audit) if cell != shown]
    return section(
        "True positives at low false-positive rates",
        figures(*drawn),
        folded("How to read these curves", paragraph(_READING)) if any(drawn) else "",
    )


def _first(audit: Audit) -> Cell | None:
    best = _best(audit)
    return audit.main_cell if audit.main_cell in best else significance.strongest(best)


def _best(audit: Audit) -> list[Cell]:
    """The strongest cell of each adversary with a curve; for the main attack's adversary, the main cell."""
    drawable = [cell for cell in audit.results if _curve(audit, cell)]
    best = [
        audit.main_cell
        if audit.main_cell in drawable and audit.main_cell.vantage == vantage.name
        else significance.strongest([cell for cell in drawable if cell.vantage == vantage.name])
        for vantage in audit.vantages
    ]
    return [cell for cell in best if cell is not None]


def bounds(audit: Audit) -> str:
    """The lower bounds beside the accounted epsilon, a contradiction first."""
    found = _bounded(audit)
    if not found:
        return section("Accounted epsilon and lower bounds", paragraph(_NO_BOUND))
    broken = [cell for cell in found if significance.contradicts(cell, audit)]
    cell = (broken or found)[0]
    rows = [_row(audit, one) for one in found]
    return section(
        "Accounted epsilon and lower bounds",
        paragraph(_loud(audit, cell), "loud") if broken else "",
        paragraph(_bounds(audit)),
        _estimated(audit),
        subsection("Every lower bound", table(_HEAD, rows[:_FIRST])),
        folded("The other lower bounds", table(_HEAD, rows[_FIRST:])) if rows[_FIRST:] else "",
    )


def _bounded(audit: Audit) -> list[Cell]:
    """Every cell with a lower bound; equal bounds of one attack against the same guarantee count once."""
    found: dict[object, Cell] = {}
    for cell in audit.bounded:
        found.setdefault((cell.attack, cell.auc, cell.lower, cell.accounted), cell)
    return list(found.values())


def _row(audit: Audit, cell: Cell) -> tuple[str, ...]:
    return (
        audit.attack_title(cell.attack),
        audit.vantage_title(cell.vantage),
        at_least(cell.lower),
        _promise(audit, cell),
        "BROKEN" if significance.contradicts(cell, audit) else "stands" if audit.covers(cell) else MISSING,
    )


def _drawing(audit: Audit, cell: Cell, *explained: str) -> str:
    curve = _curve(audit, cell)
    if curve is None:
        return ""
    title = f"{audit.attack_title(cell.attack)}: {audit.vantage_title(cell.vantage)}"
    place = audit.cells.index(cell)  # names are untrusted text, which must not get into a drawing
    sentences = [f"AUC {shown(cell.auc)}."]
    for tail in cell.tails:
        if tail.tpr is None:
            sentences.append(f"No TPR at FPR {100 * tail.target:g} %: too few non-members.")
        else:
            sentences.append(f"TPR {percent(tail.tpr)} at FPR {percent(tail.fpr)}.")
    most = significance.allows(cell, audit)
    if most is not None and most.by == "mechanism":
        sentences.append(f"The run's mechanism allows an AUC of {shown(most.auc)}.")
    drawn = plots.drawn_roc(f"operating characteristic, cell {place + 1}", curve, _floor(cell))
    return figure(title, drawn, " ".join((*explained, *sentences)))


def _curve(audit: Audit, cell: Cell) -> Curve | None:
    points = audit.roc.get(f"{cell.attack}/{cell.vantage}", {})
    fpr, tpr = numbers(points.get("fpr")), numbers(points.get("tpr"))
    if len(fpr) < 2 or len(fpr) != len(tpr):
        return None
    return Curve(fpr, tpr, numbers(points.get("low")), numbers(points.get("high")))


def _floor(cell: Cell) -> float:
    """The power of ten below one unit's share, so that the first unit is on the axis."""
    smallest = 1 / max(cell.members or 100, cell.non_members or 100)
    return max(_LOWEST, 10.0 ** math.floor(math.log10(smallest)))


def _loud(audit: Audit, cell: Cell) -> str:
    promise, found = apart(cell.accounted or 0.0, cell.lower or 0.0)
    return (
        f"CONTRADICTION: the run claims epsilon {promise} for {unit_one(audit.audited)}; a lower bound is"
        f" {found}, with a confidence of {confidence(audit)}. Do not rely on the claim."
    )


def _bounds(audit: Audit) -> str:
    against = (
        "A guarantee is broken where a lower bound is above the accounted epsilon."
        if audit.comparable
        else f"The run's guarantee is for {unit_one(audit.unit)}, so it is not compared with these bounds."
        if audit.protected
        else "This run has no guarantee to compare them with."
        if audit.unit == NO_UNIT
        else "This run's guarantee has no epsilon that coins can test, so it is not compared with these bounds."
    )
    return (
        "Accounting gives an upper bound on epsilon by calculation, without any experiment. An attack gives a lower bound by"
        f" experiment: all lower bounds hold together with a confidence of {confidence(audit)} if the coins were fair,"
        f" whatever the mechanism is. If both are right, the true epsilon lies between. {against}"
    )


def _estimated(audit: Audit) -> str:
    """The estimates, each with its assumptions."""
    rows = [
        (
            NAMES.get(one.name, one.name),
            at_least(one.epsilon),
            at_least(one.point),
            SUPPOSES.get(one.name, "not stated"),
        )
        for one in estimates(audit)
    ]
    if not rows:
        return ""
    head = ("estimate", "epsilon, 95 % lower end", "most likely", "assumes, beside fair coins")
    return subsection("Estimates, which are no bounds", paragraph(_ESTIMATES), table(head, rows))


def _promise(audit: Audit, cell: Cell) -> str:
    if not audit.protected:
        return promised(audit)
    if not audit.comparable:
        return MISSING
    return at_most(cell.accounted) if cell.accounted is not None else "none against this adversary"


_AXES = "Vertical: members that the attack identifies. Horizontal: non-members that it accuses."
_READING = (
    "The ROC of each adversary's strongest attack, or of the main attack: true-positive rate (TPR, upwards) over"
    " false-positive rate (FPR, to the right), both on logarithmic axes. The dotted line is a coin. What matters is how far a"
    " curve rises above it on the left, where few non-members are accused. An attack that a weaker adversary can make as well"
    " is drawn for the weaker adversary only."
)
_ESTIMATES = (
    "An estimate is sharper than a bound, because it assumes more than fair coins; estimates never count as a contradiction."
    " Each lower end is below the true epsilon with 95 % confidence, by itself, if its assumptions hold."
)
_NO_BOUND = "No attack gave a lower bound on epsilon."
