"""The ROC at low false-positive rates for each adversary, and the lower bounds on epsilon.

Drawings are inline SVG in the colours of `secure_fed.report.markup`. They contain no untrusted text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attacks.evidence.verdict import allows, contradicts
from attacks.record import Audit, Cell, Curve, RunBeside
from attacks.report.phrases import (
    NAMES,
    SUPPOSES,
    allowed_auc,
    apart,
    at_least,
    confidence,
    estimates,
    members,
    promised,
    unit_one,
)
from secure_fed.report.formatting import MISSING, at_most, percent
from secure_fed.report.formatting import number as shown
from secure_fed.report.markup import (
    FIRST,
    INK,
    RULE,
    SECOND,
    drawing,
    figure,
    figures,
    folded,
    paragraph,
    section,
    subsection,
    table,
)
from secure_fed.report.measured import too_few

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_LOWEST = 1e-4
_FIRST = 6  # lower bounds shown before the fold
_HEAD = ("attack", "weakest adversary", "epsilon, lower bound", "epsilon accounted", "guarantee")


def first_curve(audit: Audit) -> str:
    """The main attack's ROC, else the strongest attack's; "" for a void audit, whose curves show nothing about the model."""
    first = _first(audit)
    return "" if first is None else _drawing(audit, first, _AXES.format(members=members(audit)))


def roc_curves(audit: Audit) -> str:
    """The ROC of each adversary's strongest attack that no weaker adversary can make, without the one on the first screen."""
    drawn = [_drawing(audit, cell) for cell in _best(audit) if cell != _first(audit)]
    return section(
        "True positives at low false-positive rates",
        figures(*drawn),
        folded("How to read these curves", paragraph(_READING)) if any(drawn) else "",
    )


def _first(audit: Audit) -> Cell | None:
    """The cell of the first screen's curve: the main cell, else the strongest; None for a void audit."""
    cells = [] if audit.baseline.at_chance is False else _best(audit)
    return max(cells, key=lambda cell: (cell == audit.main_cell, cell.auc or 0.0), default=None)


def _best(audit: Audit) -> list[Cell]:
    """The strongest cell of each adversary with a curve; for the main attack's adversary, the main cell."""
    best: dict[str, Cell] = {}
    for cell in sorted(audit.results, key=lambda cell: (cell == audit.main_cell, cell.auc or 0.0), reverse=True):
        if _name(cell) in audit.roc:
            best.setdefault(cell.vantage, cell)
    return [best[vantage.name] for vantage in audit.vantages if vantage.name in best]


def _drawing(audit: Audit, cell: Cell, *explained: str) -> str:
    title = f"{audit.attack_title(cell.attack)}: {audit.vantage_title(cell.vantage)}"
    place = audit.cells.index(cell)  # names are untrusted text, which must not get into a drawing
    sentences = [f"AUC {shown(cell.auc)}."]
    for tail in cell.tails:
        if tail.tpr is None:
            sentences.append(
                f"No TPR at FPR {100 * tail.target:g} %: {shown(cell.non_members)} are {too_few(tail.target)}."
            )
        else:
            law = ", by the exact law of the scores of the others" if cell.known else ""
            sentences.append(f"TPR {percent(tail.tpr)} of the {members(audit)} at FPR {percent(tail.fpr)}{law}.")
    most = allows(cell, audit)
    if most is not None and most.by == "mechanism":
        sentences.append(f"The run's noise allows an AUC of {allowed_auc(most.auc)}.")
    most_units = max(cell.members or 100, cell.non_members or 100)
    drawn = drawn_roc(f"operating characteristic, cell {place + 1}", audit.roc[_name(cell)], most_units)
    return figure(title, drawn, " ".join((*explained, *sentences)))


def _name(cell: Cell) -> str:
    """The name of a cell's curve in the record."""
    return f"{cell.attack}/{cell.vantage}"


