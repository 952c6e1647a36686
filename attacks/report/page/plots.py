"""Inline SVG plots of an audit's numbers, in the colours of `secure_fed.report.page.plots`; they contain no untrusted text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attacks.report.values import Interval
from secure_fed.report.page.plots import FIRST, INK, RULE, SECOND, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 240


@dataclass(frozen=True)
class Curve:
    """An empirical ROC curve: equally long lists of rising rates; low and high are empty without a band."""

    fpr: Sequence[float]
    tpr: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Mark:
    """One run of a sweep. epsilon: None for a run without a guarantee."""

    epsilon: float | None
    accuracy: float | None
    auc: float | None
    interval: Interval | None


def drawn_roc(title: str, curve: Curve, floor: float) -> str:
    """True- against false-positive rate, both logarithmic from `floor` on, with its band and a coin's line."""
    return drawing(title, lambda axes: _draw_roc(axes, curve, floor), inches=(4.6, 3.6))


def drawn_scores(title: str, marks: Sequence[Mark]) -> str:
    """Accuracy and AUC of every run, the AUC with its interval; empty if none was measured."""
    if not any(mark.accuracy is not None or mark.auc is not None for mark in marks):
        return ""
    return drawing(title, lambda axes: _draw_scores(axes, marks))


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
    axes.plot([floor, 1], [floor, 1], color=INK, linestyle=":", linewidth=1, label="a coin")
    axes.set(xscale="log", yscale="log", xlim=(floor, 1), ylim=(floor, 1.15))
    ticks = [10.0**power for power in range(math.ceil(math.log10(floor) - 1e-9), 1)]
    names = [f"{100 * tick:g} %" for tick in ticks]
    axes.set_xticks(ticks, labels=names)
    axes.set_yticks(ticks, labels=names)
    axes.minorticks_off()
    axes.grid(color=RULE, linewidth=0.6)
    axes.set(xlabel="false-positive rate", ylabel="true-positive rate")
    _legend(axes, 3)


def _draw_scores(axes: Axes, marks: Sequence[Mark]) -> None:
    axes.axhline(0.5, color=INK, linestyle=":", linewidth=1, label="a coin")
    measured = [(place, mark.accuracy) for place, mark in enumerate(marks) if mark.accuracy is not None]
    axes.plot(
        [place for place, _ in measured], [value for _, value in measured], color=FIRST, marker="o", label="accuracy"
    )
    lowest = _draw_aucs(axes, [(place, mark) for place, mark in enumerate(marks) if mark.auc is not None])
    axes.set(ylim=(min(0.4, lowest) - 0.02, 1.02), ylabel="score")
    _places(axes, marks)


def _draw_aucs(axes: Axes, placed: Sequence[tuple[int, Mark]]) -> float:
    """Draw AUCs with their whiskers; returns the lowest point drawn."""
    aucs = [mark.auc or 0.0 for _, mark in placed]
    ends = [mark.interval or (auc, auc) for (_, mark), auc in zip(placed, aucs, strict=True)]
    below = [max(0.0, auc - low) for auc, (low, _) in zip(aucs, ends, strict=True)]
    above = [max(0.0, high - auc) for auc, (_, high) in zip(aucs, ends, strict=True)]
    style: dict[str, Any] = {"color": SECOND, "linestyle": "--", "marker": "s", "capsize": 3}
    axes.errorbar([place for place, _ in placed], aucs, yerr=(below, above), label="AUC of the attack", **style)
    return min((auc - less for auc, less in zip(aucs, below, strict=True)), default=0.5)


def _places(axes: Axes, marks: Sequence[Mark]) -> None:
    names = ["no guarantee" if mark.epsilon is None else f"{mark.epsilon:.3g}" for mark in marks]
    axes.set_xticks(range(len(marks)), labels=names)
    axes.set(xlim=(-0.6, len(marks) - 0.4), xlabel="accounted epsilon of the run")
    axes.grid(axis="y")
    _legend(axes, 3)


def _legend(axes: Axes, columns: int) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, borderaxespad=0.2, columnspacing=1.2
    )


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
