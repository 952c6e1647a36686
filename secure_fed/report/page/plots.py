"""Numbers as inline SVG.

The drawings name CSS variables instead of colours, so one drawing serves the light and the dark page, and
keep text as text, so that it can be selected and takes the page's font. Equal numbers give equal bytes: no
date, no random identifier, and a user's matplotlibrc has no effect. No user text may be passed here: matplotlib would read `$`
as mathematics.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from secure_fed.report.page.record import Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that no drawing uses otherwise, each standing for a variable of the page's style sheet.
INK, RULE, FIRST, SECOND = "#010203", "#010204", "#010205", "#010206"
_VARIABLES = {INK: "var(--ink)", RULE: "var(--rule)", FIRST: "var(--first)", SECOND: "var(--second)"}
STYLES = ((FIRST, "-", "o"), (SECOND, "--", "s"))  # distinguished by dash and marker as well as by colour

INCHES = (4.6, 2.7)  # at 72 points an inch about as wide as a phone, so that text keeps its size there
_MOST_MARKERS = 30
_MOST_BARS = 60

_DROPPED = re.compile(r"<metadata>.*?</metadata>|<defs>\s*<style[^>]*>.*?</style>\s*</defs>|<!--.*?-->", re.DOTALL)
_OPENING = re.compile(r'<svg\b[^>]*?(viewBox="[^"]*")[^>]*>')
_GROUP_ID = re.compile(r'<g id="[^"]*"')


@dataclass(frozen=True)
class Series:
    """One named line; a value that is not finite leaves a gap."""

    label: str
    points: Points


def lines(title: str, series: Sequence[Series], *, y_label: str, top: float | None = None) -> str:
    """One or two series over the rounds, from zero up; empty where none has a finite value."""
    drawn = [one for one in series if any(math.isfinite(value) for _, value in one.points)]
    if not drawn:
        return ""
    return drawing(title, lambda axes: _draw_lines(axes, drawn, y_label, top))


def bars(title: str, heights: Sequence[int], *, x_label: str, y_label: str) -> str:
    """One bar for each height, in the order given; empty where there are none."""
    return drawing(title, lambda axes: _draw_bars(axes, heights, x_label, y_label)) if heights else ""


def scale(title: str, value: float, *, low: str, high: str) -> str:
    """Where `value` lies between 0 and 1, which mean `low` and `high`; empty where it is not finite."""
    if not math.isfinite(value):
        return ""
    return drawing(title, lambda axes: _draw_scale(axes, value, low, high), inches=(4.6, 0.9))


def tradeoff(title: str, caught: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> str:
    """The largest true-positive rate at every false-positive rate, beside the diagonal of guessing."""
    alarms = np.concatenate([[0.0], np.geomspace(1e-6, 1e-2, 40), np.linspace(0.02, 1, 50)])

    def draw(axes: Axes) -> None:
        axes.plot(alarms, caught(alarms), color=FIRST)
        axes.plot([0, 1], [0, 1], color=RULE, linestyle="--")
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="false alarms", ylabel="caught")
        axes.grid(axis="y")

    return drawing(title, draw)


def _draw_lines(axes: Axes, series: Sequence[Series], y_label: str, top: float | None) -> None:
    for one, (colour, dash, marker) in zip(series, STYLES, strict=False):
        rounds, values = zip(*one.points, strict=True)
        # By the finite values: a single value among gaps has no line and needs a marker.
        shown = marker if sum(map(math.isfinite, values)) <= _MOST_MARKERS else ""
        axes.plot(rounds, values, color=colour, linestyle=dash, marker=shown, markersize=4, label=one.label)
    drawn = [number for one in series for number, _ in one.points]
    axes.set_xlim(min(drawn) - 0.5, max(drawn) + 0.5)
    finite = [value for one in series for _, value in one.points if math.isfinite(value)]
    low, high = min(0.0, *finite), max(0.0, *finite)
    axes.set_ylim(low, top if top is not None else high + 0.08 * (high - low or 1))
    if len(series) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0.2)
    _lay_out(axes, "round", y_label)


def _draw_bars(axes: Axes, heights: Sequence[int], x_label: str, y_label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    if len(heights) <= _MOST_BARS:
        axes.bar(range(1, len(heights) + 1), heights, color=FIRST)
    else:  # one outline instead of a thousand rectangles
        axes.stairs(heights, [place + 0.5 for place in range(len(heights) + 1)], fill=True, color=FIRST)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    _lay_out(axes, x_label, y_label)


def _lay_out(axes: Axes, x_label: str, y_label: str) -> None:
    """Axis labels, grid lines for heights, and whole numbers on the horizontal axis."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def _draw_scale(axes: Axes, value: float, low: str, high: str) -> None:
    axes.barh(0, 1, color=RULE)
    axes.barh(0, value, color=FIRST)
    axes.set(xlim=(0, 1), yticks=[])
    axes.set_xticks([0, 1], labels=[low, high])
    left, right = axes.get_xticklabels()
    left.set_horizontalalignment("left")
    right.set_horizontalalignment("right")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def drawing(title: str, draw: Callable[[Axes], None], inches: tuple[float, float] = INCHES) -> str:
    """The drawing by `draw`, as an <svg> element whose accessible name is `title`; titles on one page must differ."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("svg", fonttype="none", hashsalt=title)
        matplotlib.rc("axes", labelcolor=INK, edgecolor=RULE)
        matplotlib.rc("xtick", labelcolor=INK, color=RULE)
        matplotlib.rc("ytick", labelcolor=INK, color=RULE)
        matplotlib.rc("text", color=INK)
        matplotlib.rc("grid", color=RULE)
        figure = Figure(figsize=inches, layout="constrained")
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        return _inline(_saved(figure), title)


def _saved(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def _inline(document: str, title: str) -> str:
    """The <svg> element alone: without a fixed size, in the page's colours, with an accessible name."""
    element = _GROUP_ID.sub("<g", _DROPPED.sub("", document[document.index("<svg") :])).strip()
    for colour, variable in _VARIABLES.items():
        element = element.replace(colour, variable)
    return _OPENING.sub(rf'<svg role="img" aria-label="{title}" \1>', element, count=1)
