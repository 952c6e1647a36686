"""The HTML shapes that the sections use, and drawings as inline SVG in the page's colours.

`text` is the only way from a value to markup. Arguments named `html` are markup already; every other argument is plain text and
is escaped here.

    paragraph, section, facts, table, figure, ...   the few shapes of HTML
    lines, bars, scale, tradeoff                    numbers, drawn by matplotlib
    limits, path                                    the two pictures of a run's protection, drawn by hand: a few rectangles and
                                                    lines of text
"""

from __future__ import annotations

import html as standard_html
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from secure_fed.report.record import Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CELL = 'style="text-align: left; vertical-align: top"'
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

WIDTH = 345  # as the plots at 72 points an inch: about as wide as a phone
_LEFT, _LONG = 16, WIDTH - 26  # where the axis begins, and its length
_SCALE = 10.0  # the largest epsilon on the axis; a longer bar ends in an arrow
_MARKS = (0, 1, 2, 3, 5, 8)


def text(value: object) -> str:
    """Any value as escaped text, safe between tags and inside a quoted attribute."""
    return standard_html.escape(str(value), quote=True)


def paragraph(content: str, css_class: str = "") -> str:
    """One paragraph of plain text."""
    return f"<p{_class(css_class)}>{text(content)}</p>\n"


def link(file: str, content: str) -> str:
    """A paragraph with a link to a file beside this one, whose name the code chooses."""
    return f'<p><a href="{text(file)}">{text(content)}</a></p>\n'


def section(title: str, *html: str, css_class: str = "") -> str:
    """A titled section; empty where it has no content."""
    content = "".join(html)
    return f"<section{_class(css_class)}>\n<h2>{text(title)}</h2>\n{content}</section>\n" if content else ""


def subsection(title: str, *html: str) -> str:
    """A part of a section with its own title."""
    return f"<h3>{text(title)}</h3>\n{''.join(html)}"


def facts(rows: Iterable[tuple[str, str]], css_class: str = "facts") -> str:
    """Names and their values as a description list."""
    items = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>\n" for name, value in rows)
    return f"<dl{_class(css_class)}>\n{items}</dl>\n"