def drawn_roc(title: str, curve: Curve, units: int) -> str:
    """True- against false-positive rate, both logarithmic, with its band and the line of chance.

    units: on the larger side. The axes begin at the power of ten below one unit's share, so that the first unit is on them.
    """
    floor = max(_LOWEST, 10.0 ** math.floor(math.log10(1 / units)))
    return drawing(title, lambda axes: _draw_roc(axes, curve, floor), inches=(4.6, 3.6))


def _draw_roc(axes: Axes, curve: Curve, floor: float) -> None:
    keep = _thinned(curve.fpr, floor)
    fpr = [max(curve.fpr[i], floor) for i in keep]

    def kept(values: Sequence[float]) -> list[float]:
        return [max(values[i], floor) for i in keep]

    if len(curve.low) == len(curve.high) == len(curve.fpr):
        axes.fill_between(
            fpr, kept(curve.low), kept(curve.high), step="post", color=FIRST, alpha=0.18, linewidth=0, label="interval"
        )
    axes.plot(fpr, kept(curve.tpr), color=FIRST, drawstyle="steps-post", label="attack")
    axes.plot([floor, 1], [floor, 1], color=INK, linestyle=":", linewidth=1, label="chance")
    axes.set(xscale="log", yscale="log", xlim=(floor, 1), ylim=(floor, 1.15))
    ticks = [10.0**power for power in range(math.ceil(math.log10(floor) - 1e-9), 1)]
    names = [f"{100 * tick:g} %" for tick in ticks]
    axes.set_xticks(ticks, labels=names)
    axes.set_yticks(ticks, labels=names)
    axes.minorticks_off()
    axes.grid(color=RULE, linewidth=0.6)
    axes.set(xlabel="false-positive rate", ylabel="true-positive rate")
    _legend(axes, 3)


_MOST_POINTS = 240


def _thinned(fpr: Sequence[float], floor: float) -> list[int]:
    """Indices of points that are far enough apart on a logarithmic axis, and of the last point at or below the floor."""
    step = -math.log(floor) / _MOST_POINTS
    kept: list[int] = []
    last = -math.inf
    for place, rate in enumerate(fpr):
        at = math.log(max(rate, floor))
        if place + 1 == len(fpr) or at - last >= step:
            kept.append(place)
            last = at
        elif at <= math.log(floor):
            kept[-1] = place
    return kept


def drawn_scores(title: str, runs: Sequence[RunBeside]) -> str:
    """Accuracy and AUC of every run, the AUC with its interval; empty if none was measured."""
    if not any(run.accuracy is not None or run.auc is not None for run in runs):
        return ""
    return drawing(title, lambda axes: _draw_scores(axes, runs))


def _draw_scores(axes: Axes, runs: Sequence[RunBeside]) -> None:
    axes.axhline(0.5, color=INK, linestyle=":", linewidth=1, label="chance")
    measured = [(place, run.accuracy) for place, run in enumerate(runs) if run.accuracy is not None]
    axes.plot(
        [place for place, _ in measured], [value for _, value in measured], color=FIRST, marker="o", label="accuracy"
    )
    lowest = _draw_aucs(axes, [(place, run) for place, run in enumerate(runs) if run.auc is not None])
    axes.set(ylim=(min(0.4, lowest) - 0.02, 1.02), ylabel="score")
    names = ["no guarantee" if run.epsilon is None else f"{run.epsilon:.3g}" for run in runs]
    axes.set_xticks(range(len(runs)), labels=names)
    axes.set(xlim=(-0.6, len(runs) - 0.4), xlabel="accounted epsilon of the run")
    axes.grid(axis="y")
    _legend(axes, 3)


def _draw_aucs(axes: Axes, placed: Sequence[tuple[int, RunBeside]]) -> float:
    """Draw AUCs with their whiskers; returns the lowest point drawn."""
    aucs = [run.auc or 0.0 for _, run in placed]
    ends = [run.auc_interval or (auc, auc) for (_, run), auc in zip(placed, aucs, strict=True)]
    below = [max(0.0, auc - low) for auc, (low, _) in zip(aucs, ends, strict=True)]
    above = [max(0.0, high - auc) for auc, (_, high) in zip(aucs, ends, strict=True)]
    style: dict[str, Any] = {"color": SECOND, "linestyle": "--", "marker": "s", "capsize": 3}
    axes.errorbar([place for place, _ in placed], aucs, yerr=(below, above), label="AUC of the attack", **style)
    return min((auc - less for auc, less in zip(aucs, below, strict=True)), default=0.5)


