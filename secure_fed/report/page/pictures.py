"""Two drawings of a run's protection, as inline SVG in the page's colours.

    limits      bars of epsilon on one scale, with the share of right guesses
    path        the path of a contribution, station by station: the data seen there, and where noise is added

Written by hand rather than plotted: a drawing is a few rectangles and lines of text. All text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from secure_fed.report.page.markup import text

WIDTH = 345  # as the plots at 72 points an inch: about as wide as a phone
_LEFT, _LONG = 16, WIDTH - 26  # where the axis begins, and its length
_SCALE = 10.0  # the largest epsilon on the axis; a longer bar ends in an arrow
_MARKS = (0, 1, 2, 3, 5, 8)


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