def bullets(entries: Iterable[object]) -> str:
    """A list of short texts; empty where there are none."""
    points = "".join(f"<li>{text(entry)}</li>\n" for entry in entries)
    return f"<ul>\n{points}</ul>\n" if points else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that scrolls sideways on a narrow screen; the first column names the row."""
    cells = "".join(f'<th scope="col">{text(name)}</th>' for name in head)
    body = "".join(f"<tr>{_row(row)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table>\n<thead><tr>{cells}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'


def figure(title: str, html: str, caption: str) -> str:
    """A drawing with its title above and a description below; empty where there is no drawing."""
    if not html:
        return ""
    return f"<figure>\n<h3>{text(title)}</h3>\n{html}\n<figcaption>{text(caption)}</figcaption>\n</figure>\n"


def figures(*html: str) -> str:
    """Drawings side by side where there is room; empty where there are none."""
    content = "".join(html)
    return f'<div class="figures">\n{content}</div>\n' if content else ""


def folded(title: str, *html: str) -> str:
    """Detail that opens on a click, and is printed open."""
    content = "".join(html)
    return f"<details><summary>{text(title)}</summary>\n{content}</details>\n" if content else ""


def notebook_table(title: str, rows: Iterable[tuple[str, str]], lead: str = "") -> str:
    """A title, a sentence if there is one, and names with their values, as HTML."""
    body = "\n".join(f"<tr><th {_CELL}>{text(name)}</th><td {_CELL}>{text(value)}</td></tr>" for name, value in rows)
    said = f"<p>{text(lead)}</p>\n" if lead else ""
    return f"<div>\n<p><strong>{text(title)}</strong></p>\n{said}<table>\n{body}\n</table>\n</div>"


def _row(cells: Sequence[object]) -> str:
    name, *values = cells
    return f'<th scope="row">{text(name)}</th>' + "".join(f"<td>{text(value)}</td>" for value in values)


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


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

    def draw(axes: Axes) -> None:
        for one, (colour, dash, marker) in zip(drawn, STYLES, strict=False):
            rounds, values = zip(*one.points, strict=True)
            # By the finite values: a single value among gaps has no line and needs a marker.
            shown = marker if sum(map(math.isfinite, values)) <= _MOST_MARKERS else ""
            axes.plot(rounds, values, color=colour, linestyle=dash, marker=shown, markersize=4, label=one.label)
        numbers = [number for one in drawn for number, _ in one.points]
        axes.set_xlim(min(numbers) - 0.5, max(numbers) + 0.5)
        finite = [value for one in drawn for _, value in one.points if math.isfinite(value)]
        low, high = min(0.0, *finite), max(0.0, *finite)
        axes.set_ylim(low, top if top is not None else high + 0.08 * (high - low or 1))
        if len(drawn) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0.2)
        _lay_out(axes, "round", y_label)

    return drawing(title, draw)


def bars(title: str, heights: Sequence[int], *, x_label: str, y_label: str) -> str:
    """One bar for each height, in the order given; empty where there are none."""
    if not heights:
        return ""

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        if len(heights) <= _MOST_BARS:
            axes.bar(range(1, len(heights) + 1), heights, color=FIRST)
        else:  # one outline instead of a thousand rectangles
            axes.stairs(heights, [place + 0.5 for place in range(len(heights) + 1)], fill=True, color=FIRST)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        _lay_out(axes, x_label, y_label)

    return drawing(title, draw)


def scale(title: str, value: float, *, low: str, high: str) -> str:
    """Where `value` lies between 0 and 1, which mean `low` and `high`; empty where it is not finite."""
    if not math.isfinite(value):
        return ""

    def draw(axes: Axes) -> None:
        axes.barh(0, 1, color=RULE)
        axes.barh(0, value, color=FIRST)
        axes.set(xlim=(0, 1), yticks=[])
        axes.set_xticks([0, 1], labels=[low, high])
        left, right = axes.get_xticklabels()
        left.set_horizontalalignment("left")
        right.set_horizontalalignment("right")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    return drawing(title, draw, inches=(4.6, 0.9))


def tradeoff(title: str, caught: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> str:
    """The largest true-positive rate at every false-positive rate, beside the diagonal of guessing."""
    alarms = np.concatenate([[0.0], np.geomspace(1e-6, 1e-2, 40), np.linspace(0.02, 1, 50)])

    def draw(axes: Axes) -> None:
        axes.plot(alarms, caught(alarms), color=FIRST)
        axes.plot([0, 1], [0, 1], color=RULE, linestyle="--")
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="false alarms", ylabel="caught")
        axes.grid(axis="y")

    return drawing(title, draw)


def _lay_out(axes: Axes, x_label: str, y_label: str) -> None:
    """Axis labels, grid lines for heights, and whole numbers on the horizontal axis."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def drawing(title: str, draw: Callable[[Axes], None], inches: tuple[float, float] = INCHES) -> str:
    """The drawing by `draw`, as an <svg> element whose accessible name is `title`; titles on one page must differ.

    It names CSS variables instead of colours, so that one drawing serves the light and the dark page, and keeps text as text,
    so that it can be selected and takes the page's font. Equal numbers give equal bytes: no date, no random identifier, and a
    user's matplotlibrc has no effect. No user text may be passed here: matplotlib would read `$` as mathematics.
    """
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
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    # The <svg> element alone: without a fixed size, in the page's colours, with an accessible name.
    document = buffer.getvalue()
    element = _GROUP_ID.sub("<g", _DROPPED.sub("", document[document.index("<svg") :])).strip()
    for colour, variable in _VARIABLES.items():
        element = element.replace(colour, variable)
    return _OPENING.sub(rf'<svg role="img" aria-label="{title}" \1>', element, count=1)


@dataclass(frozen=True)
class Bar:
    """A named epsilon. None draws no bar, infinity an arrow. colour: a variable of the style sheet. hollow: only an outline."""

    name: str
    epsilon: float | None
    label: str
    colour: str = "--first"
    hollow: bool = False


@dataclass(frozen=True)
class Station:
    """A place that a contribution passes. limit: the guarantee against the party there. noise: the noise added there."""

    name: str
    sees: str
    limit: str = ""
    noise: str = ""