def _legend(axes: Axes, columns: int) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, borderaxespad=0.2, columnspacing=1.2
    )


def bounds(audit: Audit) -> str:
    """The lower bounds beside the accounted epsilon, a contradiction first."""
    found: dict[object, Cell] = {}  # equal bounds of one attack against the same guarantee count once
    for cell in audit.bounded:
        found.setdefault((cell.attack, cell.auc, cell.epsilon_lower, cell.epsilon_accounted), cell)
    if not found:
        return section("Accounted epsilon and lower bounds", paragraph(_NO_BOUND))
    broken, loud = [cell for cell in found.values() if contradicts(cell, audit)], ""
    if broken:
        promise, least = apart(broken[0].epsilon_accounted or 0.0, broken[0].epsilon_lower or 0.0)
        loud = (
            f"CONTRADICTION: the run claims epsilon {promise} for {unit_one(audit.audited_unit)}; a lower bound is"
            f" {least}, with a confidence of {confidence(audit)}. Do not rely on the claim."
        )
    rows = [_row(audit, one) for one in found.values()]
    return section(
        "Accounted epsilon and lower bounds",
        paragraph(loud, "loud") if broken else "",
        paragraph(_bounds(audit)),
        _estimated(audit),
        subsection("Every lower bound", table(_HEAD, rows[:_FIRST])),
        folded("The other lower bounds", table(_HEAD, rows[_FIRST:])) if rows[_FIRST:] else "",
    )


def _row(audit: Audit, cell: Cell) -> tuple[str, ...]:
    promise = MISSING
    if not audit.protected:
        promise = promised(audit)
    elif audit.comparable:
        promise = (
            at_most(cell.epsilon_accounted) if cell.epsilon_accounted is not None else "none against this adversary"
        )
    return (
        audit.attack_title(cell.attack),
        audit.vantage_title(cell.vantage),
        at_least(cell.epsilon_lower),
        promise,
        "BROKEN" if contradicts(cell, audit) else "stands" if audit.covers(cell) else MISSING,
    )


def _bounds(audit: Audit) -> str:
    against = (
        "A guarantee is broken where a lower bound is above the accounted epsilon."
        if audit.comparable
        else f"The run's guarantee is for {unit_one(audit.unit)}, so it is not compared with these bounds."
        if audit.protected
        else "This run has no guarantee to compare them with."
        if not audit.guaranteed
        else "This run's guarantee has no epsilon that an audit can test, so it is not compared with these bounds."
    )
    return (
        "Accounting gives an upper bound on epsilon by calculation, without any experiment. An attack gives a lower bound by"
        f" experiment: all lower bounds hold together with a confidence of {confidence(audit)} if members were chosen at"
        f" random, whatever the mechanism is. If both are right, the true epsilon lies between. {against}"
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
    head = ("estimate", "epsilon, 95 % lower end", "most likely", "assumes, beside a random choice of members")
    return subsection("Estimates, which are no bounds", paragraph(_ESTIMATES), table(head, rows))


_AXES = "Vertical: the share of the {members}, identified. Horizontal: the share of the others, accused."
_READING = (
    "The ROC of each adversary's strongest attack, or of the main attack: true-positive rate (TPR, upwards) over"
    " false-positive rate (FPR, to the right), both on logarithmic axes. The dotted line is chance. What matters is how far a"
    " curve rises above it on the left, where few non-members are accused. An attack that a weaker adversary can make as well"
    " is drawn for the weaker adversary only."
)
_ESTIMATES = (
    "An estimate is sharper than a bound, because it assumes more than a random choice of members; estimates never count as a"
    " contradiction."
    " Each lower end is below the true epsilon with 95 % confidence, by itself, if its assumptions hold."
)
_NO_BOUND = "No attack gave a lower bound on epsilon."
