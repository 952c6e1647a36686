"""How often each adversary is right when few may be falsely accused, and what that means for epsilon."""

from __future__ import annotations

import math

from attacks.report import significance
from attacks.report.page import plots
from attacks.report.page.plots import Curve
from attacks.report.reading import NO_UNIT, Audit, Cell
from attacks.report.sentences_estimates import NAMES, SHORT, estimates, supposing
from attacks.report.values import numbers
from attacks.report.wording import apart, at_least, confidence, promised, unit_one
from secure_fed.report.formatting import MISSING, at_most, number, percent
from secure_fed.report.page.markup import figure, figures, folded, paragraph, section, subsection, table

_LOWEST = 1e-4
_FIRST = 6  # lower bounds that are shown at once
_HEAD = ("attack", "weakest adversary", "shown, at least", "promised, at most", "promise")


def characteristic(audit: Audit) -> str:
    """The characteristic of the strongest attack of every adversary, among those that no weaker one can make as well; of the
    main attack for the adversary who makes that.
    """
    drawable = [cell for cell in audit.results if _curve(audit, cell)]
    best = [
        audit.main_cell
        if audit.main_cell in drawable and audit.main_cell.vantage == vantage.name
        else significance.strongest([cell for cell in drawable if cell.vantage == vantage.name])
        for vantage in audit.vantages
    ]
    drawn = [_drawing(audit, cell) for cell in best if cell is not None]
    return section(
        "When few may be falsely accused",
        paragraph(_READING) if drawn else "",
        figures(*drawn),
    )


def bounds(audit: Audit) -> str:
    """The lower bounds beside the accounted epsilon, a contradiction first and loudly."""
    found = _bounded(audit)
    if not found:
        return section("What was promised, and what was shown", paragraph(_NO_BOUND))
    broken = [cell for cell in found if significance.contradicts(cell, audit)]
    cell = (broken or found)[0]
    rows = [_row(audit, one) for one in found]
    return section(
        "What was promised, and what was shown",
        paragraph(_loud(audit, cell), "loud") if broken else "",
        paragraph(_bounds(audit)),
        figures(_bars(audit, cell)),
        _estimated(audit),
        subsection("Every lower bound", table(_HEAD, rows[:_FIRST])),
        folded("The other lower bounds", table(_HEAD, rows[_FIRST:])) if rows[_FIRST:] else "",
    )


def _bounded(audit: Audit) -> list[Cell]:
    """Every cell with a lower bound; the same bound of the same attack against the same promise counts once."""
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


def _drawing(audit: Audit, cell: Cell) -> str:
    curve = _curve(audit, cell)
    if curve is None:
        return ""
    title = f"{audit.attack_title(cell.attack)}: {audit.vantage_title(cell.vantage)}"
    place = audit.cells.index(cell)  # names are others' words, and may not come into a drawing
    sentences = [f"AUC {number(cell.auc)}."]
    for tail in cell.tails:
        if tail.tpr is None:
            sentences.append(f"At {100 * tail.target:g} % no rate is stated: too few were held out.")
        else:
            sentences.append(
                f"With {percent(tail.fpr)} falsely accused, {percent(tail.tpr)} of the members are caught."
            )
    most = significance.allows(cell, audit)
    if most is not None and most.by == "mechanism":
        sentences.append(f"The guarantee allows an AUC of {number(most.auc)}.")
    drawn = plots.characteristic(f"operating characteristic, cell {place + 1}", curve, _floor(cell))
    return figure(title, drawn, " ".join(sentences))


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
        f"CONTRADICTION: the run promises epsilon {promise} for {unit_one(audit.audited)}; at least"
        f" {found} was shown, with a confidence of {confidence(audit)}. Do not rely on the promise."
    )


def _bounds(audit: Audit) -> str:
    against = (
        "A promise is broken where the lower end is above the upper one."
        if audit.comparable
        else f"The run's guarantee is for {unit_one(audit.unit)}, so it is not set against these."
        if audit.protected
        else "This run makes no promise to set it against."
        if audit.unit == NO_UNIT
        else "This run's guarantee has no epsilon that coins can test, so it is not set against these."
    )
    return (
        "Accounting gives an upper limit for epsilon by calculation, which no experiment has a part in. An attack gives"
        f" a lower one by experiment: all lower bounds together hold with a confidence of {confidence(audit)}, if the"
        f" coins were fair, whatever the mechanism is. The truth lies between, if both are right. {against}"
    )


def _estimated(audit: Audit) -> str:
    """The estimates, each with what it supposes."""
    rows = [
        (NAMES.get(one.name, one.name), at_least(one.epsilon), at_least(one.point), supposing(one))
        for one in estimates(audit)
    ]
    if not rows:
        return ""
    head = ("estimate", "epsilon, 95 % end", "most likely", "supposes, beside fair coins")
    return subsection("Estimates, which are no bounds", paragraph(_ESTIMATES), table(head, rows))


def _bars(audit: Audit, cell: Cell) -> str:
    accounted = cell.accounted if audit.covers(cell) else None
    how = f": {cell.how}" if cell.how else ""
    caption = f"Shown: {audit.attack_title(cell.attack)}, {audit.vantage_title(cell.vantage)}{how}."
    between = [(f"estimate, {SHORT[one.name]}", one.epsilon) for one in estimates(audit) if one.name in SHORT]
    drawn = plots.promised_and_shown("lower bound beside accounted epsilon", cell.lower or 0.0, accounted, between)
    return figure("Epsilon for one unit", drawn, caption)


def _promise(audit: Audit, cell: Cell) -> str:
    if not audit.protected:
        return promised(audit)
    if not audit.comparable:
        return MISSING
    return at_most(cell.accounted) if cell.accounted is not None else "none against this adversary"


_READING = (
    "For the strongest attack of each adversary, or the main one: how many members it names (upwards) when it is wrong"
    " about so many of the others (to the right). Both axes count in powers of ten. On the dotted line it does no better"
    " than a coin; what matters is how far it rises above that on the left, where hardly anybody is accused falsely. An"
    " attack that a weaker adversary can make as well is drawn there alone."
)
_ESTIMATES = (
    "They say more than a bound, because they suppose more than fair coins; they never make a contradiction. Each end"
    " is below the true epsilon with 95 % confidence, by itself, if what it supposes holds."
)
_NO_BOUND = "No attack gave a lower bound on epsilon."