def limits(title: str, bars: Sequence[Bar]) -> str:
    """The bars over an axis from 0 to 10, with the share of right guesses that an epsilon allows below the axis."""
    drawn = "".join(_bar(bar, 4 + 36 * row) for row, bar in enumerate(bars))
    top = 4 + 36 * len(bars)
    marks = "".join(_mark(epsilon, top) for epsilon in _MARKS)
    described = "; ".join(f"{bar.name}: {bar.label}" for bar in bars)
    return _svg(title, described, top + 32, drawn + _line(_LEFT, top, _LEFT + _LONG, top) + marks)


def path(title: str, stations: Sequence[Station], between: Sequence[str]) -> str:
    """Stations from top to bottom, each joined to the next by an arrow labelled with the data sent."""
    boxes = "".join(_box(station, 2 + 76 * row) for row, station in enumerate(stations))
    arrows = "".join(_arrow(carried, 50 + 76 * row) for row, carried in enumerate(between))
    described = "; ".join(
        f"{one.name}: {', '.join(filter(None, (one.sees, one.limit, one.noise)))}" for one in stations
    )
    return _svg(title, described, 76 * len(stations) - 26, boxes + arrows)


def _bar(bar: Bar, top: int) -> str:
    track = f'<rect x="{_LEFT}" y="{top + 17}" width="{_LONG}" height="10" style="fill:var(--rule);opacity:.45"/>'
    names = _words(_LEFT, top + 12, bar.name) + _words(_LEFT + _LONG, top + 12, bar.label, "end", bold=True)
    if bar.epsilon is None:
        return track + names
    beyond = not bar.epsilon <= _SCALE
    length = max(2.0, _LONG * min(1.0, bar.epsilon / _SCALE))
    tip = f"h{length - 6:g}l6 5l-6 5" if beyond else f"h{length:g}v10"
    colour = f"var({'--warn' if beyond and bar.colour == '--first' else bar.colour})"
    fill = f"fill:none;stroke:{colour};stroke-width:1.4" if bar.hollow else f"fill:{colour}"
    return f'{track}<path d="M{_LEFT} {top + 17}{tip}H{_LEFT}Z" style="{fill}"/>{names}'


def _mark(epsilon: int, top: int) -> str:
    """A mark of the axis: an epsilon, and below it the share of right guesses that it allows."""
    place = _LEFT + _LONG * epsilon / _SCALE
    right = 100 / (1 + math.exp(-epsilon))
    share = f"{right:.0f} %" if right < 98 else f"{right:.1f} %" if right < 99.9 else f"{right:.2f} %"
    return (
        _line(place, top, place, top + 4)
        + _words(place, top + 15, f"ε {epsilon}" if epsilon == 0 else str(epsilon), "middle")
        + _words(place, top + 27, share, "middle", colour="--soft")
    )


def _box(station: Station, top: int) -> str:
    edge = "--first" if station.noise else "--rule"
    frame = (
        f'<rect x="2" y="{top}" width="{WIDTH - 4}" height="44" rx="6"'
        f' style="fill:none;stroke:var({edge});stroke-width:{2 if station.noise else 1.2}"/>'
    )
    left = _words(10, top + 17, station.name, bold=True) + _words(10, top + 34, station.sees, colour="--soft")
    right = _words(WIDTH - 10, top + 17, station.limit, "end")
    return frame + left + right + _words(WIDTH - 10, top + 34, station.noise, "end", bold=True, colour="--first")


def _arrow(carried: str, top: int) -> str:
    shaft = f'<path d="M24 {top}V{top + 17}M19 {top + 16}L24 {top + 23}L29 {top + 16}"'
    return f'{shaft} style="fill:none;stroke:var(--first);stroke-width:1.6"/>' + _words(38, top + 15, carried)


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" style="stroke:var(--soft)"/>'


def _words(x: float, y: float, words: str, anchor: str = "start", *, bold: bool = False, colour: str = "--ink") -> str:
    if not words:
        return ""
    weight = ";font-weight:650" if bold else ""
    style = f"font-size:10px;fill:var({colour});text-anchor:{anchor}{weight}"
    return f'<text x="{x:g}" y="{y:g}" style="{style}">{text(words)}</text>'


def _svg(title: str, described: str, height: int, content: str) -> str:
    head = f'<svg role="img" aria-label="{text(title)}" viewBox="0 0 {WIDTH} {height}"><desc>{text(described)}</desc>'
    return f"{head}{content}</svg>"
